"""Saves a model's parameters as one safetensors file: working parameters unit by unit, master weights one by one.

The file has the entries of the model's state_dict.  Its header needs shapes only, so it is written first; then each
unit is gathered on all ranks, rank 0 writes its tensors, and the unit is released: no rank has more than one unit.
A tensor that has several names is stored under the first, and the others are recorded in the header's metadata,
{name: stored as}, as safetensors.torch.save_model does.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.manifest import dtype_name
from megazero.comm.mesh import Mesh
from megazero.errors import CheckpointError, UserError
from megazero.files import AsideFile
from megazero.library.state.optimizer import gathered_state
from megazero.parallel.param_spec import Unit
from megazero.zero.engine import Engine
from megazero.zero.parameters.gathered import GatheredParameters

_ALIGNMENT = 8
_NO_UNIT = -1  # the unit of buffers, which every rank has


class TensorToStore(NamedTuple):
    """A tensor to store; `unit` is the index of its unit in the model, `dtype` its number format in the file."""

    name: str
    tensor: Tensor
    unit: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


def save_model(
    model: nn.Module, units: Sequence[Unit], path: Path, mesh: Mesh, *, masters: Engine | None = None
) -> None:
    """Write the file; a collective call.  It appears whole or not at all; raises CheckpointError on all ranks.

    masters: the engine whose master weights are written instead of working parameters.
    """
    stored, aliases = contents(model, units, None if masters is None else masters.plan.optimizer.dtype)
    start = header(stored, aliases)
    writer = _Writer(path, start) if mesh.world.rank == 0 else None
    try:
        _write_all(stored, writer, masters)
        all_or_none(mesh.control, lambda: None if writer is None else writer.publish(), doing=f"writing {path}")
    finally:
        if writer is not None:
            writer.discard()


def _write_all(stored: Sequence[TensorToStore], writer: "_Writer | None", masters: Engine | None) -> None:
    """Gather the tensors, one unit after the other, and write them on the rank that has a writer."""
    trained = {} if masters is None else masters.trained_specs()
    for _, alike in groupby(stored, key=lambda item: (item.unit, item.tensor.dtype)):
        group = list(alike)
        working = [item.tensor for item in group if isinstance(item.tensor, nn.Parameter) and item.name not in trained]
        with GatheredParameters(working):
            for item in group:
                if masters is not None and item.name in trained:
                    whole = gathered_state(masters, trained[item.name], "master")
                else:
                    whole = item.tensor
                if writer is not None:
                    writer.write(whole, item.dtype)


def contents(
    model: nn.Module, units: Sequence[Unit], floating: torch.dtype | None = None
) -> tuple[list[TensorToStore], dict[str, str]]:
    """Return the tensors to store, in file order, and {further name: name it is stored under}.

    floating: the number format of floating-point tensors in the file, None for their own.
    Wider elements come first, so that every tensor is aligned to its element size; those of a width are sorted by unit.
    """
    unit_of = {name: index for index, unit in enumerate(units) for name in unit.parameters}
    first_name: dict[int, str] = {}
    stored, aliases = [], {}
    for name, tensor in _state(model):
        known = first_name.setdefault(id(tensor), name)
        if known != name:
            aliases[name] = known
        else:
            dtype = floating if floating is not None and tensor.is_floating_point() else tensor.dtype
            stored.append(TensorToStore(name, tensor, unit_of.get(name, _NO_UNIT), dtype))
    stored.sort(key=lambda item: (-item.dtype.itemsize, item.unit))
    return stored, aliases


def header(stored: Sequence[TensorToStore], aliases: dict[str, str]) -> bytes:
    """Return the file's header: the length of the JSON in 8 bytes, little-endian, then the JSON, padded with spaces.

    The JSON maps each tensor's name to its dtype, shape and byte range, and "__metadata__" to the aliases.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt", **aliases}}
    position = 0
    for item in stored:
        end = position + item.nbytes
        shape, dtype = list(item.tensor.shape), dtype_name(item.dtype)
        table[item.name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of the state_dict without calling it, as partitioned parameters have no values."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *persistent.items()):
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


class _Writer:
    """A writer of rank 0's file.  It stores an error until `publish` raises it, within a call that all ranks share."""

    def __init__(self, path: Path, start: bytes) -> None:
        self._error: UserError | None = None
        self._file: AsideFile | None = None
        try:
            self._file = AsideFile(path)
            self._file.write(start)
        except UserError as error:
            self._error = error

    def write(self, tensor: Tensor, dtype: torch.dtype) -> None:
        if self._file is None or self._error is not None:
            return
        try:
            # Copy, because memory that a numpy array refers to could not be released any more.
            dense = tensor.detach().to("cpu", dtype, copy=True).contiguous().reshape(-1).view(torch.uint8)
            self._file.write(dense.numpy().data)
        except UserError as error:
            self._error = error

    def publish(self) -> None:
        """Rename the file to its final name, or raise CheckpointError with the first error."""
        try:
            if self._error is None and self._file is not None:
                self._file.publish()
        except UserError as error:
            self._error = error
        if self._error is not None:
            raise CheckpointError(*self._error.problems) from self._error

    def discard(self) -> None:
        """Remove what has not been published."""
        if self._file is not None:
            self._file.discard()
