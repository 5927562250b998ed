"""The memory of units: brought, filled by all-gathers, taken away (paper section 5.3).

A unit's buckets are all-gathered into the flat tensors that its parameters are views of.  Releasing takes the memory
away and leaves the tensors: whatever refers to them, autograd's saved tensors included, sees the values again once the
unit has been gathered again.

    PARTITIONED --launch--> IN_FLIGHT --wait--> WHOLE --release--> PARTITIONED
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megazero.comm.interface import Communicator, Work
from megazero.errors import CollectiveError, Problem
from megazero.zero.guard import guard, unguard
from megazero.zero.layout import Bucket, Section
from megazero.zero.shards import Shards


class UnitState(Enum):
    """Where a unit's whole parameters are."""

    PARTITIONED = "nowhere: every rank has its partition"
    IN_FLIGHT = "on their way"
    WHOLE = "here"


@dataclass
class GatheredUnit:
    """The partitioned parameters of one unit, and what is happening to them.

    pins: how many hold it.  ahead: gathered (in part) for a use that has not come yet.  awaited: its trainable
    parameters whose gradients have not come in this pass; releases_early: whether nothing needs the unit once all have.
    shared: whether others refer to its memory, who keep it beyond the release.  lent_in: the backward in which a
    recomputation got it, which may go through what it has recomputed in a backward of its own.  held: whether the user
    has had it, and may have written what is to be lost.
    """

    name: str
    sections: tuple[Section, ...]
    parameters: tuple[nn.Parameter, ...]
    trainable: frozenset[str]
    releases_early: bool
    state: UnitState = UnitState.PARTITIONED
    pins: int = 0
    ahead: bool = False
    shared: bool = False
    lent_in: int | None = None
    held: bool = False
    awaited: set[str] = field(default_factory=set)
    works: dict[int, Work] = field(default_factory=dict)  # launched buckets, by index

    @property
    def numel(self) -> int:
        return sum(section.numel for section in self.sections)

    @property
    def names(self) -> list[str]:
        """Of its parameters, in layout order."""
        return [slot.spec.name for section in self.sections for slot in section.slots]

    @property
    def buckets(self) -> Iterator[Bucket]:
        for section in self.sections:
            yield from section.buckets


class UnitMemory:
    """Moves units between their states, and counts what is gathered.

    leaves_to_autograd: whether memory that a unit is released from stays with what autograd has saved of it.
    """

    def __init__(self, shards: Shards, communicator: Communicator, *, leaves_to_autograd: bool) -> None:
        self._shards = shards
        self._communicator = communicator
        self._leaves_to_autograd = leaves_to_autograd
        self._by_storage: dict[int, GatheredUnit] = {}
        self.live: dict[str, GatheredUnit] = {}
        """Units with memory, the longest unused first."""
        self.live_numel = 0
        self.peak_live_numel = 0

    def enter(self, unit: GatheredUnit) -> None:
        """Look after a unit from now on."""
        self._remember_storages(unit)
        each(guard, unit.parameters)

    def unit_of(self, tensor: torch.Tensor) -> GatheredUnit | None:
        """The unit in whose memory the tensor lies; None for any other tensor, with memory or without."""
        if is_traceable_wrapper_subclass(tensor):  # a DTensor, whose memory is that of the tensor inside
            inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            found = (self.unit_of(part) for part in inner if isinstance(part, torch.Tensor))
            return next((unit for unit in found if unit is not None), None)
        return self._by_storage.get(_address(tensor)) if torch._C._has_storage(tensor) else None

    def used(self, unit: GatheredUnit) -> None:
        """The unit is the last used."""
        self.live[unit.name] = self.live.pop(unit.name)

    def launch(self, unit: GatheredUnit, bucket: Bucket) -> None:
        """Start to gather a bucket, unless that has been done; its memory is there."""
        if bucket.index not in unit.works:
            whole = self._shards.flat(self._shards.layout.sections[bucket.section])[bucket.start : bucket.stop]
            mine = self._shards.working(bucket, self._shards.partition(bucket))
            with torch.no_grad():
                unit.works[bucket.index] = self._communicator.all_gather_into(whole, mine)

    def wait(self, unit: GatheredUnit, why: str) -> None:
        """Return when every bucket, all of them launched, is there; raises CollectiveError if ranks don't meet."""
        try:
            for work in unit.works.values():
                work.wait()
        except RuntimeError as error:
            unit.works.clear()  # nothing more will come
            names = ", ".join(unit.names)
            given = f"data-parallel rank {self._communicator.rank}: gathering {names} for {why} did not end: {error}"
            rule = "every rank gathers the same parameters in the same order"
            legal = "enter GatheredParameters, and every partitioned module, on all ranks or on none"
            raise CollectiveError(Problem(given, rule, legal)) from error
        unit.works.clear()
        unit.state = UnitState.WHOLE

    def bring(self, unit: GatheredUnit) -> None:
        """Memory for a unit that has none."""
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
        """Take the unit's memory away, and guard its parameters."""
        if unit.state is UnitState.IN_FLIGHT:  # gathered ahead, and not used
            self.wait(unit, "a use that did not come")
        if unit.shared or self._leaves_to_autograd or not self._is_ours_alone(unit):
            self._leave_memory(unit)
        else:
            for section in unit.sections:
                self._shards.flat(section).untyped_storage().resize_(0)
                self._shards.ledger.resized(self._shards.flat(section))
        each(guard, unit.parameters)
        unit.state = UnitState.PARTITIONED
        unit.ahead = unit.shared = unit.held = False
        unit.lent_in = None
        del self.live[unit.name]
        self.live_numel -= unit.numel

    def _is_ours_alone(self, unit: GatheredUnit) -> bool:
        """Whether the memory can be taken away; torch doesn't let go of what NumPy has seen."""
        return all(self._shards.flat(section).untyped_storage().resizable() for section in unit.sections)

    def _leave_memory(self, unit: GatheredUnit) -> None:
        """Whoever else refers to the unit's memory keeps it: the parameters move to new memory, not yet there."""
        each(unguard, unit.parameters)
        for section in unit.sections:
            self._by_storage.pop(_address(self._shards.flat(section)))
            self._shards.renew_flat(section)
        self._remember_storages(unit)

    def _remember_storages(self, unit: GatheredUnit) -> None:
        for section in unit.sections:
            self._by_storage[_address(self._shards.flat(section))] = unit


def partitioned_units(shards: Shards, parameters: Mapping[str, nn.Parameter]) -> Iterator[GatheredUnit]:
    """The units of a layout that have partitioned parameters, with these."""
    by_unit: dict[str, list[Section]] = {}
    for section in shards.layout.sections:
        if section.partitioned:
            by_unit.setdefault(section.unit, []).append(section)
    for name, sections in by_unit.items():
        slots = [slot for section in sections for slot in section.slots]
        yield GatheredUnit(
            name,
            tuple(sections),
            tuple(parameters[slot.spec.name] for slot in slots),
            frozenset(slot.spec.name for slot in slots if slot.spec.trainable),
            releases_early=all(section.trainable for section in sections),
        )


def each(action: Callable[[nn.Parameter], None], parameters: Iterable[nn.Parameter]) -> None:
    """Guard or unguard several parameters."""
    for parameter in parameters:
        action(parameter)


def _address(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage, the same for all its views and through resizing."""
    return int(torch._C._storage_address(tensor))  # type: ignore[attr-defined]
