"""Partitioned parameters: gathered just before a unit is used, released when it isn't needed next (paper section 5.3).

A unit's buckets are all-gathered into the flat tensors that its parameters are views of.  Releasing takes the memory
away and leaves the tensors: whatever refers to them, autograd's saved tensors included, sees the values again once the
unit has been gathered again.

    PARTITIONED --launch--> IN_FLIGHT --wait--> WHOLE --release--> PARTITIONED

*Uses* come from outside (`frames.py`): a module's forward begins, a parameter is touched, backward asks for a saved
tensor.  They are all there is to correctness.  What is gathered ahead of its use, and what is kept for the next one, is
decided here, from the order that the last pass recorded (`lookahead.py`) and the limits of the configuration; every
rank comes to the same decisions, so collectives meet.  A unit is *pinned* while a module's forward, or the user, holds
it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from megazero.comm.interface import Communicator, Work
from megazero.config.zero import ZeroConfig
from megazero.errors import CollectiveError, Problem, UsageError
from megazero.zero.guard import guard, unguard
from megazero.zero.layout import Bucket, Section
from megazero.zero.lookahead import UseOrder
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
    """

    name: str
    sections: tuple[Section, ...]
    parameters: tuple[nn.Parameter, ...]
    trainable: frozenset[str]
    releases_early: bool
    state: UnitState = UnitState.PARTITIONED
    pins: int = 0
    ahead: bool = False
    awaited: set[str] = field(default_factory=set)
    works: dict[int, Work] = field(default_factory=dict)  # launched buckets, by index

    @property
    def numel(self) -> int:
        return sum(section.numel for section in self.sections)

    @property
    def buckets(self) -> Iterator[Bucket]:
        for section in self.sections:
            yield from section.buckets


class ParameterGather:
    """Gathers, keeps and releases the units of one model on one rank."""

    def __init__(
        self, shards: Shards, communicator: Communicator, parameters: Mapping[str, nn.Parameter], zero: ZeroConfig
    ) -> None:
        self._shards = shards
        self._communicator = communicator
        self._zero = zero
        self._units = {unit.name: unit for unit in _units(shards, parameters)}
        self._unit_of = {name: unit for unit in self._units.values() for name in _names(unit)}
        self._by_storage: dict[int, GatheredUnit] = {}
        for unit in self._units.values():
            self._remember_storages(unit)
            _each(guard, unit.parameters)
        numel = {name: unit.numel for name, unit in self._units.items()}
        self._window = _window(zero, largest=max(numel.values(), default=0))
        self._orders = {True: UseOrder(numel), False: UseOrder(numel)}  # passes with a backward, passes without
        self._order = self._orders[True]
        self._last_in_backward: GatheredUnit | None = None
        self._live: dict[str, GatheredUnit] = {}  # units with memory, the longest unused first
        self.live_numel = 0
        self.peak_live_numel = 0

    @property
    def is_needed(self) -> bool:
        """Whether anything is partitioned."""
        return bool(self._units)

    def has(self, unit: str) -> bool:
        """Whether some parameters of the unit are partitioned."""
        return unit in self._units

    def unit_of(self, parameter: str) -> str | None:
        """The unit to gather for a parameter; None when it is always whole."""
        unit = self._unit_of.get(parameter)
        return None if unit is None else unit.name

    def unit_of_storage(self, address: int) -> str | None:
        """The unit whose memory lies in the storage at this address; None for any other storage."""
        unit = self._by_storage.get(address)
        return None if unit is None else unit.name

    def begin_pass(self, *, with_backward: bool) -> None:
        """A forward begins; uses are recorded as those of its kind."""
        self._order = self._orders[with_backward]

    def pin(self, name: str, why: str) -> None:
        """Use a unit and hold it: whole and unguarded until `unpin`.  Raises CollectiveError if ranks don't meet."""
        unit = self._units[name]
        unit.pins += 1
        if in_backward():
            self.demand(name)
        else:
            self._order.use(name)
            self._fetch(unit, why)
            self._look_ahead()
        _each(unguard, unit.parameters)

    def hold(self, name: str, why: str) -> None:
        """The same outside any pass: a use that comes in no order."""
        unit = self._units[name]
        unit.pins += 1
        self._fetch(unit, why)
        _each(unguard, unit.parameters)

    def unpin(self, name: str) -> None:
        """Stop holding a unit; released unless it is needed next, or a backward is under way that will see to it."""
        unit = self._units[name]
        unit.pins -= 1
        if unit.pins == 0:
            _each(guard, unit.parameters)
            gone = unit.state is UnitState.PARTITIONED
            if not gone and not in_backward() and not self._is_worth_keeping(unit):
                self._release(unit)

    def demand(self, name: str) -> None:
        """Backward needs the unit (once or many times in a row: one use)."""
        unit = self._units[name]
        if self._last_in_backward is not unit:
            self._last_in_backward = unit
            self._order = self._orders[True]
            self._order.use(name)
            unit.awaited = set(unit.trainable)
            self._release_passed(unit)
        elif unit.state is UnitState.WHOLE:
            return
        self._fetch(unit, "backward")
        self._look_ahead()

    def lend(self, name: str) -> None:
        """Backward computes with the parameters themselves (it recomputes a part of a forward): unguarded for now."""
        self.demand(name)
        _each(unguard, self._units[name].parameters)

    def gradient_ready(self, parameter: str) -> None:
        """Autograd has finished a parameter's gradient; with the last one of its unit, backward is done with it."""
        unit = self._unit_of.get(parameter)
        if unit is None or not unit.releases_early:
            return
        unit.awaited.discard(parameter)
        if not unit.awaited and unit.state is UnitState.WHOLE and not unit.pins and not self._is_worth_keeping(unit):
            self._release(unit)

    def end_pass(self, *, with_backward: bool) -> None:
        """A backward, or a forward without one, is over: nothing stays that nobody holds."""
        self._orders[with_backward].end_pass()
        self._last_in_backward = None
        if with_backward:
            self.release_all()

    def release_all(self) -> None:
        """Release every unit that nobody holds."""
        for unit in list(self._live.values()):
            if not unit.pins:
                self._release(unit)

    def check_unpinned(self, call: str) -> None:
        """Raise UsageError when somebody holds parameters that are about to change."""
        held = [unit.name for unit in self._live.values() if unit.pins]
        if held:
            given = f"{call} while {', '.join(held)} is gathered"
            rule = "gathered parameters are copies, which would be out of date"
            raise UsageError(Problem(given, rule, f"{call} after the block of GatheredParameters"))

    def let_go(self, name: str) -> None:
        """Whoever else refers to the unit's memory keeps it: the parameters move to new memory, not yet there."""
        unit = self._units[name]
        _each(unguard, unit.parameters)
        for section in unit.sections:
            self._by_storage.pop(_address(self._shards.flat(section)))
            self._shards.renew_flat(section)
        self._remember_storages(unit)
        _each(guard, unit.parameters)
        self._forget(unit)

    def _fetch(self, unit: GatheredUnit, why: str) -> None:
        """Return when the unit is whole."""
        unit.ahead = False
        if unit.state is not UnitState.WHOLE:
            self._make_room(unit)
            self._bring_memory(unit)
            for bucket in unit.buckets:
                self._launch(unit, bucket)
            self._wait(unit, why)
        self._live[unit.name] = self._live.pop(unit.name)  # the last used

    def _look_ahead(self) -> None:
        """Launch gathers of the units used next, as far as the window reaches and the limit allows."""
        window = self._window
        for name in self._order.upcoming():
            unit = self._units[name]
            if window <= 0:
                return
            if unit.state is not UnitState.WHOLE:
                if unit.state is UnitState.PARTITIONED and not self._fits(unit):
                    return
                self._launch_within(unit, window)
            window -= unit.numel

    def _launch_within(self, unit: GatheredUnit, window: int) -> None:
        for bucket in unit.buckets:
            window -= bucket.numel
            if window < 0:
                return
            if unit.state is UnitState.PARTITIONED:
                self._bring_memory(unit)
                unit.ahead = True
            self._launch(unit, bucket)

    def _launch(self, unit: GatheredUnit, bucket: Bucket) -> None:
        if bucket.index not in unit.works:
            whole = self._shards.flat(self._shards.layout.sections[bucket.section])[bucket.start : bucket.stop]
            mine = self._shards.working(bucket, self._shards.partition(bucket))
            with torch.no_grad():
                unit.works[bucket.index] = self._communicator.all_gather_into(whole, mine)

    def _wait(self, unit: GatheredUnit, why: str) -> None:
        try:
            for work in unit.works.values():
                work.wait()
        except RuntimeError as error:
            names = ", ".join(_names(unit))
            given = f"data-parallel rank {self._communicator.rank}: gathering {names} for {why} did not end: {error}"
            rule = "every rank gathers the same parameters in the same order"
            legal = "enter GatheredParameters, and every partitioned module, on all ranks or on none"
            raise CollectiveError(Problem(given, rule, legal)) from error
        unit.works.clear()
        unit.state = UnitState.WHOLE

    def _bring_memory(self, unit: GatheredUnit) -> None:
        if unit.state is not UnitState.PARTITIONED:
            return
        for section in unit.sections:
            flat = self._shards.flat(section)
            flat.untyped_storage().resize_(section.numel * flat.element_size())
            self._shards.ledger.resized(flat)
        unit.state = UnitState.IN_FLIGHT
        self._live[unit.name] = unit
        self.live_numel += unit.numel
        self.peak_live_numel = max(self.peak_live_numel, self.live_numel)

    def _release(self, unit: GatheredUnit) -> None:
        if unit.state is UnitState.IN_FLIGHT:  # gathered ahead, and not used
            self._wait(unit, "a use that did not come")
        if not self._zero.memory_efficient_linear:
            self.let_go(unit.name)
            return
        for section in unit.sections:
            self._shards.flat(section).untyped_storage().resize_(0)
            self._shards.ledger.resized(self._shards.flat(section))
        _each(guard, unit.parameters)
        self._forget(unit)

    def _forget(self, unit: GatheredUnit) -> None:
        unit.state = UnitState.PARTITIONED
        unit.ahead = False
        del self._live[unit.name]
        self.live_numel -= unit.numel

    def _release_passed(self, current: GatheredUnit) -> None:
        """What backward has gone past goes."""
        for unit in list(self._live.values()):
            if unit is not current and not unit.pins and not unit.ahead and not self._is_worth_keeping(unit):
                self._release(unit)

    def _make_room(self, wanted: GatheredUnit) -> None:
        """Release what is only kept for later, the longest unused first, until `wanted` fits."""
        for unit in list(self._live.values()):
            if self._fits(wanted):
                return
            if unit is not wanted and not unit.pins and unit.state is UnitState.WHOLE:
                self._release(unit)

    def _fits(self, unit: GatheredUnit) -> bool:
        return self.live_numel + unit.numel <= self._zero.max_live_parameters

    def _is_worth_keeping(self, unit: GatheredUnit) -> bool:
        distance = self._order.distance(unit.name)
        within = distance is not None and distance <= self._zero.max_reuse_distance
        return within and self.live_numel <= self._zero.max_live_parameters

    def _remember_storages(self, unit: GatheredUnit) -> None:
        for section in unit.sections:
            self._by_storage[_address(self._shards.flat(section))] = unit


def in_backward() -> bool:
    """Whether autograd is walking a graph in this thread."""
    return torch._C._current_graph_task_id() != -1


def _window(zero: ZeroConfig, *, largest: int) -> int:
    """Elements to gather ahead of use."""
    if not zero.overlap_comm:
        return 0
    return largest if zero.prefetch_bucket_size is None else zero.prefetch_bucket_size


def _units(shards: Shards, parameters: Mapping[str, nn.Parameter]) -> Iterator[GatheredUnit]:
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


def _names(unit: GatheredUnit) -> list[str]:
    return [slot.spec.name for section in unit.sections for slot in section.slots]


def _each(action: Callable[[nn.Parameter], None], parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        action(parameter)


def _address(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage, the same for all its views and through resizing."""
    return int(tensor.untyped_storage()._cdata)
