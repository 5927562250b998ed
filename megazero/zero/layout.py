"""The flat layout: how parameters lie in units, sections, buckets and partitions.  Pure arithmetic, no tensors.

    unit       a transformer block, an embedding, the final norm: what is gathered and released together
    section    the parameters of one unit with the same (dtype, trainable, partitioned), flattened one behind the other
               and padded
    bucket     a piece of a section of at most `bucket_numel` elements, of which every rank owns a slice
    partition  a rank's equal slice of a bucket
    reduction  neighbouring buckets of a section, most often one, whose gradients one collective sums up
    fragment   the overlap of one parameter with some range of a section

    section    |  norm.w norm.b bias |      qkv.w      |     up.w      |    down.w   |pad|
    buckets    |<------- bucket 0 ------->|<------- bucket 1 ------->|<--- bucket 2 ---->|
    partitions |  rank 0   |   rank 1     |   rank 0   |   rank 1    | rank 0  |  rank 1  |

Inside a section parameters are sorted by optimizer group, those without weight decay first: backward produces gradients
in reverse order, so buckets then complete one after the other from the end of the section, and only the first one
(which holds all the small vectors) stays open until the unit is done.  Every stage shares this layout; what differs
between stages is which rank stores which ranges (`plan.py`).  Flatness never shows outside `zero/`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import torch

from megazero.parallel.param_spec import ParamSpec, Unit

# The elements of a bucket where no limit is given.
_BUCKET_NUMEL = 1 << 24  # of few ranks
_PARTITION_NUMEL = 1 << 19  # for each of more: 1 MiB in bf16, below which latency takes part of a message's time
_LARGE_BUCKET_NUMEL = 1 << 28  # of many: four buckets on their way take 2 GiB in bf16
_LEAST_PARTITION_NUMEL = 1 << 17  # for each of very many: 256 KiB in bf16, below which latency takes most of the time


@dataclass(frozen=True)
class LayoutRules:
    """The rules of a layout.  partitions: ranks of the partition axis; bucket_numel, alignment: in elements.

    reduced_numel: the elements up to which neighbouring buckets are reduced together.
    frozen_block, trained_block: the elements of a block of what is stored in blocks, partitioned frozen parameters and
    the moments of trained ones.  Such parameters begin at the first of one, and partitions are whole blocks.
    """

    partitions: int
    bucket_numel: int
    alignment: int = 16
    frozen_block: int = 1
    trained_block: int = 1
    reduced_numel: int = 0

    @property
    def quantum(self) -> int:
        """The elements of which every bucket is a multiple, so that every partition is aligned."""
        return self.partitions * self.alignment

    def block_of(self, *, trainable: bool, partitioned: bool) -> int:
        """Return the elements of a section's blocks; 1 where nothing is stored in them."""
        if trainable:
            return self.trained_block
        return self.frozen_block if partitioned else 1

    def with_blocks(self, block: int) -> "LayoutRules":
        """Return the rules of a section with such blocks."""
        return replace(self, alignment=math.lcm(self.alignment, block))


class Range(NamedTuple):
    """The elements [start, stop) of a section."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Slot:
    """A parameter, how it is treated, and its place in its section.

    partitioned: whether its working value is partitioned or replicated.  group: its optimizer group.
    start: its first element's position in the section, which `build_layout` sets.
    """

    spec: ParamSpec
    dtype: torch.dtype
    partitioned: bool
    group: int
    start: int = 0

    @cached_property
    def stop(self) -> int:
        return self.start + self.spec.numel


class Fragment(NamedTuple):
    """The elements [start, stop) of one parameter, which are the elements `within` of its section."""

    spec: ParamSpec
    start: int
    stop: int
    within: Range

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def clipped(self, to: Range) -> "Fragment | None":
        """Return its overlap with a range of the section; None if there is none."""
        start, stop = max(self.within.start, to.start), min(self.within.stop, to.stop)
        if start >= stop:
            return None
        first = self.start + start - self.within.start
        return Fragment(self.spec, first, first + stop - start, Range(start, stop))


@dataclass(frozen=True)
class _Piece:
    """The elements [start, stop) of section number `section`; `index` counts such pieces through the whole model.

    fragments: overlaps of the section's parameters with it, by parameter name, in order; padding has none.
    """

    index: int
    section: int
    start: int
    stop: int
    fragments: Mapping[str, Fragment] = field(compare=False, repr=False)

    @cached_property
    def numel(self) -> int:
        return self.stop - self.start

    @cached_property
    def range(self) -> Range:
        return Range(self.start, self.stop)

    @cached_property
    def padding(self) -> tuple[Range, ...]:
        """The ranges in which no parameter lies, in order."""
        starts = [self.start, *(fragment.within.stop for fragment in self.fragments.values())]
        stops = [*(fragment.within.start for fragment in self.fragments.values()), self.stop]
        return tuple(Range(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)


@dataclass(frozen=True)
class Bucket(_Piece):
    """A piece of which every rank owns an equal slice."""

    partitions: int

    def fragments_in(self, within: Range) -> Iterator[Fragment]:
        """Return the overlaps of parameters with a part of the bucket, in order."""
        clipped = (fragment.clipped(within) for fragment in self.fragments.values())
        return (fragment for fragment in clipped if fragment is not None)

    def fragment_of(self, name: str, within: Range) -> Fragment | None:
        """Return the overlap of one parameter with a part of the bucket; None if there is none."""
        fragment = self.fragments.get(name)
        return None if fragment is None else fragment.clipped(within)

    def partition(self, rank: int) -> Range:
        """Return the slice of the section that `rank` owns of this bucket."""
        size = self.numel // self.partitions
        return Range(self.start + rank * size, self.start + (rank + 1) * size)


@dataclass(frozen=True)
class Reduction(_Piece):
    """Neighbouring buckets whose gradients are in memory side by side until one collective sums them up."""

    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Section:
    """The flattened parameters of one unit that are treated alike; `numel` includes padding."""

    index: int
    unit: str
    dtype: torch.dtype
    trainable: bool
    partitioned: bool
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    numel: int

    @cached_property
    def used_numel(self) -> int:
        """The elements of parameters, without padding, at the end or between them."""
        return sum(slot.spec.numel for slot in self.slots)

    def group_runs(self, within: Range) -> Iterator[tuple[int, Range]]:
        """Yield (group, range) pieces that tile `within`: at most one per optimizer group; padding is in the last."""
        starts = [(group, next(slots).start) for group, slots in groupby(self.slots, lambda slot: slot.group)]
        stops = [start for _, start in starts[1:]] + [self.numel]
        for (group, start), stop in zip(starts, stops, strict=True):
            piece = Range(max(within.start, start), min(within.stop, stop))
            if piece.numel > 0:
                yield group, piece


@dataclass(frozen=True)
class FlatLayout:
    """The layout of a model: every section, in unit order."""

    rules: LayoutRules
    sections: tuple[Section, ...]

    @cached_property
    def trainable_buckets(self) -> tuple[Bucket, ...]:
        """The buckets whose gradients are reduced, in forward order."""
        return tuple(bucket for section in self.sections if section.trainable for bucket in section.buckets)

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """The buckets whose gradients are reduced, by the collective that sums them up, in forward order."""
        groups = enumerate(neighbours(self.trainable_buckets, self.rules.reduced_numel))
        return tuple(self._reduction(index, group) for index, group in groups)

    def _reduction(self, index: int, group: Sequence[Bucket]) -> Reduction:
        section, start, stop = group[0].section, group[0].start, group[-1].stop
        fragments = group[0].fragments
        if len(group) > 1:
            fragments = _fragments(self.sections[section].slots, Range(start, stop))
        return Reduction(index, section, start, stop, fragments, tuple(group))

    @cached_property
    def reductions_of(self) -> Mapping[str, tuple[Reduction, ...]]:
        """The reductions that each trainable parameter has a part in, in order; one without elements is missing."""
        found: dict[str, tuple[Reduction, ...]] = {}
        for reduction in self.reductions:
            for name in reduction.fragments:
                found[name] = (*found.get(name, ()), reduction)
        return found

    @property
    def max_reduced_numel(self) -> int:
        """The elements of the largest reduction: the least size of a constant-size buffer."""
        return max((reduction.numel for reduction in self.reductions), default=self.rules.quantum)

    def used_numel(self, *, trainable: bool) -> int:
        """Return the elements of all sections of that trainability, without padding: Psi of this rank."""
        return sum(section.used_numel for section in self.sections if section.trainable == trainable)


def reduction_limit(partitions: int, given: int | None) -> int:
    """Return the most elements that one reduction moves, unless a bucket of the least size has more.

    Without a limit that is given it grows with the ranks, so that the number of messages and the work for each do not
    grow where every rank has the same share of a larger model, and a rank's partition stays as large as a message must
    be.  Memory for reductions on their way bounds it, until partitions would be so small that a message is latency
    alone.
    """
    if given is not None:
        return given
    grown = min(partitions * _PARTITION_NUMEL, _LARGE_BUCKET_NUMEL)
    return max(_BUCKET_NUMEL, grown, partitions * _LEAST_PARTITION_NUMEL)


def joined_limit(partitions: int) -> int:
    """Return the elements up to which small units that every rank has whole are laid out together.

    Where there are more ranks than a bucket of the least size has room for, a small unit's message is latency alone.
    """
    is_large = partitions * _PARTITION_NUMEL > _BUCKET_NUMEL
    return partitions * _LEAST_PARTITION_NUMEL if is_large else 0


def gather_limit(partitions: int, reduced: int | None, gathered: int | None) -> int:
    """Return the most elements that one gather moves, unless a bucket of the least size has more.

    It is what is given for gathers, or else for reductions.  A gather in place takes no memory for buckets on their
    way, so the default grows on with the ranks where that of a reduction is bounded.
    """
    given = reduced if gathered is None else gathered
    return max(_BUCKET_NUMEL, partitions * _PARTITION_NUMEL) if given is None else given


def prefetch_limit(partitions: int, largest: int, given: int | None) -> int:
    """Return the elements that are gathered ahead of their use: what is given, or those of the largest unit.

    Without a value many ranks have at least two messages ahead whose slices are no latency alone.
    """
    return max(largest, 2 * joined_limit(partitions)) if given is None else given


def joined_gathers(partitions: int, window: int, given: int | None) -> int:
    """Return the elements up to which units are gathered together ahead of their use; 0: each by itself.

    window: the elements that may be gathered ahead, of which a message has at most half, so that another one is there
    when it begins.  given: the window that is given; few ranks join nothing without one.
    """
    return min(window // 2, joined_limit(partitions) if given is None else partitions * _LEAST_PARTITION_NUMEL)


def neighbours(buckets: Iterable[Bucket], most: int) -> Iterator[list[Bucket]]:
    """Group successive buckets that are neighbours in a section, as long as they have at most `most` elements."""
    group: list[Bucket] = []
    for bucket in buckets:
        follows = bool(group) and (group[-1].section, group[-1].stop) == (bucket.section, bucket.start)
        if group and not (follows and bucket.stop - group[0].start <= most):
            yield group
            group = []
        group.append(bucket)
    if group:
        yield group


def build_layout(units: Sequence[Unit], parameters: Iterable[Slot], rules: LayoutRules) -> FlatLayout:
    """Lay out `parameters`, whose places are not chosen yet; every one must be in exactly one unit."""
    by_name = {slot.spec.name: slot for slot in parameters}
    _check_units(units, by_name.keys())
    sections: list[Section] = []
    first_bucket = 0
    for unit in units:
        keyed: dict[tuple[torch.dtype, bool, bool], list[Slot]] = {}
        for slot in (by_name[name] for name in unit.parameters):
            keyed.setdefault((slot.dtype, slot.spec.trainable, slot.partitioned), []).append(slot)
        for key, members in keyed.items():
            _, trainable, partitioned = key
            block = rules.block_of(trainable=trainable, partitioned=partitioned)
            of_section = rules.with_blocks(block)
            slots = _in_order(members, block)
            numel = -(-slots[-1].stop // of_section.quantum) * of_section.quantum
            buckets = tuple(_buckets(len(sections), first_bucket, slots, numel, of_section))
            first_bucket += len(buckets)
            sections.append(Section(len(sections), unit.name, *key, slots, buckets, numel))
    return FlatLayout(rules, tuple(sections))


def join_small_units(units: Sequence[Unit], numel: Mapping[str, int], most: int) -> list[Unit]:
    """Join neighbouring units of a part as long as they have at most `most` elements together.

    Where every rank has whole parameters, a unit decides only what one message moves and one update covers, and each of
    them costs the same time however few elements it has.  numel: elements by parameter.
    """
    joined: list[Unit] = []
    sizes: list[int] = []
    for unit in units:
        size = sum(numel[name] for name in unit.parameters)
        if joined and joined[-1].part == unit.part and sizes[-1] + size <= most:
            last = joined[-1]
            parameters, consumers = (*last.parameters, *unit.parameters), (*last.consumers, *unit.consumers)
            joined[-1] = last._replace(parameters=parameters, consumers=tuple(dict.fromkeys(consumers)))
            sizes[-1] += size
        else:
            joined.append(unit)
            sizes.append(size)
    return joined


def choose_persistent(specs: Iterable[ParamSpec], *, smaller_than: int, total: int) -> set[str]:
    """Return the names of the parameters that stay whole on every rank though others are partitioned.

    smaller_than: elements that one of them stays below; total: most elements of all together.  They are chosen in
    registration order, and one that no longer fits is passed over.
    """
    chosen, left = set(), total
    for spec in specs:
        if spec.numel < smaller_than and spec.numel <= left:
            chosen.add(spec.name)
            left -= spec.numel
    return chosen


def _in_order(members: Sequence[Slot], block: int) -> tuple[Slot, ...]:
    """Place the slots of one section, one behind the other, each at the beginning of a block."""
    slots, start = [], 0
    for slot in sorted(members, key=lambda slot: slot.group):  # stable: forward order within a group
        slots.append(replace(slot, start=start))
        start = -(-slots[-1].stop // block) * block
    return tuple(slots)


def _buckets(section: int, first_index: int, slots: Sequence[Slot], numel: int, rules: LayoutRules) -> Iterator[Bucket]:
    """Cut a section into as few buckets as the limit allows, of equal size: a short last one would be latency alone."""
    quanta = numel // rules.quantum
    number = -(-quanta // max(rules.bucket_numel // rules.quantum, 1))
    cuts = [rules.quantum * (quanta * cut // max(number, 1)) for cut in range(number + 1)]
    for index, (start, stop) in enumerate(pairwise(cuts), first_index):
        yield Bucket(index, section, start, stop, _fragments(slots, Range(start, stop)), rules.partitions)


def _fragments(slots: Iterable[Slot], within: Range) -> dict[str, Fragment]:
    """Return the overlaps of a section's parameters with a range of it, by parameter name, in order."""
    whole = (Fragment(slot.spec, 0, slot.spec.numel, Range(slot.start, slot.stop)) for slot in slots)
    clipped = (fragment.clipped(within) for fragment in whole)
    return {fragment.spec.name: fragment for fragment in clipped if fragment is not None}


def _check_units(units: Sequence[Unit], names: Iterable[str]) -> None:
    listed = Counter(name for unit in units for name in unit.parameters)
    missing, unknown = set(names) - listed.keys(), listed.keys() - set(names)
    twice = {name for name, count in listed.items() if count > 1}
    assert not (missing or unknown or twice), f"units: missing {missing}, unknown {unknown}, listed twice {twice}"
