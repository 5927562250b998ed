"""The flat layout: parameters -> units -> sections -> buckets -> partitions -> fragments.  Pure arithmetic, no tensors.

    unit       a transformer block, an embedding, the final norm: what is gathered and released together
    section    the parameters of one unit with the same (dtype, trainable), flattened one behind the other and padded
    bucket     a piece of a section of at most `bucket_numel` elements: what one collective moves
    partition  a rank's equal slice of a bucket
    fragment   the overlap of one parameter with some range of a section

    section    |  norm.w norm.b bias |      qkv.w      |     up.w      |    down.w   |pad|
    buckets    |<------- bucket 0 ------->|<------- bucket 1 ------->|<--- bucket 2 ---->|
    partitions |  rank 0   |   rank 1     |   rank 0   |   rank 1    | rank 0  |  rank 1  |

Inside a section parameters are sorted by optimizer group, those without weight decay first: backward produces gradients
in reverse order, so buckets then complete one after the other from the end of the section, and only the first one
(which holds all the small vectors) stays open until the unit is done.  Every stage shares this layout; what differs
between stages is who keeps which ranges (`plan.py`).  Flatness never shows outside `zero/`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazero.parallel.param_spec import ParamSpec


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered, published and waited for together, by logical name."""

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class LayoutRules:
    """partitions: ranks of the partition axis; bucket_numel and alignment in elements."""

    partitions: int
    bucket_numel: int
    alignment: int = 16

    @property
    def quantum(self) -> int:
        """Every bucket is a multiple of this, so that every partition is aligned."""
        return self.partitions * self.alignment


class Range(NamedTuple):
    """Elements [start, stop) of a section."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its section."""

    spec: ParamSpec
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.spec.numel


class Fragment(NamedTuple):
    """Overlap of one parameter with a range: elements [start, stop) of the parameter, at `section_start`."""

    spec: ParamSpec
    start: int
    stop: int
    section_start: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of section number `section`; `index` counts buckets through the whole model."""

    index: int
    section: int
    start: int
    stop: int
    partitions: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def range(self) -> Range:
        return Range(self.start, self.stop)

    def partition(self, rank: int) -> Range:
        """The slice of the section that `rank` owns of this bucket."""
        size = self.numel // self.partitions
        return Range(self.start + rank * size, self.start + (rank + 1) * size)


@dataclass(frozen=True)
class Section:
    """The flattened parameters of one unit with one dtype and one trainability; `numel` includes padding."""

    index: int
    unit: str
    dtype: torch.dtype
    trainable: bool
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    numel: int

    @property
    def used_numel(self) -> int:
        """Elements of parameters, without padding."""
        return self.slots[-1].stop

    def fragments(self, within: Range) -> Iterator[Fragment]:
        """Overlaps of the section's parameters with a range, in order; none where there is only padding."""
        for slot in self.slots:
            start, stop = max(within.start, slot.start), min(within.stop, slot.stop)
            if start < stop:
                yield Fragment(slot.spec, start - slot.start, stop - slot.start, start)

    def group_runs(self, within: Range) -> Iterator[tuple[bool, Range]]:
        """(decay, range) pieces that tile `within`: at most one per optimizer group; padding joins the last group."""
        boundary = next((slot.start for slot in self.slots if slot.spec.decay), self.numel)
        for decay, start, stop in ((False, 0, boundary), (True, boundary, self.numel)):
            piece = Range(max(within.start, start), min(within.stop, stop))
            if piece.numel > 0:
                yield decay, piece


@dataclass(frozen=True)
class FlatLayout:
    """Every section of the model, in unit order."""

    rules: LayoutRules
    sections: tuple[Section, ...]

    @property
    def trainable_buckets(self) -> tuple[Bucket, ...]:
        """Buckets whose gradients are reduced, in forward order."""
        return tuple(bucket for section in self.sections if section.trainable for bucket in section.buckets)

    @property
    def max_bucket_numel(self) -> int:
        """The largest bucket, in elements: what a constant-size buffer must hold."""
        return max((bucket.numel for bucket in self.trainable_buckets), default=self.rules.quantum)

    def padded_numel(self, *, trainable: bool) -> int:
        """Elements of all sections of that trainability, padding included."""
        return sum(section.numel for section in self.sections if section.trainable == trainable)

    def used_numel(self, *, trainable: bool) -> int:
        """The same without padding: Psi of this rank."""
        return sum(section.used_numel for section in self.sections if section.trainable == trainable)


def build_layout(
    units: Sequence[Unit], parameters: Iterable[tuple[ParamSpec, torch.dtype]], rules: LayoutRules
) -> FlatLayout:
    """Lay out `parameters`; every one must be in exactly one unit."""
    by_name = {spec.name: (spec, dtype) for spec, dtype in parameters}
    _check_units(units, by_name.keys())
    sections: list[Section] = []
    first_bucket = 0
    for unit in units:
        keyed: dict[tuple[torch.dtype, bool], list[ParamSpec]] = {}
        for spec, dtype in (by_name[name] for name in unit.parameters):
            keyed.setdefault((dtype, spec.trainable), []).append(spec)
        for (dtype, trainable), specs in keyed.items():
            slots = _slots(specs)
            numel = _round_up(slots[-1].stop, rules.quantum)
            buckets = tuple(_buckets(len(sections), first_bucket, numel, rules))
            first_bucket += len(buckets)
            sections.append(Section(len(sections), unit.name, dtype, trainable, slots, buckets, numel))
    return FlatLayout(rules, tuple(sections))


def _slots(specs: Sequence[ParamSpec]) -> tuple[Slot, ...]:
    slots, offset = [], 0
    for spec in sorted(specs, key=lambda spec: spec.decay):  # stable: forward order within a group
        slots.append(Slot(spec, offset))
        offset += spec.numel
    return tuple(slots)


def _buckets(section: int, first_index: int, numel: int, rules: LayoutRules) -> Iterator[Bucket]:
    size = max(rules.bucket_numel // rules.quantum, 1) * rules.quantum
    for number, start in enumerate(range(0, numel, size)):
        yield Bucket(first_index + number, section, start, min(start + size, numel), rules.partitions)


def _check_units(units: Sequence[Unit], names: Iterable[str]) -> None:
    listed = [name for unit in units for name in unit.parameters]
    missing, unknown = set(names) - set(listed), set(listed) - set(names)
    twice = {name for name in listed if listed.count(name) > 1}
    assert not (missing or unknown or twice), f"units: missing {missing}, unknown {unknown}, listed twice {twice}"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
