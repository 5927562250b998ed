"""Megatron-LM's torch_dist checkpoints: `.metadata` lists the chunks of every tensor, files `*.distcp` hold them.

    iter_0000100/common.pt, .metadata, __0_0.distcp, __0_1.distcp, ...

Tensors are whole logical ones, cut into chunks by what each rank had.  Those of all layers are usually one tensor, with
a dim of layers in front.  The optimizer's states have the names of their parameters where the optimizer was saved by
parameters; those of flat buckets are left out.  A chunk is what `torch.save` writes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.checkpoint.foreign.names import LAYERS, core_name, in_layer, layer_of
from megazero.checkpoint.foreign.pickles import MAX_BYTES, Record, read_pickle
from megazero.checkpoint.foreign.settings import arguments_of
from megazero.checkpoint.foreign.torch_files import StoredTensor, TorchFile
from megazero.checkpoint.slices import format_box, tiling_defects
from megazero.errors import CheckpointError, DamageError, Problem
from megazero.files import read_bounded
from megazero.parallel.param_spec import Box

METADATA, COMMON = ".metadata", "common.pt"
_TENSOR = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"
_MAX_DIMS, _MAX_PARTS, _MAX_NUMBER = 8, 1 << 20, 2**48
# Gate and value of SwiGLU may be tensors of their own.
_HALVES = ("_w", "_v")
# {the beginning of a name: the kind of state}; of two of a kind the first is taken.
_KINDS = (
    ("optimizer.state.fp32_param.", "weight"),
    ("optimizer.state.param.", "weight"),
    ("optimizer.state.exp_avg.", "exp_avg"),
    ("optimizer.state.exp_avg_sq.", "exp_avg_sq"),
)


# By the name of a tensor and where a chunk of it begins: the fields of the chunk's place.
_Places = dict[tuple[str, tuple[int, ...]], Mapping[str, Any]]


class _Chunk(NamedTuple):
    """A box of a tensor, and the bytes of the file that holds it."""

    box: Box
    file: str
    begin: int
    length: int


class _Whole(NamedTuple):
    """A tensor, cut into chunks."""

    shape: tuple[int, ...]
    chunks: list[_Chunk]


class _Part(NamedTuple):
    """A tensor, or that of one layer in a tensor of all layers."""

    whole: _Whole
    layer: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape if self.layer is None else self.whole.shape[1:]


class DistributedFiles:
    """The states in a torch_dist checkpoint, by Megatron-core's names."""

    reason = (
        "it has no optimizer states by parameters: none at all, or in flat buckets"
        " (--dist-ckpt-optim-fully-reshardable saves them by parameters)"
    )

    def __init__(self, folder: Path) -> None:
        self.path = folder
        common = TorchFile(folder / COMMON, inside=folder).content
        self.arguments = arguments_of(common, given=str(folder / COMMON))
        self.progress: Mapping[str, Any] = common
        self._parts: dict[tuple[str, str], dict[str, _Part]] = {}
        # The optimizer's weights are the exact ones, and come behind the model's.
        found = sorted(_read_metadata(folder).items(), key=lambda item: (item[0].startswith("optimizer."), item[0]))
        for name, whole in found:
            self._add(name, whole)
        weights, *of_moments = (
            {name for kind, name in self._parts if kind == wanted} for wanted in ("weight", "exp_avg", "exp_avg_sq")
        )
        self.kinds: tuple[str, ...] = ("exp_avg", "exp_avg_sq") if of_moments == [weights, weights] else ()

    def _add(self, name: str, whole: _Whole) -> None:
        prefix, kind = next((each for each in _KINDS if name.startswith(each[0])), ("", "weight"))
        core = core_name(name.removeprefix(prefix))
        if core is None or (not prefix and name.startswith(("optimizer.", "rng_state", "rerun_state", "chained_"))):
            return
        half = next((end for end in _HALVES if core.endswith(end)), "")
        core = core.removesuffix(half)
        is_stacked = core.startswith(f"{LAYERS}.") and layer_of(core) is None and bool(whole.shape)
        for layer in range(whole.shape[0]) if is_stacked else [None]:
            own = core if layer is None else in_layer(layer, core.removeprefix(f"{LAYERS}."))
            self._parts.setdefault((kind, own), {})[half] = _Part(whole, layer)
            if len(self._parts) > _MAX_PARTS:
                raise CheckpointError(Problem(f"{self.path}: {name} of {whole.shape[0]} layers", "a GPT has fewer"))

    def names(self) -> Iterator[str]:
        """Yield the names of all parameters."""
        yield from (name for kind, name in self._parts if kind == "weight")

    def shape(self, name: str, kind: str) -> list[int] | None:
        """Return a tensor's shape, None if there is none."""
        parts = list(self._parts.get((kind, name), {}).values())
        if not parts or any(each.shape[1:] != parts[0].shape[1:] for each in parts):
            return None
        return list(parts[0].shape) if len(parts) == 1 else [sum(each.shape[0] for each in parts), *parts[0].shape[1:]]

    def tensor(self, name: str, kind: str) -> Tensor:
        """Read a tensor."""
        parts = self._parts[kind, name]
        return torch.cat([self._read(parts[half]) for half in ("", *_HALVES) if half in parts])

    def _read(self, part: _Part) -> Tensor:
        region = Box((0,) * len(part.shape), part.shape)
        chunks = [(chunk, *_in_layer(chunk.box, part.layer)) for chunk in part.whole.chunks]
        held = [(chunk, index, box) for chunk, index, box in chunks if box is not None]
        for defect in tiling_defects(region, (box for _, _, box in held)):
            given = f"{self.path}: {format_box(defect.box)} of a tensor of shape {list(part.shape)}"
            raise DamageError(Problem(given, f"chunks fill a tensor, each element once: {defect.kind}"))
        made = None
        for chunk, index, box in held:
            values = self._read_chunk(chunk)
            if made is None:
                made = torch.empty(part.shape, dtype=values.dtype)
            ranges = (slice(at, at + size) for at, size in zip(box.offset, box.lengths, strict=True))
            made[tuple(ranges)] = values if index is None else values[index]
        assert made is not None, "a tensor of no elements has no row in a model"
        return made

    def _read_chunk(self, chunk: _Chunk) -> Tensor:
        path = self.path / chunk.file
        file = TorchFile(path, inside=self.path, begin=chunk.begin, length=chunk.length)
        try:
            if not isinstance(file.content, StoredTensor) or file.content.shape != chunk.box.lengths:
                raise DamageError(
                    Problem(f"{path}, byte {chunk.begin}", f"a tensor of shape {list(chunk.box.lengths)}")
                )
            return file.content.read()
        finally:
            file.close()


def _in_layer(box: Box, layer: int | None) -> tuple[int | None, Box | None]:
    """Return the place of a layer in a chunk, and the chunk's box in the layer's tensor; None where it has no part."""
    if layer is None:
        return None, box
    index = layer - box.offset[0]
    return (index, Box(box.offset[1:], box.lengths[1:])) if 0 <= index < box.lengths[0] else (None, None)


def _read_metadata(folder: Path) -> dict[str, _Whole]:
    """Return the tensors of a checkpoint by name; raises CheckpointError for an illegal table."""
    path = folder / METADATA
    try:
        content = read_bounded(path, MAX_BYTES, inside=folder)
    except OSError as error:
        raise CheckpointError(Problem(f"{path}: {error.strerror}", "the table of a torch_dist checkpoint")) from error
    table = read_pickle(content, source=str(path))
    fields = table.fields() if isinstance(table, Record) else {}
    tensors, places = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        rule = "the table of a torch_dist checkpoint: state_dict_metadata, storage_data"
        raise CheckpointError(Problem(str(path), rule))
    where: _Places = {}
    for index, place in places.items():
        key, info = _fields(index), _fields(place)
        name, offset = key.get("fqn"), key.get("offset")
        if isinstance(name, str) and isinstance(offset, tuple):
            if info.get("transform_descriptors"):
                raise CheckpointError(Problem(f"{path}: {name[:200]}", "compressed chunks cannot be read"))
            where[name, offset] = info
    found: dict[str, _Whole] = {}
    for name, entry in tensors.items():
        if isinstance(name, str) and isinstance(entry, Record) and entry.name == _TENSOR:
            try:
                found[name] = _whole(name, entry.fields(), where)
            except ValueError as error:
                raise DamageError(Problem(f"{path}: {name[:200]}: {error}", "chunks fill a tensor")) from None
    return found


def _whole(name: str, fields: Mapping[str, Any], where: _Places) -> _Whole:
    """Return a tensor of the table; raises ValueError for an illegal one."""
    shape, chunks = _numbers(fields.get("size")), []
    listed = fields.get("chunks")
    for each in listed if isinstance(listed, list) else []:
        offset, sizes = (_numbers(_fields(each).get(key)) for key in ("offsets", "sizes"))
        is_box = len(offset) == len(sizes) == len(shape)
        if not is_box or any(at + size > full for at, size, full in zip(offset, sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {list(sizes)} from {list(offset)} in {list(shape)}")
        place = where.get((name, offset), {})
        file = place.get("relative_path")
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise ValueError(f"a chunk in {str(file)[:80]!r}, which is no file of the folder")
        begin, length = _numbers((place.get("offset"), place.get("length")))
        chunks.append(_Chunk(Box(offset, sizes), file, begin, length))
    return _Whole(shape, chunks)


def _fields(value: object) -> Mapping[str, Any]:
    return value.fields() if isinstance(value, Record) else {}


def _numbers(values: object) -> tuple[int, ...]:
    """Return a tuple of few, whole and bounded numbers; raises ValueError for anything else."""
    numbers = values if isinstance(values, tuple) and len(values) <= _MAX_DIMS else (None,)
    if not all(type(each) is int and 0 <= each < _MAX_NUMBER for each in numbers):
        raise ValueError(f"{str(values)[:80]} where numbers belong")
    return numbers
