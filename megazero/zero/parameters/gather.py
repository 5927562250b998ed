"""Partitioned parameters: gathered just before a unit is used, released when it isn't needed next
(ZeRO, section 5.3).

*Uses* come from outside (`frames.py`): a module's forward begins, a parameter is touched, backward needs a saved
tensor.  Correctness depends on them alone.  What is prefetched, and what is retained for its next use, is decided here,
from the order that the last pass recorded (`use_order.py`) and the limits of the configuration; every rank comes to the
same decisions, so collectives meet.  A unit is *pinned* while a module's forward, or the user, needs it.  Its memory is
allocated, filled and released in `unit_memory.py`.  (PyTorch's FSDP calls these acts unshard and reshard.)
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from megazero.comm.interface import Communicator
from megazero.comm.wires.quantized import EncodedGather
from megazero.config.engine_sections import ZeroConfig
from megazero.errors import Problem, UsageError
from megazero.memory.copies import Arrival
from megazero.timers import Timers
from megazero.zero.layout import Bucket, joined_gathers, prefetch_limit
from megazero.zero.offloaded import StateKind
from megazero.zero.parameters.unit_memory import (
    GatheredUnit,
    UnitBuckets,
    UnitMemory,
    UnitState,
    partitioned_units,
)
from megazero.zero.parameters.use_order import UseOrder
from megazero.zero.plan import Home
from megazero.zero.shards import Shards


class ParameterGather:
    """The units of one model on one rank: gathers, prefetches, retains and releases them."""

    def __init__(
        self,
        shards: Shards,
        communicator: Communicator,
        parameters: Mapping[str, nn.Parameter],
        zero: ZeroConfig,
        *,
        most_gathered: int,
        timers: Timers,
        take_updated: Callable[[Bucket], Arrival],
        come_to: Callable[[Collection[str]], None],
        secondary: Communicator | None = None,
        exact: Communicator | None = None,
        frozen: EncodedGather | None = None,
        joins_units: bool = True,
        ranks_may_differ: bool = True,
    ) -> None:
        """most_gathered: the elements that one gather of several buckets moves at the most.

        take_updated, secondary, exact, frozen: as for `UnitMemory`.

        come_to: called with the trainable parameters of a unit that has been gathered for its use in backward.

        joins_units: False if every gather takes a buffer of its own, so that many small ones would take many.

        ranks_may_differ: False if all ranks surely gather the same units in the same order.
        """
        self._zero = zero
        self._on_use_in_backward, self._check_back = come_to, shards.check_back
        self._timers = timers
        self.memory = UnitMemory(
            shards,
            communicator,
            take_updated=take_updated,
            secondary=secondary,
            exact=exact,
            frozen=frozen,
            autograd_retains_memory=not zero.memory_efficient_linear,
            labels_gathers=ranks_may_differ or zero.enable_sanity_checks,
            compares_labels=zero.enable_sanity_checks,
        )
        given = zero.prefetch_bucket_size
        # A larger message would never be gathered ahead.
        units = partitioned_units(shards, parameters, min(most_gathered, given or most_gathered))
        self._units = {unit.name: unit for unit in units}
        self.is_needed = bool(self._units)
        """True if a unit is partitioned."""
        self.trainable_by_unit: Sequence[Collection[str]] = [unit.trainable for unit in units]
        """The trainable parameters of each unit."""
        self._unit_of = {name: unit for unit in self._units.values() for name in unit.names}
        for unit in self._units.values():
            self.memory.attach(unit)
        numel = {name: unit.numel for name, unit in self._units.items()}
        largest = max(numel.values(), default=0)
        window = prefetch_limit(communicator.size if joins_units else 1, largest, given) if zero.overlap_comm else 0
        self._prefetch_numel = window  # elements to gather ahead of their use
        # Room of a use and what is ahead of it.
        self._room = min(largest + window, zero.max_live_parameters) if window else 0
        is_in_files = shards.plan.parameter.home is Home.FILE
        least = joined_gathers(communicator.size, min(window, max(zero.max_live_parameters - largest, 0)), given)
        # Elements of a message ahead of its use.  Partitions in files come one after the other, as buffers are free.
        self._least_ahead = min(least, most_gathered) if joins_units and not is_in_files else 0
        self._most_gathered = most_gathered
        self._orders = {True: UseOrder(numel), False: UseOrder(numel)}  # passes with a backward, passes without
        self._order = self._orders[True]
        self._fetch_partition, self._forget_fetches = shards.fetch_partition, shards.forget_fetches
        self._reads_ahead = is_in_files and zero.overlap_comm
        self._last_in_backward: GatheredUnit | None = None
        self._node: object = None  # the node of autograd's graph that last gathered a unit
        self._used_by_node: set[str] = set()
        self._leaf: frozenset[str] = frozenset()  # units of the leaf module that backward walks through
        self._retained: set[str] = set()  # units that stay gathered between their uses, as far as the limit allows

    def has(self, unit: str) -> bool:
        """Return True if some parameters of the unit are partitioned."""
        return unit in self._units

    def unit_of(self, parameter: str) -> str | None:
        """Return the unit to gather for a parameter; None when it is always whole."""
        unit = self._unit_of.get(parameter)
        return None if unit is None else unit.name

    def begin_pass(self, *, with_backward: bool) -> None:
        """Record the uses from here on as those of a forward that has a backward, or of one that has none."""
        self._order = self._orders[with_backward]

    def retain(self, names: Iterable[str]) -> None:
        """Retain these units after their next uses, as far as the limit allows, until `stop_retaining`."""
        self._retained.update(name for name in names if name in self._units)

    def stop_retaining(self, names: Iterable[str]) -> None:
        """Release these units, unless they are in use, and do not retain them any more."""
        for unit in (self._units[name] for name in names if name in self._retained):
            self._retained.discard(unit.name)
            if unit.state is not UnitState.PARTITIONED and not (unit.is_prefetched or self._is_in_use(unit)):
                self.memory.release(unit)

    def pin(self, name: str, why: str) -> None:
        """Gather a unit for a use, whole and unguarded until `unpin`.  Raises CollectiveError if ranks don't meet."""
        unit = self._units[name]
        unit.pins += 1  # which the frame that has asked for it takes back, also where it fails
        self._check_back("a forward", (StateKind.PARTITIONS,))
        if in_backward():
            self._use_in_backward(unit)
        else:
            self._order.use(name)
            if self._order.is_left:  # what was to stay for a use that was ahead has no room beside this one
                self._release_finished(unit)
            self._gather(unit, why)
            self._prefetch()
        self.memory.unguard(unit)

    def pin_for_user(self, name: str, why: str) -> None:
        """Gather a unit outside any pass, whole and unguarded until `unpin`; the record of uses has no such use."""
        self._check_back(why, (StateKind.PARTITIONS,))
        unit = self._units[name]
        if self.memory.rounds and not unit.pins:
            if unit.state is not UnitState.PARTITIONED and not unit.is_exact:
                self.memory.release(unit)
            unit.is_exact = True
        unit.pins += 1
        self._gather(unit, why)
        unit.was_pinned_by_user = True
        self.memory.unguard(unit)

    def unpin(self, name: str) -> None:
        """Release a unit, unless other pins remain, it is needed soon, or a running backward will release it."""
        unit = self._units[name]
        unit.pins -= 1
        if unit.pins == 0:
            self.memory.guard(unit)
            stays = not unit.was_pinned_by_user and (in_backward() or self._is_worth_retaining(unit))
            if unit.state is not UnitState.PARTITIONED and not stays:  # it is PARTITIONED if its gather has failed
                self.memory.release(unit)

    def share(self, name: str) -> None:
        """Leave the unit's memory to the tensors that refer to it when the unit is released."""
        self._units[name].shared = True

    def gather_for_backward(self, unit: GatheredUnit) -> None:
        """Gather a unit for a saved tensor; the units of one node of the graph stay until the next node."""
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._node, self._used_by_node = node, set()
        self._used_by_node.add(unit.name)
        self._use_in_backward(unit)

    def gather_leaf(self, names: Iterable[str]) -> None:
        """Gather a leaf module's units for its backward, which comes next, whatever ranks have computed in it.

        They stay until backward uses another unit, so that ranks gather them alike.
        """
        units = [self._units[name] for name in names if name in self._units]
        leaf = frozenset(unit.name for unit in units)
        if leaf == self._leaf:  # the gradient of another output
            return
        self._leaf = leaf
        for unit in units:
            self._come_to(unit)

    def gather_for_recomputation(self, name: str) -> None:
        """Gather a unit for a part of a forward that backward recomputes, and that saves tensors of it anew.

        Its parameters are unguarded until it is released.
        """
        unit = self._units[name]
        self.gather_for_backward(unit)
        unit.shared = True
        unit.recomputed_in = torch._C._current_graph_task_id()
        self.memory.unguard(unit)

    def _use_in_backward(self, unit: GatheredUnit) -> None:
        """Gather a unit for backward; several uses in a row count as one, and those within a leaf module."""
        if unit.name not in self._leaf:
            self._leaf = frozenset()
        elif unit.state is UnitState.WHOLE:
            return
        self._come_to(unit)

    def _come_to(self, unit: GatheredUnit) -> None:
        """Gather a unit that backward uses next."""
        if self._last_in_backward is not unit:
            self._check_back("backward", (StateKind.PARTITIONS,))
            self._last_in_backward = unit
            self._order = self._orders[True]
            self._order.use(unit.name)
            unit.awaited = set(unit.trainable)
            self._release_finished(unit)
        elif unit.state is UnitState.WHOLE:
            return
        self._gather(unit, "backward")
        self._prefetch()
        self._on_use_in_backward(unit.trainable)

    def gradient_ready(self, parameter: str) -> None:
        """Release the parameter's unit if this was its last gradient, which ends backward's use of it."""
        unit = self._unit_of.get(parameter)
        if unit is None or not unit.releases_early:
            return
        unit.awaited.discard(parameter)
        is_done = not (unit.awaited or unit.pins or _is_recomputed(unit) or unit.name in self._leaf)
        if is_done and unit.state is UnitState.WHOLE and not self._is_worth_retaining(unit):
            self.memory.release(unit)

    def end_pass(self, *, with_backward: bool) -> None:
        """End a backward, or a forward without one: release the units that are neither pinned nor retained."""
        self._orders[with_backward].end_pass()
        self._forget_fetches()
        self._reset_backward()
        for unit in list(self.memory.live.values()):
            if not (unit.pins or self._is_retained(unit)):
                self.memory.release(unit)

    def end_backward(self) -> None:
        """End a backward after which other forwards still wait for theirs."""
        self._reset_backward()
        self._release_finished(None)

    def _reset_backward(self) -> None:
        self._last_in_backward = self._node = None
        self._used_by_node, self._leaf = set(), frozenset()

    def reset_pass(self) -> None:
        """Forget the uses of a forward or backward that has failed, and release its units."""
        self._order.reset_pass()
        self._retained.clear()
        self._reset_backward()
        self.release_all()

    def release_all(self) -> None:
        """Release every unit that is not pinned; the next gathers are of partitions, whose values may change now."""
        for unit in list(self.memory.live.values()):
            if not unit.pins:
                self.memory.release(unit)
        self.memory.secondary.forget()

    def check_unpinned(self, call: str) -> None:
        """Raise UsageError if parameters that are about to change are pinned."""
        pinned = [unit.name for unit in self.memory.live.values() if unit.pins]
        if pinned:
            given = f"{call} while {', '.join(pinned)} is gathered"
            rule = "gathered parameters are copies, which would be out of date"
            raise UsageError(Problem(given, rule, f"{call} after the block of GatheredParameters"))

    def _gather(self, unit: GatheredUnit, why: str) -> None:
        """Gather a unit, and wait until it is whole."""
        unit.is_prefetched = unit.has_room = False
        if unit.state is not UnitState.WHOLE:
            self._make_room(unit)
            self.memory.allocate(unit)
            for group in unit.groups:
                self.memory.launch(group)
            with self._timers.measure("params-gather"):
                self.memory.wait(unit, why)
        self.memory.mark_used(unit)

    def _prefetch(self) -> None:
        """Launch gathers of the units used next, up to the elements to prefetch and the limit of memory.

        What is in files is fetched further ahead.
        """
        for message in _messages(self._due_ahead(), self._least_ahead, self._most_gathered):
            for unit, *_ in message:
                if unit.state is UnitState.PARTITIONED:
                    self.memory.allocate(unit)
                    unit.is_prefetched = True
            self.memory.launch(*message)
        if self._reads_ahead:
            self._fetch_partitions()

    def _due_ahead(self) -> Iterator[tuple[int, UnitBuckets]]:
        """Yield what may be gathered ahead and has not been begun, in order: the elements used before it, and it."""
        used, live = 0, self.memory.live_numel
        found: set[str] = set()
        for name in self._order.upcoming():
            unit = self._units[name]
            if used >= self._prefetch_numel:
                return
            if unit.state is not UnitState.WHOLE and name not in found:
                found.add(name)
                if unit.state is UnitState.PARTITIONED:
                    live += unit.numel
                    if live > self._zero.max_live_parameters:
                        return
                stop = used
                for group in unit.groups:
                    stop += group.numel
                    if stop > self._prefetch_numel:
                        break
                    if group.buckets[0].index not in unit.works:
                        yield used, group
            used += unit.numel

    def _fetch_partitions(self) -> None:
        """Begin to read partitions of the units gathered next, in order, as far as there are buffers."""
        for name in self._order.upcoming():
            unit = self._units[name]
            missing = (bucket for bucket in unit.buckets if bucket.index not in unit.works)
            if unit.state is not UnitState.WHOLE and not all(map(self._fetch_partition, missing)):
                return

    def _release_finished(self, current: GatheredUnit | None) -> None:
        """Release the units that backward has finished with."""
        for unit in list(self.memory.live.values()):
            is_needed = unit is current or unit.is_prefetched or self._is_in_use(unit)
            if not (is_needed or self._is_worth_retaining(unit, beside=current)):
                self.memory.release(unit)

    def _is_in_use(self, unit: GatheredUnit) -> bool:
        return unit.pins > 0 or unit.name in self._used_by_node or unit.name in self._leaf or _is_recomputed(unit)

    def _make_room(self, wanted: GatheredUnit) -> None:
        """Release units that are not in use, the longest unused first, until `wanted` fits."""
        for unit in list(self.memory.live.values()):
            if self._fits(wanted):
                return
            if unit.state is UnitState.WHOLE and unit is not wanted and not self._is_in_use(unit):
                self.memory.release(unit)

    def _fits(self, unit: GatheredUnit) -> bool:
        return self.memory.live_numel + unit.numel <= self._zero.max_live_parameters

    def _is_retained(self, unit: GatheredUnit) -> bool:
        return unit.name in self._retained and self.memory.live_numel <= self._zero.max_live_parameters

    def _is_worth_retaining(self, unit: GatheredUnit, *, beside: GatheredUnit | None = None) -> bool:
        """Return True for a unit that is needed again soon; beside: another one whose use begins now.

        What has room beside all that is used before it stays too: where forward turns into backward, what would be
        gathered ahead is what forward has just used.
        """
        if self._is_retained(unit):
            return True
        distance = self._order.distance(unit.name)
        if distance is None or self.memory.live_numel > self._zero.max_live_parameters:
            return False
        distance += 0 if beside is None else beside.numel  # its use has begun: the record leaves it out
        if distance > self._zero.max_reuse_distance and not unit.has_room:
            unit.has_room = self._order.fits(unit.name, self._room)
            return unit.has_room
        return True


def _messages(found: Iterable[tuple[int, UnitBuckets]], least: int, most: int) -> Iterator[list[UnitBuckets]]:
    """Group what is gathered ahead by messages of at least `least` elements, and at most `most`.

    found: each with the elements that are used before it.  The rest waits for more, unless fewer than `least` are.
    """
    message: list[UnitBuckets] = []
    numel = before = 0
    for used, group in found:
        if message and numel + group.numel > most:
            yield message
            message = []
        if not message:
            numel, before = 0, used
        message.append(group)
        numel += group.numel
        if numel >= least:
            yield message
            message = []
    if message and before < least:
        yield message


def in_backward() -> bool:
    """Return True if autograd is walking a graph in this thread."""
    return torch._C._current_graph_task_id() != -1


def _is_recomputed(unit: GatheredUnit) -> bool:
    """Return True if an outer backward recomputed with the unit, and the running one walks what was recomputed."""
    return unit.recomputed_in is not None and unit.recomputed_in != torch._C._current_graph_task_id()
