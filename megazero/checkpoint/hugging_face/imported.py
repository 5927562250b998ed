"""A model of another project as megazero's: its tensors are read from their files when a checkpoint of ours is written.

The rows of a table (`families.py`) have which of its tensors hold which parameters.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megazero.checkpoint.hugging_face.families import FamilyRow
from megazero.comm.local import LocalCommunicator
from megazero.config.model import ModelConfig
from megazero.errors import Problem
from megazero.model.gpt import GPT
from megazero.parallel.param_spec import ParamSpec, StateFragment, StateKind, named_specs
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.random import RandomRegions


class TensorSource(Protocol):
    """Tensors in files, by the other project's names; path: the file or folder, for messages."""

    path: Path

    def shape(self, name: str) -> list[int] | None:
        """Return a tensor's shape, None if there is none of this name."""

    def tensor(self, name: str) -> Tensor:
        """Read a tensor."""


class ImportedModel(NamedTuple):
    """Another project's model as megazero's: configuration, size of the vocabulary, full logical weights by name."""

    config: ModelConfig
    vocab_size: int
    weights: "ImportedWeights"


class ImportedWeights(Mapping[str, Tensor]):
    """Full logical tensors by megazero's names, each read from its files when it is asked for.

    The tensors of the last row stay in memory, since a large one is written in several pieces.
    """

    def __init__(self, rows: Iterable[FamilyRow], files: TensorSource, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self._rows = {name: row for row in rows for name in row.ours}
        self._files = files
        self._last: tuple[FamilyRow, list[Tensor]] | None = None

    def __getitem__(self, name: str) -> Tensor:
        row = self._rows[name]
        if self._last is None or self._last[0] is not row:
            self._last = None
            shapes = [self.shapes[ours] for ours in row.ours]
            self._last = row, row.form.to_ours([self._files.tensor(theirs) for theirs in row.theirs], shapes)
        return self._last[1][row.ours.index(name)]

    def fragments(self, kind: StateKind = "weight") -> Iterator[StateFragment]:
        """Yield every tensor as a checkpoint's state in float32, which is read when it is written."""
        for name, shape in self.shapes.items():
            spec = ParamSpec(name, shape, shape, (0,) * len(shape))
            yield StateFragment(spec, kind, 0, spec.numel, _Unread(self, name))

    def mismatches(self, *, by: str) -> Iterator[Problem]:
        """Yield what is missing in the files, or has another shape than it has `by` the model's description."""
        for name, shape in their_shapes(dict.fromkeys(self._rows.values()), self.shapes).items():
            found = self._files.shape(name)
            if found != shape:
                actual = "is missing" if found is None else f"has shape {found}"
                yield Problem(f"{self._files.path}: {name} {actual}", f"by {by} it is a tensor of shape {shape}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class _Unread(NamedTuple):
    """A tensor that is in its files until it is asked for."""

    tensors: ImportedWeights
    name: str
    dtype: torch.dtype = torch.float32

    def view(self) -> Tensor:
        return self.tensors[self.name].to(self.dtype).view(-1)


def their_shapes(rows: Iterable[FamilyRow], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Return the shape of every tensor of the other project, by the shapes of megazero's parameters."""
    found: dict[str, list[int]] = {}
    for row in rows:
        tensors = row.form.to_theirs([torch.empty(shapes[name], device="meta") for name in row.ours])
        found |= {name: list(tensor.shape) for name, tensor in zip(row.theirs, tensors, strict=True)}
    return found


def full_shapes(config: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the logical shape of every parameter, by megazero's name, from a model on the meta device."""
    tp = TensorParallel(
        LocalCommunicator(), RandomRegions(0, 0, torch.device("cpu")), torch.float32, torch.device("meta")
    )
    model = GPT(config, vocab_size=vocab_size, tp=tp, padded_vocab_size=vocab_size)
    return {spec.name: spec.full_shape for spec, _ in named_specs(model)}
