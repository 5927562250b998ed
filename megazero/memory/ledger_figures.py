"""A ledger's figures of one step: live bytes by category through time, and at the peak.  Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

# From state that always exists to temporaries, which is also the order in which a picture stacks them.
Category = Literal[
    "parameters",
    "master",
    "moments",
    "gradients",
    "gathered_parameters",
    "communication_buffers",
    "activation_checkpoints",
    "activations",
    "temporary",
]
# What a device's ledger counts apart: offloaded states, checkpoints and buffers, pinned for a GPU's copies or not.
HostMemoryKind = Literal["pinned_host", "host"]
Phase = Literal["forward", "backward", "reduce", "update"]

CATEGORIES: tuple[Category, ...] = get_args(Category)


class PhaseMark(NamedTuple):
    """The phase that began when `operation` operations had run."""

    operation: int
    phase: Phase


class UnitMark(NamedTuple):
    """The module or the parameter that forward or backward had come to when `operation` operations had run."""

    operation: int
    name: str


class AllocatorSample(NamedTuple):
    """The live bytes by the ledger and by the device's allocator at the same moment."""

    ledger_bytes: int
    allocator_bytes: int


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """The live bytes at the start of a step and after every change.

    operations: int64 [n], operations run before each point.  live: int64 [n, len(CATEGORIES)], bytes.
    num_operations: the operations of the whole step.  units: empty where they are not known.
    """

    operations: NDArray[np.int64]
    live: NDArray[np.int64]
    phases: tuple[PhaseMark, ...]
    num_operations: int
    units: tuple[UnitMark, ...] = ()

    @property
    def totals(self) -> NDArray[np.int64]:
        """The bytes of all categories together, int64 [n]."""
        sums: NDArray[np.int64] = self.live.sum(axis=1)
        return sums

    @staticmethod
    def of_changes(
        start: NDArray[np.int64],
        changes: Iterable[tuple[int, Category, int]],
        phases: Sequence[PhaseMark],
        num_operations: int,
        units: Sequence[UnitMark] = (),
    ) -> "MemoryTimeline":
        """Build a timeline from the bytes [len(CATEGORIES)] alive at first and changes (bytes, category, operation)."""
        column = {category: index for index, category in enumerate(CATEGORIES)}
        table = np.array([(0, 0, 0), *((n, column[c], at) for n, c, at in changes)], np.int64)
        live = np.zeros((len(table), len(CATEGORIES)), np.int64)
        live[np.arange(len(table)), table[:, 1]] = table[:, 0]
        live[0] = start
        return MemoryTimeline(table[:, 2], live.cumsum(axis=0), tuple(phases), num_operations, tuple(units))


@dataclass(frozen=True, eq=False)
class StepMemory:
    """The memory of one step of one rank.

    allocator: samples of the device's allocator, where there is one.  elsewhere: bytes of the host's at the step's end.
    """

    timeline: MemoryTimeline
    allocator: tuple[AllocatorSample, ...] = ()
    elsewhere: Mapping[HostMemoryKind, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at once."""
        return int(self.timeline.totals.max())

    @property
    def peak_operation(self) -> int:
        """The number of operations run when the peak was first reached."""
        return int(self.timeline.operations[self.timeline.totals.argmax()])

    @property
    def at_peak(self) -> Mapping[Category, int]:
        """The bytes of every category at the peak; they add up to it."""
        return _by_category(self.timeline.live[self.timeline.totals.argmax()])

    @property
    def peaks(self) -> Mapping[Category, int]:
        """The most bytes of every category, each at a moment of its own."""
        return _by_category(self.timeline.live.max(axis=0))

    @property
    def allocator_gap(self) -> float | None:
        """The largest difference to the allocator, as a fraction of the allocator's figure."""
        gaps = [abs(ours - theirs) / theirs for ours, theirs in self.allocator if theirs]
        return max(gaps, default=None)


def _by_category(row: NDArray[np.int64]) -> dict[Category, int]:
    return {category: int(nbytes) for category, nbytes in zip(CATEGORIES, row, strict=True)}
