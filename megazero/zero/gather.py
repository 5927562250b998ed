"""Partitioned parameters: gathered just before a unit is used, released when it isn't needed next (paper section 5.3).

*Uses* come from outside (`frames.py`): a module's forward begins, a parameter is touched, backward asks for a saved
tensor.  They are all there is to correctness.  What is gathered ahead of its use, and what is kept for the next one, is
decided here, from the order that the last pass recorded (`lookahead.py`) and the limits of the configuration; every
rank comes to the same decisions, so collectives meet.  A unit is *pinned* while a module's forward, or the user, holds
it.  How its memory comes and goes is `unit_memory.py`.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from megazero.comm.interface import Communicator
from megazero.config.engine_sections import ZeroConfig
from megazero.errors import Problem, UsageError
from megazero.zero.guard import guard, unguard
from megazero.zero.shards import Shards
from megazero.zero.unit_memory import GatheredUnit, UnitMemory, UnitState, each, partitioned_units
from megazero.zero.use_order import UseOrder


class ParameterGather:
    """Gathers, keeps and releases the units of one model on one rank."""

    def __init__(
        self, shards: Shards, communicator: Communicator, parameters: Mapping[str, nn.Parameter], zero: ZeroConfig
    ) -> None:
        self._zero = zero
        self.memory = UnitMemory(shards, communicator, leaves_to_autograd=not zero.memory_efficient_linear)
        self._units = {unit.name: unit for unit in partitioned_units(shards, parameters)}
        self.is_needed = bool(self._units)
        """Whether anything is partitioned."""
        self._unit_of = {name: unit for unit in self._units.values() for name in unit.names}
        for unit in self._units.values():
            self.memory.enter(unit)
        numel = {name: unit.numel for name, unit in self._units.items()}
        self._window = _window(zero, largest=max(numel.values(), default=0))
        self._orders = {True: UseOrder(numel), False: UseOrder(numel)}  # passes with a backward, passes without
        self._order = self._orders[True]
        self._last_in_backward: GatheredUnit | None = None
        self._node: object = None  # of autograd's graph: the one that backward was computing when it last asked
        self._used_by_node: set[str] = set()
        self._kept: set[str] = set()  # units that stay gathered between their uses, as far as the limit allows

    def has(self, unit: str) -> bool:
        """Whether some parameters of the unit are partitioned."""
        return unit in self._units

    def unit_of(self, parameter: str) -> str | None:
        """The unit to gather for a parameter; None when it is always whole."""
        unit = self._unit_of.get(parameter)
        return None if unit is None else unit.name

    def unit_of_memory(self, tensor: torch.Tensor) -> str | None:
        """The unit in whose memory the tensor lies; None for any other tensor, with memory or without."""
        unit = self.memory.unit_of(tensor)
        return None if unit is None else unit.name

    def begin_pass(self, *, with_backward: bool) -> None:
        """A forward begins; uses are recorded as those of its kind."""
        self._order = self._orders[with_backward]

    def keep(self, names: Iterable[str]) -> None:
        """Units of these stay gathered after their next uses, as far as the limit allows, until `let_go`."""
        self._kept.update(name for name in names if name in self._units)

    def let_go(self, names: Iterable[str]) -> None:
        """Nothing is kept of these units any more but what is in use."""
        for unit in (self._units[name] for name in names if name in self._kept):
            self._kept.discard(unit.name)
            if unit.state is not UnitState.PARTITIONED and not (unit.ahead or self._is_in_use(unit)):
                self.memory.release(unit)

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
        each(unguard, unit.parameters)

    def hold(self, name: str, why: str) -> None:
        """The same outside any pass: a use that comes in no order."""
        unit = self._units[name]
        unit.pins += 1
        self._fetch(unit, why)
        unit.held = True
        each(unguard, unit.parameters)

    def unpin(self, name: str) -> None:
        """Stop holding a unit; released unless it is needed next, or a backward is under way that will see to it."""
        unit = self._units[name]
        unit.pins -= 1
        if unit.pins == 0:
            each(guard, unit.parameters)
            stays = not unit.held and (in_backward() or self._is_worth_keeping(unit))
            if unit.state is not UnitState.PARTITIONED and not stays:  # its memory may not have come at all
                self.memory.release(unit)

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
        each(unguard, unit.parameters)

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
            self.memory.release(unit)

    def end_pass(self, *, with_backward: bool) -> None:
        """A backward, or a forward without one, is over: nothing stays that nobody holds or keeps."""
        self._orders[with_backward].end_pass()
        self._forget_backward()
        for unit in list(self.memory.live.values()):
            if not (unit.pins or self._is_kept(unit)):
                self.memory.release(unit)

    def end_backward(self) -> None:
        """A backward is over, but not the pass: other forwards still wait for theirs."""
        self._forget_backward()
        self._release_passed(None)

    def _forget_backward(self) -> None:
        self._last_in_backward = self._node = None
        self._used_by_node = set()

    def abandon_pass(self) -> None:
        """A forward or backward has failed: what it has used is no record of anything."""
        self._order.abandon_pass()
        self._kept.clear()
        self._forget_backward()
        self.release_all()

    def release_all(self) -> None:
        """Release every unit that nobody holds."""
        for unit in list(self.memory.live.values()):
            if not unit.pins:
                self.memory.release(unit)

    def check_unpinned(self, call: str) -> None:
        """Raise UsageError when somebody holds parameters that are about to change."""
        held = [unit.name for unit in self.memory.live.values() if unit.pins]
        if held:
            given = f"{call} while {', '.join(held)} is gathered"
            rule = "gathered parameters are copies, which would be out of date"
            raise UsageError(Problem(given, rule, f"{call} after the block of GatheredParameters"))

    def _fetch(self, unit: GatheredUnit, why: str) -> None:
        """Return when the unit is whole."""
        unit.ahead = False
        if unit.state is not UnitState.WHOLE:
            self._make_room(unit)
            self.memory.bring(unit)
            for bucket in unit.buckets:
                self.memory.launch(unit, bucket)
            self.memory.wait(unit, why)
        self.memory.used(unit)

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
                self.memory.bring(unit)
                unit.ahead = True
            self.memory.launch(unit, bucket)

    def _release_passed(self, current: GatheredUnit | None) -> None:
        """What backward has gone past goes."""
        for unit in list(self.memory.live.values()):
            if not (unit is current or unit.ahead or self._is_in_use(unit) or self._is_worth_keeping(unit)):
                self.memory.release(unit)

    def _is_in_use(self, unit: GatheredUnit) -> bool:
        return unit.pins > 0 or unit.name in self._used_by_node or _is_recomputed(unit)

    def _make_room(self, wanted: GatheredUnit) -> None:
        """Release what is only kept for later, the longest unused first, until `wanted` fits."""
        for unit in list(self.memory.live.values()):
            if self._fits(wanted):
                return
            if unit.state is UnitState.WHOLE and unit is not wanted and not self._is_in_use(unit):
                self.memory.release(unit)

    def _fits(self, unit: GatheredUnit) -> bool:
        return self.memory.live_numel + unit.numel <= self._zero.max_live_parameters

    def _is_kept(self, unit: GatheredUnit) -> bool:
        return unit.name in self._kept and self.memory.live_numel <= self._zero.max_live_parameters

    def _is_worth_keeping(self, unit: GatheredUnit) -> bool:
        if self._is_kept(unit):
            return True
        distance = self._order.distance(unit.name)
        within = distance is not None and distance <= self._zero.max_reuse_distance
        return within and self.memory.live_numel <= self._zero.max_live_parameters


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
