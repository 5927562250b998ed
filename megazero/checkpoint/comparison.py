"""The differences between two checkpoints, tensor by tensor, whatever layouts saved them.

The boxes of the first are looked up in the second one by one, so no tensor needs to fit into memory.
"""

import json
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.checkpoint.manifest import TensorEntry, TensorKey
from megazero.checkpoint.reader import Checkpoint
from megazero.checkpoint.runs import PROGRESS_KEY


class ValueDifference(NamedTuple):
    """The number of elements that differ, and the largest difference (NaN where only one of the two is NaN)."""

    num_elements: int
    largest: float

    def joined(self, other: "ValueDifference") -> "ValueDifference":
        """Return the difference of two regions together."""
        largest = torch.tensor([self.largest, other.largest], dtype=torch.float64).max().item()
        return ValueDifference(self.num_elements + other.num_elements, largest)


NONE = ValueDifference(0, 0.0)


def difference(a: Tensor, b: Tensor) -> ValueDifference:
    """Compare two tensors of one shape in float64; NaN equals NaN."""
    a, b = a.to(torch.float64), b.to(torch.float64)
    unequal = ~((a == b) | (a.isnan() & b.isnan()))
    count = int(unequal.sum())
    return ValueDifference(count, (a - b)[unequal].abs().max().item() if count else 0.0)


def metadata_differences(first: Checkpoint, second: Checkpoint) -> Iterator[str]:
    """Yield lines about step, progress and configuration; that two runs saved them is no difference."""
    if first.step != second.step:
        yield f"step: {first.step} against {second.step}"
    for key in sorted((first.progress.keys() | second.progress.keys()) - {PROGRESS_KEY}):
        mine, other = (json.dumps(each.progress[key]) if key in each.progress else "absent" for each in (first, second))
        if mine != other:
            yield f"progress, {key}: {textwrap.shorten(mine, 500)} against {textwrap.shorten(other, 500)}"
    if first.config_yaml != second.config_yaml:
        yield "configuration: not the same"


def schema_differences(first: Checkpoint, second: Checkpoint) -> Iterator[str]:
    """Yield lines about tensors that only one of the two has, or has in another shape or dtype."""
    mine, others = _tensors(first), _tensors(second)
    for parameter, kind in sorted(mine.keys() ^ others.keys()):
        yield f"{parameter}, {kind}: only in {(first if (parameter, kind) in mine else second).folder}"
    for key in sorted(mine.keys() & others.keys()):
        if mine[key].shape != others[key].shape:
            yield f"{key[0]}, {key[1]}: shape {list(mine[key].shape)} against {list(others[key].shape)}"
        if mine[key].dtype != others[key].dtype:
            yield f"{key[0]}, {key[1]}: {mine[key].dtype} against {others[key].dtype}"


def box_differences(first: Checkpoint, second: Checkpoint) -> Iterator[tuple[TensorKey, ValueDifference]]:
    """Yield for every box of the first its tensor and how the values differ; `NONE` where shapes cannot be compared."""
    mine, others = _tensors(first), _tensors(second)
    for _, entry in first.boxes():
        key = (entry.parameter, entry.kind)
        if key not in others or others[key].shape != mine[key].shape:
            yield key, NONE
        else:
            a, b = (each.read(entry.parameter, entry.box, kind=entry.kind) for each in (first, second))
            yield key, difference(a, b)


def _tensors(checkpoint: Checkpoint) -> dict[TensorKey, TensorEntry]:
    return {(each.parameter, each.kind): each for each in checkpoint.manifest.tensors}
