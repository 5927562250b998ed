"""The memory of gathered units: allocated, filled by all-gathers, and released (ZeRO, section 5.3).

A unit's buckets are all-gathered into the flat tensors that its parameters are views of.  A release frees the memory
and leaves the tensors: all that refers to them, autograd's saved tensors included, shows the values again once the unit
has been gathered again.

    PARTITIONED --launch--> IN_FLIGHT --wait--> WHOLE --release--> PARTITIONED
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import NamedTuple
from zlib import crc32

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megazero.comm.interface import Communicator, LabelMismatch, Work, gather_together
from megazero.comm.local import LocalCommunicator
from megazero.comm.wires.quantized import EncodedGather
from megazero.errors import CollectiveError, Problem
from megazero.memory.copies import ARRIVED, Arrival
from megazero.zero.layout import Bucket, Section, neighbours
from megazero.zero.parameters.guard import guard, unguard
from megazero.zero.parameters.secondary import SecondaryPartitions
from megazero.zero.shards import Shards

# An identity of a tensor's storage, the same for all its views and through resizing.
_address: Callable[[torch.Tensor], int] = vars(torch._C)["_storage_address"]
_ORDINARY = (torch.Tensor, nn.Parameter)


class UnitState(Enum):
    """The place of a unit's whole parameters."""

    PARTITIONED = "nowhere: every rank has its partition"
    IN_FLIGHT = "being gathered"
    WHOLE = "gathered"


@dataclass
class GatheredUnit:
    """The partitioned parameters of one unit, and their state.

    index: its place among the units, the same on all ranks.  gathers: its buckets by the message that gathers them.
    pins: how many uses need it now.  is_prefetched: whether it is gathered (in part) for a use that has not come yet.
    has_room: whether it has been found to have room until its next use, beside all that is used before.
    awaited: its trainable parameters whose gradients have not come in this pass; releases_early: whether the unit is
    not needed once all have.  shared: whether other tensors refer to its memory, and retain it beyond the release.
    recomputed_in: the backward whose recomputation used it, which may walk what it has recomputed in a backward of its
    own.  was_pinned_by_user: whether the user may have written values into it, which a release must discard.
    is_exact: whether its gather is for a user, who gets what is stored, where a pass gets what a wire has rounded.
    num_left: how many times its memory has been left to tensors that refer to it.
    is_guarded: whether its parameters are guarded, as they are unless it is pinned or backward recomputes with it.
    """

    name: str
    index: int
    sections: tuple[Section, ...]
    parameters: tuple[nn.Parameter, ...]
    trainable: frozenset[str]
    releases_early: bool
    gathers: tuple[Sequence[Bucket], ...]
    state: UnitState = UnitState.PARTITIONED
    pins: int = 0
    is_prefetched: bool = False
    has_room: bool = False
    shared: bool = False
    recomputed_in: int | None = None
    was_pinned_by_user: bool = False
    is_exact: bool = False
    num_left: int = 0
    is_guarded: bool = False
    awaited: set[str] = field(default_factory=set)
    works: dict[int, tuple[Work | Arrival, ...]] = field(default_factory=dict)  # of launched buckets, by index

    @cached_property
    def numel(self) -> int:
        return sum(section.numel for section in self.sections)

    @property
    def names(self) -> list[str]:
        """The names of its parameters, in layout order."""
        return [slot.spec.name for section in self.sections for slot in section.slots]

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(bucket for section in self.sections for bucket in section.buckets)

    @cached_property
    def groups(self) -> tuple["UnitBuckets", ...]:
        """The groups of its buckets that are gathered by one call each, unless groups of several units are."""
        return tuple(UnitBuckets(self, group, group[-1].stop - group[0].start) for group in self.gathers)


class UnitBuckets(NamedTuple):
    """Neighbouring buckets of a unit, which are one of its `gathers`."""

    unit: GatheredUnit
    buckets: Sequence[Bucket]
    numel: int


class UnitMemory:
    """The memory of units, which moves them between their states and counts what is gathered.

    autograd_retains_memory: whether tensors that autograd has saved retain a unit's memory beyond its release.
    labels_gathers: whether a gather carries a number of its units, which costs a message where it is compared.
    compares_labels: whether ranks compare what they gather, and wait for that, where their communicator does not.
    take_updated: returns the arrival of a partition's updated values on the device, which its next gather must follow.
    secondary: the ranks over which gathered parameters are partitioned a second time.
    exact: a communicator of the same ranks for what is gathered for a user; by default the same.
    frozen: gathers what is stored encoded, for passes and for a user; None where nothing is.
    """

    def __init__(
        self,
        shards: Shards,
        communicator: Communicator,
        *,
        autograd_retains_memory: bool,
        labels_gathers: bool = True,
        compares_labels: bool = False,
        take_updated: Callable[[Bucket], Arrival] = lambda bucket: ARRIVED,
        secondary: Communicator | None = None,
        exact: Communicator | None = None,
        frozen: EncodedGather | None = None,
    ) -> None:
        self._shards = shards
        self._communicator = communicator
        self._exact = exact or communicator
        self._frozen = frozen
        self.rounds = self._exact is not communicator
        """True if gathers for passes round what they send."""
        self.secondary = SecondaryPartitions(shards, secondary or LocalCommunicator())
        self._autograd_retains_memory = autograd_retains_memory
        self._labels_gathers, self._compares_labels = labels_gathers, compares_labels
        self._take_updated = take_updated
        self._units: list[GatheredUnit] = []
        self._joined: dict[int, tuple[int, ...]] = {}  # the units of gathers of several, by label
        self._mismatch: Problem | None = None  # after it messages may be on their way that nothing receives
        self._by_storage: dict[int, GatheredUnit] = {}
        self.live: dict[str, GatheredUnit] = {}
        """Units with memory, the longest unused first."""
        self.live_numel = 0
        self.peak_live_numel = 0

    def attach(self, unit: GatheredUnit) -> None:
        """Add a unit, whose parameters are guarded from here on."""
        self._units.append(unit)
        self._remember_storages(unit)
        self.guard(unit)

    def guard(self, unit: GatheredUnit) -> None:
        """Guard the unit's parameters."""
        if not unit.is_guarded:
            guard(*unit.parameters)
            unit.is_guarded = True

    def unguard(self, unit: GatheredUnit) -> None:
        """Let the unit's parameters be read as they are."""
        if unit.is_guarded:
            unguard(*unit.parameters)
            unit.is_guarded = False

    def unit_of(self, tensor: torch.Tensor) -> GatheredUnit | None:
        """Return the unit in whose memory the tensor lies; None for any other tensor, with memory or without."""
        # A DTensor's memory is that of the tensor inside.  The first test spares most tensors the slow second one.
        if type(tensor) not in _ORDINARY and is_traceable_wrapper_subclass(tensor):
            inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            found = (self.unit_of(part) for part in inner if isinstance(part, torch.Tensor))
            return next((unit for unit in found if unit is not None), None)
        try:
            return self._by_storage.get(_address(tensor))
        except NotImplementedError:  # it has no storage
            return None

    def mark_used(self, unit: GatheredUnit) -> None:
        """Make the unit the last used."""
        self.live[unit.name] = self.live.pop(unit.name)

    def launch(self, *groups: UnitBuckets) -> None:
        """Start to gather groups of buckets whose memory is allocated, and leave out those that have been begun.

        Groups of several units travel together, by one call for all that have one dtype and take one way.

        Raises CollectiveError once ranks have gathered different units, where that is compared.
        """
        ways: dict[Hashable, list[UnitBuckets]] = {}
        for group in groups:
            if group.buckets[0].index not in group.unit.works:
                ways.setdefault(self._way(group) if len(groups) > 1 else None, []).append(group)
        for together in ways.values():
            self._launch_together(together)

    def _way(self, group: UnitBuckets) -> Hashable:
        """Return what is the same for groups that one call may gather."""
        unit, (first, *_), _ = group
        section = self._shards.layout.sections[first.section]
        if self._shards.is_encoded(section):
            return first.index  # a row is gathered and decoded by itself
        return self.secondary.has(unit.name), unit.is_exact, section.dtype

    def _launch_together(self, groups: Sequence[UnitBuckets]) -> None:
        if self._mismatch is not None:
            raise CollectiveError(self._mismatch)
        label = self._label(groups) if self._labels_gathers else None
        if self._compares_labels and label is not None:
            self._compare_labels(label)
        unit, (first, *_), _ = groups[0]
        if self._frozen is not None and (row := self._shards.encoded_row(first)) is not None:
            whole = self._shards.flat(self._shards.layout.sections[first.section])[first.start : first.stop]
            unit.works[first.index] = (self._frozen.gather_into(whole, row, self._shards.parameter_home, label),)
            return
        is_near = self.secondary.has(unit.name) and not unit.is_exact
        source = self.secondary if is_near else self._shards
        far = self._exact if unit.is_exact else self._communicator
        wholes: list[torch.Tensor] = []
        mine: list[torch.Tensor] = []
        arriving: list[list[Arrival]] = []  # of each group
        for _, buckets, _ in groups:
            flat = self._shards.flat(self._shards.layout.sections[buckets[0].section])
            arriving.append([])
            for bucket in buckets:
                wholes.append(flat[bucket.start : bucket.stop])
                part, brought = source.outgoing(bucket, wholes[-1])
                mine.append(part)
                for arrival in (brought, self._take_updated(bucket)):
                    if arrival is not ARRIVED:
                        arriving[-1].append(arrival)
        with ExitStack() as ahead:
            for arrival in chain.from_iterable(arriving):
                ahead.enter_context(arrival.ahead())
            work = gather_together(self.secondary.communicator if is_near else far, wholes, mine, label)
        # The gather of one rank does nothing, or copies where it is queued, and its work waits for nothing.
        for (unit, buckets, _), of_group in zip(groups, arriving, strict=True):
            for bucket in buckets:
                unit.works[bucket.index] = ()
            unit.works[buckets[0].index] = work, *of_group

    def _label(self, groups: Sequence[UnitBuckets]) -> int | None:
        """Return the number of a gather, that of the first unit that begins with it, and a checksum of the others."""
        begin = dict.fromkeys(unit.index for unit, *_ in groups if not unit.works)
        if not begin:
            return None
        first, *others = begin
        label = first + len(self._units) * crc32(b"".join(index.to_bytes(4) for index in others))
        if others:
            self._joined[label] = first, *others
        return label

    def _labelled(self, label: int) -> str:
        """Return the names of what a rank gathers with this label."""
        others, first = divmod(label, len(self._units))
        if label in self._joined:
            return ", ".join(self._units[index].name for index in self._joined[label])
        return self._units[first].name + " and others with it" * bool(others)

    def wait(self, unit: GatheredUnit, why: str) -> None:
        """Wait until every bucket, all of them launched, is gathered; raise CollectiveError if ranks don't meet."""
        try:
            for work in chain.from_iterable(unit.works.values()):
                work.wait()
        except LabelMismatch as error:
            unit.works.clear()
            raise self._mismatched(error.mine, why, error.rank, error.label) from None
        except RuntimeError as error:
            unit.works.clear()  # nothing more will come
            names = ", ".join(unit.names)
            given = f"data-parallel rank {self._communicator.rank}: gathering {names} for {why} did not end: {error}"
            rule = "every rank gathers the same parameters in the same order"
            legal = "enter GatheredParameters, and every partitioned module, on all ranks or on none"
            raise CollectiveError(Problem(given, rule, legal)) from error
        unit.works.clear()
        unit.state = UnitState.WHOLE
        if not unit.is_exact:
            self.secondary.keep(unit.name, unit.sections)

    def _compare_labels(self, mine: int) -> None:
        """Wait until all ranks have come to a gather; raise CollectiveError if it is not of the same units on all."""
        sent = torch.full((1,), mine, dtype=torch.int64, device=self._shards.device)
        labels = sent.new_empty(self._communicator.size)
        self._communicator.all_gather_into(labels, sent).wait()
        for rank, label in enumerate(labels.tolist()):
            if label != mine:
                raise self._mismatched(mine, "its next use", rank, label)

    def _mismatched(self, mine: int, why: str, rank: int, theirs: int) -> CollectiveError:
        """Return the error of a gather for which another rank gathers something else; no later gather is begun."""
        given = (
            f"data-parallel rank {self._communicator.rank} gathers {self._labelled(mine)} for {why},"
            f" rank {rank} {self._labelled(theirs)}"
        )
        rule = "every rank gathers the same parameters in the same order, whatever its data"
        legal = (
            "megazero.zero.set_z3_leaf_modules(model, [Experts]), or zero_optimization.leaf_module, for a module that"
            " all ranks enter and that contains what they use differently"
        )
        self._mismatch = Problem(given, rule, legal)
        return CollectiveError(self._mismatch)

    def allocate(self, unit: GatheredUnit) -> None:
        """Allocate memory for a unit, unless it has some."""
        if unit.state is not UnitState.PARTITIONED:
            return
        for section in unit.sections:
            flat = self._shards.flat(section)
            flat.untyped_storage().resize_(section.numel * flat.element_size())
            self._shards.ledger.resized(flat)
        unit.state = UnitState.IN_FLIGHT
        self.live[unit.name] = unit
        self.live_numel += unit.numel
        self.peak_live_numel = max(self.peak_live_numel, self.live_numel)

    def release(self, unit: GatheredUnit) -> None:
        """Free the unit's memory, and guard its parameters."""
        if self._mismatch is not None:  # what has begun may never end, and may write to the memory
            unit.works.clear()
            unit.shared = True
        elif unit.state is UnitState.IN_FLIGHT:  # gathered ahead, and not used
            self.wait(unit, "a use that did not come")
        flats = [self._shards.flat(section) for section in unit.sections]
        storages = [flat.untyped_storage() for flat in flats]
        is_retained = unit.shared or self._autograd_retains_memory
        # NumPy refers to a storage that may not be resized.
        if is_retained or not all(map(torch.UntypedStorage.resizable, storages)):
            self._detach_memory(unit)
        else:
            for flat, storage in zip(flats, storages, strict=True):
                storage.resize_(0)
                self._shards.ledger.resized(flat)
        self.guard(unit)
        unit.state = UnitState.PARTITIONED
        unit.is_prefetched = unit.has_room = unit.shared = unit.was_pinned_by_user = unit.is_exact = False
        unit.recomputed_in = None
        del self.live[unit.name]
        self.live_numel -= unit.numel

    def _detach_memory(self, unit: GatheredUnit) -> None:
        """Leave the unit's memory to other tensors: the parameters become views of a new, empty storage."""
        self.unguard(unit)
        unit.num_left += 1
        for section in unit.sections:
            self._by_storage.pop(_address(self._shards.flat(section)))
            self._shards.replace_flat(section)
        self._remember_storages(unit)

    def _remember_storages(self, unit: GatheredUnit) -> None:
        for section in unit.sections:
            self._by_storage[_address(self._shards.flat(section))] = unit


def partitioned_units(
    shards: Shards, parameters: Mapping[str, nn.Parameter], most_gathered: int = 0
) -> Iterator[GatheredUnit]:
    """Yield the units of a layout that have partitioned parameters, with those parameters.

    most_gathered: the elements that one gather of several buckets moves at the most.  What is stored encoded has a
    row for each bucket, and is gathered so.
    """
    by_unit: dict[str, list[Section]] = {}
    for section in shards.layout.sections:
        if section.partitioned:
            by_unit.setdefault(section.unit, []).append(section)
    for index, (name, sections) in enumerate(by_unit.items()):
        slots = [slot for section in sections for slot in section.slots]
        yield GatheredUnit(
            name,
            index,
            tuple(sections),
            tuple(parameters[slot.spec.name] for slot in slots),
            frozenset(slot.spec.name for slot in slots if slot.spec.trainable),
            releases_early=all(section.trainable for section in sections),
            gathers=tuple(
                group
                for section in sections
                for group in neighbours(section.buckets, 0 if shards.is_encoded(section) else most_gathered)
            ),
        )
