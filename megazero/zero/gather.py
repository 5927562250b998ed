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
        self._node: object = None  # of autograd's graph: the one that backward was computing when it last asked
        self._used_by_node: set[str] = set()
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

    def unit_of_memory(self, tensor: torch.Tensor) -> str | None:
        """The unit in whose memory the tensor lies; None for any other tensor, with memory or without."""
        unit = self._by_storage.get(_address(tensor)) if torch._C._has_storage(tensor) else None
        return None if unit is None else unit.name

    def begin_pass(self, *, with_backward: bool) -> None:
        """A forward begins; uses are recorded as those of its kind."""
        self._order = self._orders[with_backward]

    def pin(self, name: str, why: str) -> None:
        """Use a unit and hold it: whole and unguarded until `unpin`.  Raises CollectiveError if ranks don't meet."""
        unit = self._units[name]
        unit.pins += 1
        if in_backward():
            self._use_in_backward(unit)
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
        unit.held = True
        _each(unguard, unit.parameters)

    def unpin(self, name: str) -> None:
        """Stop holding a unit; released unless it is needed next, or a backward is under way that will see to it."""
        unit = self._units[name]
        unit.pins -= 1
        if unit.pins == 0:
            _each(guard, unit.parameters)
            stays = not unit.held and (in_backward() or self._is_worth_keeping(unit))
            if unit.state is not UnitState.PARTITIONED and not stays:  # its memory may not have come at all
                self._release(unit)

    def share(self, name: str) -> None:
        """Others refer to the unit's memory from now on: they keep it when the unit is released."""
        self._units[name].shared = True

    def demand(self, name: str) -> None:
        """Backward needs the unit; what one node of the graph needs is there together."""
        unit = self._units[name]
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._node, self._used_by_node = node, set()
        self._used_by_node.add(name)
        self._use_in_backward(unit)

    def lend(self, name: str) -> None:
        """Backward recomputes a part of a forward with the parameters themselves, and keeps what it has saved of them.

        They are unguarded as long as the unit is there.
        """
        unit = self._units[name]
        self.demand(name)
        unit.shared = True
        unit.lent_in = torch._C._current_graph_task_id()
        _each(unguard, unit.parameters)

    def _use_in_backward(self, unit: GatheredUnit) -> None:
        """A use by a backward; many in a row are one."""
        if self._last_in_backward is not unit:
            self._last_in_backward = unit
            self._order = self._orders[True]
            self._order.use(unit.name)
            unit.awaited = set(unit.trainable)
            self._release_passed(unit)
        elif unit.state is UnitState.WHOLE:
            return
        self._fetch(unit, "backward")
        self._look_ahead()

    def gradient_ready(self, parameter: str) -> None:
        """Autograd has finished a parameter's gradient; with the last one of its unit, backward is done with it."""
        unit = self._unit_of.get(parameter)
        if unit is None or not unit.releases_early:
            return
        unit.awaited.discard(parameter)
        is_done = not (unit.awaited or unit.pins or _is_recomputed(unit))
        if is_done and unit.state is UnitState.WHOLE and not self._is_worth_keeping(unit):
            self._release(unit)

    def end_pass(self, *, with_backward: bool) -> None:
        """A backward, or a forward without one, is over: nothing stays that nobody holds."""
        self._orders[with_backward].end_pass()
        self._last_in_backward = self._node = None
        self._used_by_node = set()
        self.release_all()

    def abandon_pass(self) -> None:
        """A forward has failed: what it has used is no record of anything."""
        self._order.abandon_pass()
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
            unit.works.clear()  # nothing more will come
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
        if unit.shared or not self._zero.memory_efficient_linear or not self._is_ours_alone(unit):
            self._leave_memory(unit)
        else:
            for section in unit.sections:
                self._shards.flat(section).untyped_storage().resize_(0)
                self._shards.ledger.resized(self._shards.flat(section))
        _each(guard, unit.parameters)
        unit.state = UnitState.PARTITIONED
        unit.ahead = unit.shared = unit.held = False
        unit.lent_in = None
        del self._live[unit.name]
        self.live_numel -= unit.numel

    def _is_ours_alone(self, unit: GatheredUnit) -> bool:
        """Whether the memory can be taken away; torch doesn't let go of what NumPy has seen."""
        return all(self._shards.flat(section).untyped_storage().resizable() for section in unit.sections)

    def _leave_memory(self, unit: GatheredUnit) -> None:
        """Whoever else refers to the unit's memory keeps it: the parameters move to new memory, not yet there."""
        _each(unguard, unit.parameters)
        for section in unit.sections:
            self._by_storage.pop(_address(self._shards.flat(section)))
            self._shards.renew_flat(section)
        self._remember_storages(unit)

    def _release_passed(self, current: GatheredUnit) -> None:
        """What backward has gone past goes."""
        for unit in list(self._live.values()):
            if not (unit is current or unit.ahead or self._is_in_use(unit) or self._is_worth_keeping(unit)):
                self._release(unit)

    def _is_in_use(self, unit: GatheredUnit) -> bool:
        return unit.pins > 0 or unit.name in self._used_by_node or _is_recomputed(unit)

    def _make_room(self, wanted: GatheredUnit) -> None:
        """Release what is only kept for later, the longest unused first, until `wanted` fits."""
        for unit in list(self._live.values()):
            if self._fits(wanted):
                return
            if unit.state is UnitState.WHOLE and unit is not wanted and not self._is_in_use(unit):
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


def _is_recomputed(unit: GatheredUnit) -> bool:
    """Whether a backward within the one that it was lent in goes through what has been recomputed with it."""
    return unit.lent_in is not None and unit.lent_in != torch._C._current_graph_task_id()


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
    return int(torch._C._storage_address(tensor))  # type: ignore[attr-defined]
