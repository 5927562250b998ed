"""The manifest: a JSON table of a checkpoint's tensors and the positions of their boxes.  Pure; touches no file.

    {"sha256": "...",                            of the rest, as compact JSON with sorted keys
     "format": "megazero-checkpoint", "version": 1, "step": 20,
     "progress": {...},                          counters of the run
     "config": {"name": "config.yaml", "sha256": "..."},
     "tensors": [{"parameter": "wte.weight", "kind": "weight", "shape": [1000, 60], "dtype": "F32"}, ...],
     "files": [{"name": "rank_00000.safetensors", "num_bytes": 4000, "header_bytes": 400, "header_sha256": "...",
                "boxes": [{"parameter": "wte.weight", "kind": "weight", "offset": [0, 0], "lengths": [15, 60],
                           "begin": 400, "end": 4000, "sha256": "..."}, ...]}, ...]}

A *tensor* here is one kind of state of one parameter (its weight, say).  A file is a safetensors file: a header, then
boxes back to back, dense and row-major; `begin` and `end` are bytes from the start of the file.  A *part* is what one
rank contributes.  A manifest may come from an untrusted source, so `parse_manifest` validates all of it, and
`header_problem` compares it with the headers of the data files, which describe the same boxes.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megazero.checkpoint.runs import MAX_TENSORS, body_hash
from megazero.checkpoint.slices import format_box, tiling_defects
from megazero.errors import CheckpointError, DamageError, Problem, raise_problems
from megazero.files import parse_json
from megazero.parallel.param_spec import Box, StateKind

FORMAT = "megazero-checkpoint"
VERSION = 1
# Bounds of what is written, which bound what is read.
BOX_BYTES = 64 << 20
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself

DtypeName = Literal["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL"]

# Dtypes by their names in safetensors files.
DTYPES: Mapping[DtypeName, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)

TensorKey = tuple[str, StateKind]

_MAX_PROBLEMS = 20
_PLAIN_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")

_strict = ConfigDict(extra="forbid", strict=True)
# Bounds that keep every product of these numbers far below what torch or the file system could hold.
_Dim = Annotated[int, Field(ge=0, le=2**48)]
_Dims = Annotated[tuple[_Dim, ...], Field(max_length=16)]
_Position = Annotated[int, Field(ge=0, le=2**62)]
_Kind = Annotated[StateKind, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, config=_strict)
class TensorEntry:
    """One kind of state of one parameter: its full, unpadded shape and its dtype."""

    parameter: str
    kind: _Kind
    shape: _Dims
    dtype: DtypeName


@dataclass(frozen=True, config=_strict)
class BoxEntry:
    """One stored box: the region it covers, the bytes of its file that hold it, and their hash."""

    parameter: str
    kind: _Kind
    offset: _Dims
    lengths: _Dims
    begin: _Position
    end: _Position
    sha256: _Digest

    @property
    def box(self) -> Box:
        return Box(self.offset, self.lengths)


@dataclass(frozen=True, config=_strict)
class FileEntry:
    """One data file, with its boxes in the order of their bytes."""

    name: str
    num_bytes: _Position
    header_bytes: Annotated[int, Field(ge=8, le=MAX_HEADER_BYTES)]
    header_sha256: _Digest
    boxes: tuple[BoxEntry, ...]


@dataclass(frozen=True, config=_strict)
class ConfigEntry:
    """The file with the run's resolved configuration."""

    name: str
    sha256: _Digest


@dataclass(frozen=True, config=_strict)
class RankPart:
    """The tensors and the file of one rank; `tensors` includes those of which it has nothing but padding.

    save_id: the id of the save that it belongs to.
    """

    save_id: str
    tensors: tuple[TensorEntry, ...]
    file: FileEntry


@dataclass(frozen=True, config=_strict)
class Manifest:
    """The table of a whole checkpoint."""

    step: _Position
    progress: dict[str, JsonValue]
    config: ConfigEntry
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]
    format: Literal["megazero-checkpoint"] = "megazero-checkpoint"
    version: Literal[1] = 1


_PART = TypeAdapter(RankPart)
_MANIFEST = TypeAdapter(Manifest)
_DTYPE_NAMES: Mapping[torch.dtype, DtypeName] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """Return the name of a dtype in files; raise CheckpointError for one that cannot be stored (complex, say)."""
    if dtype not in _DTYPE_NAMES:
        raise CheckpointError(Problem(f"a tensor of {dtype}", "this dtype cannot be stored", ", ".join(DTYPES)))
    return _DTYPE_NAMES[dtype]


def dtype_bytes(name: DtypeName) -> int:
    """Return the bytes of an element."""
    return DTYPES[name].itemsize


def dump_part(part: RankPart) -> bytes:
    """Return a rank's part as JSON, for rank 0, which merges parts."""
    return _PART.dump_json(part)


def parse_part(text: bytes) -> RankPart:
    """Parse the output of `dump_part`; megazero wrote it, so a fault in it is a bug (pydantic.ValidationError)."""
    return _PART.validate_json(text)


def merge_parts(parts: list[RankPart], *, step: int, progress: dict[str, JsonValue], config: ConfigEntry) -> Manifest:
    """Merge all ranks' parts into a manifest; raise CheckpointError when they disagree on a tensor's shape or dtype."""
    tensors: dict[tuple[str, str], TensorEntry] = {}
    problems: list[Problem] = []
    for rank, part in enumerate(parts):
        for entry in part.tensors:
            known = tensors.setdefault((entry.parameter, entry.kind), entry)
            if known != entry:
                problems.append(Problem(f"rank {rank}: {describe(entry)}", f"other ranks have {describe(known)}"))
    raise_problems(CheckpointError, problems[:_MAX_PROBLEMS])
    files = tuple(part.file for part in parts)
    return Manifest(step=step, progress=progress, config=config, tensors=tuple(tensors.values()), files=files)


def layout_problems(manifest: Manifest) -> Iterator[Problem]:
    """Yield a problem for each region of a tensor that no box holds, or more than one; at most two a tensor."""
    boxes: dict[TensorKey, list[Box]] = {(entry.parameter, entry.kind): [] for entry in manifest.tensors}
    for file in manifest.files:
        for box in file.boxes:
            boxes[box.parameter, box.kind].append(box.box)
    for entry in manifest.tensors:
        yield from tensor_layout_problems(entry, boxes[entry.parameter, entry.kind])


def tensor_layout_problems(entry: TensorEntry, boxes: Sequence[Box]) -> Iterator[Problem]:
    """Yield a problem for each region of one tensor that none of its stored `boxes` holds, or several; at most two."""
    for defect in islice(tiling_defects(entry.shape, boxes), 2):
        rule = "stored nowhere" if defect.kind == "hole" else "stored more than once"
        yield Problem(f"{describe(entry)}, region {format_box(defect.box)}", rule)


def box_key(kind: StateKind, parameter: str, box: Box) -> str:
    """Return the name of a box in the header of its file: `exp_avg/wte.weight[0:15,0:60]`."""
    return f"{kind}/{parameter}{format_box(box)}"


def header_problem(file: FileEntry, dtypes: Mapping[TensorKey, DtypeName], header: bytes) -> str:
    """Return the rule that the header of a data file breaks, "" if it describes the boxes that the manifest lists.

    dtypes: those of the manifest's tensors.
    """
    if hashlib.sha256(header).hexdigest() != file.header_sha256:
        return "damaged: its header does not match the hash in the manifest"
    try:
        table = parse_json(header[8:])
    except ValueError:
        table = None
    start = file.header_bytes
    described = {
        box_key(entry.kind, entry.parameter, entry.box): {
            "dtype": dtypes[entry.parameter, entry.kind],
            "shape": list(entry.lengths),
            "data_offsets": [entry.begin - start, entry.end - start],
        }
        for entry in file.boxes
    }
    if int.from_bytes(header[:8], "little") != len(header) - 8 or not isinstance(table, dict):
        return "damaged: it does not begin with the header of a safetensors file"
    table.pop("__metadata__", None)
    for key in described.keys() | table.keys():
        if table.get(key) != described.get(key):
            return f"its header has {str(table.get(key))[:200]} for {key[:200]}, the manifest {described.get(key)}"
    return ""


def describe(entry: TensorEntry) -> str:
    """Describe a tensor: `weight of wte.weight, F32 [1000, 60]`."""
    return f"{entry.kind} of {entry.parameter}, {entry.dtype} {list(entry.shape)}"


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON with its hash; raise ValueError for infinities or NaN in `progress`."""
    body = _MANIFEST.dump_python(manifest, mode="json")
    return json.dumps({"sha256": body_hash(body), **body}, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def parse_manifest(text: bytes, *, source: str) -> Manifest:
    """Parse a manifest and check that it is complete, unaltered, and that every name and number in it is valid.

    Raises DamageError with all problems (the first twenty), and CheckpointError for an unaltered one of another format
    or version; `source` is the file to name in them.
    """
    body = _read_body(text, source)
    try:
        manifest = _MANIFEST.validate_json(json.dumps(body))
    except ValidationError as error:
        raise DamageError(*_schema_problems(error, source)) from None
    raise_problems(DamageError, islice(_content_problems(manifest, source), _MAX_PROBLEMS))
    return manifest


def _read_body(text: bytes, source: str) -> dict[str, Any]:
    """Return the JSON without its hash; check what needs no look at entries: JSON, format, version, hash."""
    if text.count(b'"dtype"') > MAX_TENSORS:  # parsing would take minutes
        raise DamageError(Problem(source, f"lists more than {MAX_TENSORS} tensors"))
    try:
        body = parse_json(text)
        digest = body.pop("sha256", None)
        computed = body_hash(body)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = f"not a checkpoint's manifest: {type(error).__name__}: {str(error)[:200]}"
        raise DamageError(Problem(source, reason)) from None
    version = body.get("version")
    kind = DamageError if digest != computed or type(version) is bool else CheckpointError
    if body.get("format") != FORMAT:
        given = f"{source}: format {str(body.get('format'))[:80]!r}"
        raise kind(Problem(given, "not a checkpoint of megazero", FORMAT))
    if version != VERSION or type(version) is not int:
        rule = "this version of megazero cannot read that version of the format"
        raise kind(Problem(f"{source}: version {str(version)[:80]}", rule, str(VERSION)))
    if digest != computed:
        raise DamageError(Problem(source, "damaged: the content does not match the hash stored with it"))
    return dict(body)


def _schema_problems(error: ValidationError, source: str) -> list[Problem]:
    errors = error.errors(include_url=False, include_context=False)
    return [
        Problem(f"{source}: {'.'.join(map(str, each['loc']))} = {str(each['input'])[:80]}", each["msg"])
        for each in errors[:_MAX_PROBLEMS]
    ]


def _content_problems(manifest: Manifest, source: str) -> Iterator[Problem]:
    names = [manifest.config.name, *(file.name for file in manifest.files)]
    for name, count in Counter(names).items():
        if not _PLAIN_FILE_NAME.fullmatch(name):
            yield Problem(f"{source}: file {name[:80]!r}", "must be a plain file name inside the checkpoint's folder")
        elif count > 1:
            yield Problem(f"{source}: file {name!r}", "named more than once")
    yield from _tensor_problems(manifest, source)
    tensors = {(entry.parameter, entry.kind): entry for entry in manifest.tensors}
    for file in manifest.files:
        yield from _file_problems(file, tensors, f"{source}: {file.name[:80]}")


def _tensor_problems(manifest: Manifest, source: str) -> Iterator[Problem]:
    shapes: dict[str, tuple[int, ...]] = {}
    for (parameter, kind), count in Counter((entry.parameter, entry.kind) for entry in manifest.tensors).items():
        if count > 1:
            yield Problem(f"{source}: {kind} of {parameter}", "listed more than once")
    for entry in manifest.tensors:
        if shapes.setdefault(entry.parameter, entry.shape) != entry.shape:
            yield Problem(f"{source}: {describe(entry)}", f"its other state has shape {list(shapes[entry.parameter])}")
        if math.prod(max(1, length) for length in entry.shape) > 2**58:
            yield Problem(f"{source}: {describe(entry)}", "larger than any tensor can be")


def _file_problems(file: FileEntry, tensors: dict[TensorKey, TensorEntry], where: str) -> Iterator[Problem]:
    position = file.header_bytes
    for entry in file.boxes:
        given = f"{where}: {entry.kind} of {entry.parameter} {list(entry.offset)} + {list(entry.lengths)}"
        tensor = tensors.get((entry.parameter, entry.kind))
        if tensor is None:
            yield Problem(given, "the manifest lists no such tensor")
        elif not _is_inside(entry, tensor.shape):
            yield Problem(given, f"not a region of a tensor of shape {list(tensor.shape)}")
        elif entry.begin != position or entry.end - entry.begin != entry.box.numel * dtype_bytes(tensor.dtype):
            yield Problem(f"{given}, bytes {entry.begin} to {entry.end}", "boxes must fill the file back to back")
        elif entry.end - entry.begin > BOX_BYTES:
            yield Problem(f"{given}, {entry.end - entry.begin} bytes", f"a box has at most {BOX_BYTES} bytes")
        position = entry.end
    if position != file.num_bytes:
        yield Problem(f"{where}: {file.num_bytes} bytes", f"its boxes end at byte {position}")


def _is_inside(entry: BoxEntry, shape: tuple[int, ...]) -> bool:
    if not len(entry.offset) == len(entry.lengths) == len(shape):
        return False
    return all(n > 0 and o + n <= full for o, n, full in zip(entry.offset, entry.lengths, shape, strict=True))
