"""The manifest: a JSON table of a checkpoint's tensors and files, and of its indices (`index.py`).  Pure.

    manifest.json
    {"sha256": "...",                            of the rest, as compact JSON with sorted keys
     "format": "megazero-checkpoint", "version": 3, "step": 20,
     "progress": {...},                          counters of the run
     "config": {"name": "config.yaml", "sha256": "..."},
     "tensors": [{"parameter": "wte.weight", "kind": "weight", "shape": [1000, 60], "dtype": "F32"}, ...],
     "files": [{"name": "rank_00000.safetensors", "num_bytes": 4000, "header_bytes": 400, "header_sha256": "..."}, ...],
     "indices": [{"name": "index_00000.jsonl", "num_bytes": 9000, "directory_bytes": 700, "directory_sha256": "...",
                  "num_tensors": 7, "num_boxes": 9}, ...]}

A *tensor* here is one kind of state of one parameter (its weight, say).  The first index has the boxes of the first
`num_tensors` tensors of the manifest, the second those of the tensors after them, so that who reads a tensor reads one
index.  A file is a safetensors file: a header, then boxes back to back, dense and row-major.  Files of large jobs lie
in sub-folders.  Version 1 has no indices: each of the manifest's files has its boxes with it.  Version 2, whose indices
had no directories, was never released.

A checkpoint may come from an untrusted source, so `parse_manifest` validates all of it, and `header_problem` compares
boxes with the headers of the data files, which describe the same ones.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
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
VERSION = 3
# Bounds of what is written, which bound what is read.
BOX_BYTES = 64 << 20
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
MAX_INDEX_BYTES = 512 << 20
MAX_INDICES = 120

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
WIRES: StateKind = "wires"  # the kind of tensors that are of a rank and of no parameter (wires.py)

_MAX_PROBLEMS = 20
_PLAIN_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_DATA_FILE_NAME = re.compile(rf"(?:ranks_[0-9]{{5,9}}/)?{_PLAIN_FILE_NAME.pattern}")

_strict = ConfigDict(extra="forbid", strict=True)
# Bounds that keep every product of these numbers far below what torch or the file system could hold.
_Dim = Annotated[int, Field(ge=0, le=2**48)]
Dims = Annotated[tuple[_Dim, ...], Field(max_length=16)]
Position = Annotated[int, Field(ge=0, le=2**62)]
Kind = Annotated[StateKind, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, config=_strict)
class TensorEntry:
    """One kind of state of one parameter: its full, unpadded shape and its dtype."""

    parameter: str
    kind: Kind
    shape: Dims
    dtype: DtypeName


@dataclass(frozen=True, config=_strict)
class BoxEntry:
    """One stored box: the region it covers, the bytes of its file that hold it, and their hash."""

    parameter: str
    kind: Kind
    offset: Dims
    lengths: Dims
    begin: Position
    end: Position
    sha256: Digest

    @property
    def box(self) -> Box:
        return Box(self.offset, self.lengths)


@dataclass(frozen=True, config=_strict)
class FileEntry:
    """One data file."""

    name: str
    num_bytes: Position
    header_bytes: Annotated[int, Field(ge=8, le=MAX_HEADER_BYTES)]
    header_sha256: Digest


@dataclass(frozen=True, config=_strict)
class FileBoxes:
    """Boxes of one data file, by its name, in the order of their bytes."""

    name: str
    boxes: tuple[BoxEntry, ...]


@dataclass(frozen=True, config=_strict)
class BoxTable:
    """Boxes of one tensor or of several, by data file."""

    files: tuple[FileBoxes, ...]


@dataclass(frozen=True, config=_strict)
class IndexEntry:
    """One index file: what it and the directory at its beginning must be, and how many tensors and boxes are in it."""

    name: str
    num_bytes: Annotated[int, Field(ge=0, le=MAX_INDEX_BYTES)]
    directory_bytes: Annotated[int, Field(ge=0, le=MAX_INDEX_BYTES)]
    directory_sha256: Digest
    num_tensors: Position
    num_boxes: Position


@dataclass(frozen=True, config=_strict)
class ConfigEntry:
    """The file with the run's resolved configuration."""

    name: str
    sha256: Digest


@dataclass(frozen=True, config=_strict)
class Manifest:
    """The table of a whole checkpoint; `indices` is empty in version 1."""

    step: Position
    progress: dict[str, JsonValue]
    config: ConfigEntry
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]
    indices: Annotated[tuple[IndexEntry, ...], Field(max_length=MAX_INDICES)]
    format: Literal["megazero-checkpoint"] = "megazero-checkpoint"
    version: Literal[1, 3] = 3

    def tensors_of(self, number: int) -> tuple[TensorEntry, ...]:
        """Return the tensors whose boxes are in the index of this number."""
        first = sum(entry.num_tensors for entry in self.indices[:number])
        return self.tensors[first : first + self.indices[number].num_tensors]


@dataclass(frozen=True, config=_strict)
class _FileOfVersion1(FileEntry):
    boxes: tuple[BoxEntry, ...]


@dataclass(frozen=True, config=_strict)
class _ManifestOfVersion1:
    step: Position
    progress: dict[str, JsonValue]
    config: ConfigEntry
    tensors: tuple[TensorEntry, ...]
    files: tuple[_FileOfVersion1, ...]
    format: Literal["megazero-checkpoint"]
    version: Literal[1]


_MANIFEST = TypeAdapter(Manifest)
_MANIFEST_OF_VERSION_1 = TypeAdapter(_ManifestOfVersion1)
_DTYPE_NAMES: Mapping[torch.dtype, DtypeName] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """Return the name of a dtype in files; raise CheckpointError for one that cannot be stored (complex, say)."""
    if dtype not in _DTYPE_NAMES:
        raise CheckpointError(Problem(f"a tensor of {dtype}", "this dtype cannot be stored", ", ".join(DTYPES)))
    return _DTYPE_NAMES[dtype]


def dtype_bytes(name: DtypeName) -> int:
    """Return the bytes of an element."""
    return DTYPES[name].itemsize


def layout_problems(entry: TensorEntry, region: Box, boxes: Iterable[Box]) -> Iterator[Problem]:
    """Yield a problem for each part of a region that none of the tensor's `boxes` holds, or several; at most two."""
    for defect in islice(tiling_defects(region, boxes), 2):
        rule = "stored nowhere" if defect.kind == "hole" else "stored more than once"
        yield Problem(f"{describe(entry)}, region {format_box(defect.box)}", rule)


def full_shapes(tensors: Iterable[TensorEntry]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter: that of its weights, which the optimizer's averages are 1 along dims of."""
    entries = sorted(tensors, key=lambda entry: (entry.kind == "weight", math.prod(entry.shape)))
    return {entry.parameter: entry.shape for entry in entries}


def box_key(kind: StateKind, parameter: str, box: Box) -> str:
    """Return the name of a box in the header of its file: `exp_avg/wte.weight[0:15,0:60]`."""
    return f"{kind}/{parameter}{format_box(box)}"


def header_problem(
    file: FileEntry, boxes: Iterable[BoxEntry], dtypes: Mapping[TensorKey, DtypeName], header: bytes, *, is_all: bool
) -> str:
    """Return the rule that the header of a data file breaks, "" if it describes these boxes of the indices.

    dtypes: those of the manifest's tensors.  is_all: `boxes` are all of the file; the header may describe no others.
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
        for entry in boxes
    }
    if int.from_bytes(header[:8], "little") != len(header) - 8 or not isinstance(table, dict):
        return "damaged: it does not begin with the header of a safetensors file"
    table.pop("__metadata__", None)
    for key in described.keys() | (table.keys() if is_all else set()):
        if table.get(key) != described.get(key):
            return f"its header has {str(table.get(key))[:200]} for {key[:200]}, the index {described.get(key)}"
    return ""


def describe(entry: TensorEntry) -> str:
    """Describe a tensor: `weight of wte.weight, F32 [1000, 60]`."""
    return f"{entry.kind} of {entry.parameter}, {entry.dtype} {list(entry.shape)}"


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON with its hash; raise ValueError for infinities or NaN in `progress`."""
    body = _MANIFEST.dump_python(manifest, mode="json")
    return json.dumps({"sha256": body_hash(body), **body}, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def parse_manifest(text: bytes, *, source: str) -> tuple[Manifest, BoxTable | None]:
    """Parse a manifest and check that it is complete, unaltered, and that every name and number in it is valid.

    Returns with it the boxes that it lists itself, in version 1; None in version 3, whose boxes are in its indices.

    Raises DamageError with all problems (the first twenty), and CheckpointError for an unaltered one of another format
    or version; `source` is the file to name in them.
    """
    body = _read_body(text, source)
    try:
        manifest, boxes = _validated(body)
    except ValidationError as error:
        raise DamageError(*schema_problems(error, source)) from None
    found = [_content_problems(manifest, source)]
    if boxes is not None:
        tensors = {(entry.parameter, entry.kind): entry for entry in manifest.tensors}
        files = {file.name: file for file in manifest.files}
        found += [table_problems(boxes, files, tensors, source), _filling_problems(boxes, manifest, source)]
    raise_problems(DamageError, islice(chain.from_iterable(found), _MAX_PROBLEMS))
    return manifest, boxes


def _validated(body: dict[str, Any]) -> tuple[Manifest, BoxTable | None]:
    text = json.dumps(body)
    if body["version"] == VERSION:
        return _MANIFEST.validate_json(text), None
    old = _MANIFEST_OF_VERSION_1.validate_json(text)
    files = tuple(FileEntry(each.name, each.num_bytes, each.header_bytes, each.header_sha256) for each in old.files)
    manifest = Manifest(old.step, old.progress, old.config, old.tensors, files, indices=(), version=1)
    return manifest, BoxTable(tuple(FileBoxes(each.name, each.boxes) for each in old.files))


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
    if type(version) is not int or version not in (1, VERSION):
        rule = "this version of megazero cannot read that version of the format"
        raise kind(Problem(f"{source}: version {str(version)[:80]}", rule, f"1 or {VERSION}"))
    if digest != computed:
        raise DamageError(Problem(source, "damaged: the content does not match the hash stored with it"))
    return dict(body)


def schema_problems(error: ValidationError, source: str) -> list[Problem]:
    """Return what does not have the form of its table, with the place in the JSON."""
    errors = error.errors(include_url=False, include_context=False)
    return [
        Problem(f"{source}: {'.'.join(map(str, each['loc']))} = {str(each['input'])[:80]}", each["msg"])
        for each in errors[:_MAX_PROBLEMS]
    ]


def _content_problems(manifest: Manifest, source: str) -> Iterator[Problem]:
    data = [file.name for file in manifest.files]
    names = [manifest.config.name, *(entry.name for entry in manifest.indices)]
    legal = _PLAIN_FILE_NAME if manifest.version == 1 else _DATA_FILE_NAME
    for name, count in Counter([*names, *data]).items():
        if not (legal if name not in names else _PLAIN_FILE_NAME).fullmatch(name):
            yield Problem(f"{source}: file {name[:80]!r}", "must be a plain file name inside the checkpoint's folder")
        elif count > 1:
            yield Problem(f"{source}: file {name!r}", "named more than once")
    indexed = sum(entry.num_tensors for entry in manifest.indices)
    if manifest.version != 1 and indexed != len(manifest.tensors):
        yield Problem(f"{source}: {len(manifest.tensors)} tensors", f"its indices have {indexed}")
    yield from _tensor_problems(manifest, source)


def table_problems(
    table: BoxTable, files: Mapping[str, FileEntry], tensors: Mapping[TensorKey, TensorEntry], source: str
) -> Iterator[Problem]:
    """Yield what is wrong with a table, which may have boxes of these tensors, in these files."""
    seen: set[str] = set()
    for each in table.files:
        where = f"{source}: {each.name[:80]}"
        if each.name not in files or each.name in seen:
            yield Problem(where, "listed more than once" if each.name in seen else "the manifest lists no such file")
            continue
        seen.add(each.name)
        yield from _box_problems(files[each.name], each.boxes, tensors, where)


def _filling_problems(table: BoxTable, manifest: Manifest, source: str) -> Iterator[Problem]:
    boxes = {each.name: each.boxes for each in table.files}
    for file in manifest.files:
        yield from filling_problems(file, boxes.get(file.name, ()), f"{source}: {file.name[:80]}")


def _tensor_problems(manifest: Manifest, source: str) -> Iterator[Problem]:
    shapes = full_shapes(manifest.tensors)
    for (parameter, kind), count in Counter((entry.parameter, entry.kind) for entry in manifest.tensors).items():
        if count > 1:
            yield Problem(f"{source}: {kind} of {parameter}", "listed more than once")
    for entry in manifest.tensors:
        full = shapes[entry.parameter]
        if len(entry.shape) != len(full) or any(
            n not in (1, all_of) for n, all_of in zip(entry.shape, full, strict=True)
        ):
            yield Problem(f"{source}: {describe(entry)}", f"its other state has shape {list(full)}")
        if math.prod(max(1, length) for length in entry.shape) > 2**58:
            yield Problem(f"{source}: {describe(entry)}", "larger than any tensor can be")


def _box_problems(
    file: FileEntry, boxes: Iterable[BoxEntry], tensors: Mapping[TensorKey, TensorEntry], where: str
) -> Iterator[Problem]:
    """Yield what is wrong with boxes of one file: each must be a region of its tensor, in bytes of its own."""
    position = file.header_bytes
    for entry in boxes:
        given = f"{where}: {entry.kind} of {entry.parameter} {list(entry.offset)} + {list(entry.lengths)}"
        tensor = tensors.get((entry.parameter, entry.kind))
        if tensor is None:
            yield Problem(given, "the manifest lists no such tensor here")
        elif not is_inside(entry.box, tensor.shape):
            yield Problem(given, f"not a region of a tensor of shape {list(tensor.shape)}")
        elif (
            entry.end - entry.begin != entry.box.numel * dtype_bytes(tensor.dtype)
            or not position <= entry.begin <= entry.end <= file.num_bytes
        ):
            yield Problem(f"{given}, bytes {entry.begin} to {entry.end}", "boxes must fill the file back to back")
        elif entry.end - entry.begin > BOX_BYTES:
            yield Problem(f"{given}, {entry.end - entry.begin} bytes", f"a box has at most {BOX_BYTES} bytes")
        position = entry.end


def filling_problems(file: FileEntry, boxes: Iterable[BoxEntry], where: str) -> Iterator[Problem]:
    """Yield a problem if these, all boxes of a file in the order of their bytes, do not fill it back to back."""
    position = file.header_bytes
    for entry in boxes:
        if entry.begin != position:
            yield Problem(f"{where}: bytes {entry.begin} to {entry.end}", "boxes must fill the file back to back")
            return
        position = entry.end
    if position != file.num_bytes:
        yield Problem(f"{where}: {file.num_bytes} bytes", f"its boxes end at byte {position}")


def is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    """Return True if a box of any dims has elements, and all of them are of a tensor of this shape."""
    if not len(box.offset) == len(box.lengths) == len(shape):
        return False
    return all(n > 0 and o + n <= full for o, n, full in zip(box.offset, box.lengths, shape, strict=True))
