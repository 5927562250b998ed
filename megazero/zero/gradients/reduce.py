"""Reduction: gradients go from autograd, bucket by bucket, over the data-parallel axis, to where the plan stores them.

One reduction moves a bucket, or neighbours in a section as far as it may move more than a bucket.  It is *complete*
when every parameter that overlaps it has its gradient, and is launched as soon as all those behind it in the model have
been: every rank launches in the same order, whatever order its gradients arrive in.  At most `_MAX_IN_FLIGHT` run
beside backward (none without overlap: backward then waits for each).  Where their unreduced gradients are stored
follows from the plan (`unreduced.py`).

A parameter without a gradient, such as an unused head, would hold back all reductions until backward ends.  One that
had none in the pass before is not waited for, where the graph that autograd walks does not reach it.  A rank that waits
for a reduction gathers nothing meanwhile, so ranks must stop waiting for a gradient at the same place among the
gathers: at the unit's own, and for a leaf module's, which each rank uses otherwise, where backward enters it.

With contiguous gradients the buffers are slots of an arena that is made once (ZeRO, section 6.3), as many as are
leased at once when gradients come in the reverse of the parameters' order; any more are leased from the pool.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from megazero.comm.interface import Communicator, Work, gather_together, reduce_together
from megazero.config.engine_sections import ZeroConfig
from megazero.errors import Problem, UsageError
from megazero.memory.address_book import ArenaStatistics
from megazero.memory.arena_scratch import ArenaScratch
from megazero.memory.lease import Scratch
from megazero.parallel.gradient_slot import GradientSlot
from megazero.timers import Timers
from megazero.zero.gradients.unreduced import ReducedBucket, make_store
from megazero.zero.layout import FlatLayout, Reduction
from megazero.zero.plan import Lifetime, Placement
from megazero.zero.shards import Shards

_MAX_IN_FLIGHT = 2


class _InFlight(NamedTuple):
    reduction: Reduction
    work: Work
    sums: list[ReducedBucket]


class GradientReducer:
    """A reducer that counts arriving gradients, and launches reductions in one order on all ranks."""

    def __init__(
        self,
        shards: Shards,
        communicator: Communicator,
        buffers: Scratch,
        parameters: Mapping[str, nn.Parameter],
        zero: ZeroConfig,
        *,
        num_summed: int,
        timers: Timers,
        in_leaves: Collection[str] = (),
    ) -> None:
        """num_summed: the ranks whose gradients are summed, in the end: those of the communicator, or more.

        in_leaves: the parameters of leaf modules.
        """
        self._shards = shards
        self._communicator = communicator
        self._zero = zero
        self._timers = timers
        # One rank's sums are there at once, so that its buckets may leave for host memory without waiting for others.
        self._max_in_flight = _MAX_IN_FLIGHT if zero.overlap_comm and communicator.size > 1 else 0
        self.predivisor = float(num_summed) if zero.prescale_gradients else zero.gradient_predivide_factor
        self._reductions_of = shards.layout.reductions_of
        self.bucket_arena = self._make_arena(list(parameters), buffers) if zero.contiguous_gradients else None
        self.scratch: Scratch = self.bucket_arena or buffers
        """The pool of buckets on the wire; between a backward and the next one other temporaries may use it."""
        self._store = make_store(
            shards,
            self.scratch,
            parameters,
            contiguous=zero.contiguous_gradients,
            reads_ahead=zero.offload_pipeline_read,
        )
        self._is_replicated = shards.plan.gradient.placement is Placement.REPLICATED
        self._in_flight: deque[_InFlight] = deque()
        self._gathering: list[Work] = []
        self._missing: dict[int, set[str]] = {}
        self._parameters = parameters
        self._in_leaves = frozenset(in_leaves)
        # Parameters that had no gradient when the last pass ended, without those of leaf modules.
        self._absent: Set[str] = self._reductions_of.keys() - self._in_leaves
        self._unreached: frozenset[str] = frozenset()  # those of them that the running pass's graph does not reach
        self._until_gathered: frozenset[str] = frozenset()  # those that are waited for until their unit is gathered
        self._unused: frozenset[str] = frozenset()  # those that are not waited for, or not any more
        self._left_out: set[str] = set()  # those that a reduction of the running pass has gone without
        self._is_flat = True  # no graph within another one has given a gradient
        self._arrived: set[str] | None = None  # parameters with a gradient in this micro-batch; None if it reduces none
        self.is_in_micro_batch = False
        """True while a backward pass is expected, or runs."""
        self.present: set[str] = set()
        """The parameters with a gradient in the step so far, on this rank."""
        self._has_ended = False  # a pass
        self._due: Sequence[Reduction] = ()  # those of the buckets that this micro-batch's backward fills
        self._next = -1  # position in self._due of the next one to launch; -1: none is left

    @property
    def arenas(self) -> dict[str, ArenaStatistics]:
        """The statistics of the arenas of reduced gradients ("kept") and of leased "buckets", where there are any."""
        found = {"kept": self._shards.gradient_arena, "buckets": self.bucket_arena}
        return {name: arena.statistics for name, arena in found.items() if arena is not None}

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self.present.clear()
        self._store.begin_step()

    def begin_micro_batch(self, due: Sequence[Reduction], *, is_last: bool) -> None:
        """Expect one backward pass, which fills the buckets of these; is_last: none of the step's later ones does."""
        self.is_in_micro_batch = True
        if self._store.is_due(last_micro_batch=is_last):
            self._missing = {reduction.index: set(reduction.fragments) for reduction in due}
            self._arrived = set()
            self._due = due
            self._next = len(due) - 1

    @property
    def may_find_unused(self) -> bool:
        """True if a parameter had no gradient in the last pass, and all others came from the outermost graph."""
        return self._is_flat and self._zero.ignore_unused_parameters and bool(self._absent)

    def find_unused(self, units: Iterable[Collection[str]]) -> None:
        """Find the parameters that get no gradient in the running pass, as its graph does not reach them.

        To be called while autograd walks the outermost graph, before its first gradient.  The first pass only shows
        whether all gradients come from that graph.  units: the parameters of each unit that backward gathers; they are
        waited for until it comes to the unit, if it does.
        """
        if not self.may_find_unused:
            return
        found = {name for name in self._absent if not self._is_reached(name)}
        self._unreached = frozenset(found)
        if self._has_ended:
            at_units = (names for names in units if not found.isdisjoint(names) and any(map(self._is_reached, names)))
            self._until_gathered = self._unreached.intersection(chain.from_iterable(at_units))
            self._unused = self._unreached - self._until_gathered

    def gives_gradients(self) -> bool:
        """Return True if the graph that autograd walks in this thread gives a parameter a gradient."""
        return any(map(self._is_reached, self._reductions_of))

    def come_to(self, names: Collection[str]) -> None:
        """Stop waiting for those of these parameters that get no gradient; backward has gathered their unit."""
        found = self._unreached.intersection(names) - self._in_leaves if self._unreached else None
        if not found or not self._has_ended:
            return
        if found.isdisjoint(self._until_gathered):  # the graph does not come to the unit, but one within it
            self._wait_for_all()
        else:
            self._stop_waiting(found)

    def enter_leaf(self, names: Iterable[str]) -> None:
        """Stop waiting for those of a leaf module's parameters that get no gradient; backward has gathered them."""
        if self._zero.ignore_unused_parameters:
            self._stop_waiting({name for name in names if not self._is_reached(name)})

    def _stop_waiting(self, names: Set[str]) -> None:
        self._unreached |= names
        self._unused |= names
        if self._arrived is not None:
            self._launch_complete()

    def _is_reached(self, name: str) -> bool:
        """Return True if the graph that autograd walks in this thread ends in the parameter."""
        parameter = self._parameters[name]
        with torch._C.DisableTorchFunctionSubclass():  # what is partitioned is guarded against operations
            # One that a program has frozen has no node; the step refuses it by name.
            return parameter.requires_grad and torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)

    def forget_unused(self) -> None:
        """Wait for every gradient in the next pass, unless `find_unused` is called in it."""
        self._unreached = self._until_gathered = self._unused = frozenset()

    def gradient_ready(self, name: str) -> None:
        """Store a parameter's finished gradient, and launch what it completes.

        Raises UsageError on a second one, and on one that comes behind its reduction.
        """
        if self.is_in_micro_batch:
            self.present.add(name)
        if name in self._unreached:
            self._wait_for_all()
        if name in self._left_out:
            given = f"a gradient of {name} by a backward within backward, after a pass without one"
            rule = "what the graph of a pass does not reach is not waited for, and its bucket has been reduced"
            legal = "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            raise UsageError(Problem(given, rule, legal))
        self._store.arrive(name)
        if self._arrived is None:
            return
        if name in self._arrived:
            rule = "a parameter gets its whole gradient at once, since its bucket may be reduced right then"
            legal = "torch.utils.checkpoint.checkpoint(..., use_reentrant=False); one backward a micro-batch"
            raise UsageError(Problem(f"a second gradient of {name} in one micro-batch", rule, legal))
        self._arrived.add(name)
        for reduction in reversed(self._reductions_of.get(name, ())):  # none if it has no elements
            self._store.deposit(reduction, name)
            self._missing[reduction.index].discard(name)
            if self._missing[reduction.index] <= self._unused:
                self._launch_complete()
        self._store.free(name)

    def _wait_for_all(self) -> None:
        """Wait for all gradients from here on: some come of a graph within the graph, as of a reentrant checkpoint."""
        self._is_flat = False
        self.forget_unused()

    def gradient_slot(self, name: str) -> GradientSlot | None:
        """Return memory for a gradient that its layer writes; None where autograd gets it, as outside a micro-batch."""
        return self._store.gradient_slot(name) if self.is_in_micro_batch else None

    def end_micro_batch(self) -> None:
        """Launch the reductions that are left after backward; parameters without a gradient count as zeros.

        Raises UsageError with their names where unused parameters are not ignored.
        """
        if not self._zero.ignore_unused_parameters:
            self._check_all_arrived()
        while self._next >= 0:
            self._launch()
        self._arrived = None
        self.is_in_micro_batch = False
        self._absent = self._reductions_of.keys() - self.present - self._in_leaves
        self._has_ended = True
        self._left_out.clear()
        self.forget_unused()

    def reset(self) -> None:
        """Recover from a failed backward: finish reductions in flight, and forget the step's gradients."""
        self.finish()
        self._next, self._arrived = -1, None
        self.is_in_micro_batch = False
        self._left_out.clear()
        self.forget_unused()
        self._store.reset()

    def finish(self) -> None:
        """Wait for every reduction in flight, and until its sums are at home."""
        while self._in_flight:
            self._finish_oldest()
        while self._gathering:
            with self._timers.measure("grads-reduce"):
                self._gathering.pop().wait()
        self._store.wait_until_stored()

    def _make_arena(self, names: Sequence[str], buffers: Scratch) -> ArenaScratch | None:
        """Make slots for the reductions leased at once, or for one update's gradients; None where none is leased."""
        shards, plan = self._shards, self._shards.plan
        if plan.gradient.lifetime is not Lifetime.RESIDENT:
            num_slots = most_out_at_once(shards.layout, names, self._max_in_flight)
        elif plan.gradient_wire != plan.gradient.dtype and shards.layout.reductions:
            num_slots = max(self._max_in_flight, 1)
        else:
            num_slots = 0
        if not num_slots:
            return None
        slot_bytes = shards.layout.max_reduced_numel * plan.gradient_wire.itemsize
        buckets = shards.layout.trainable_buckets
        updated = (shards.owned(bucket).numel for bucket in buckets if shards.home(bucket).is_device)
        update_bytes = max(updated, default=0) * plan.optimizer.itemsize
        num_slots = max(num_slots, -(-update_bytes // slot_bytes))
        return ArenaScratch(num_slots, slot_bytes, shards.device, fallback=buffers, ledger=shards.ledger)

    def _check_all_arrived(self) -> None:
        unused = sorted({name for pending in self._due[: self._next + 1] for name in self._missing[pending.index]})
        if unused:
            rule = "every trainable parameter has a part in the loss (ignore_unused_parameters is false)"
            legal = "freeze them, use them, or set ignore_unused_parameters"
            raise UsageError(Problem(f"no gradient for {', '.join(unused)}", rule, legal))

    def _launch_complete(self) -> None:
        while self._next >= 0 and self._missing[self._due[self._next].index] <= self._unused:
            self._left_out |= self._missing[self._due[self._next].index]
            self._launch()

    def _launch(self) -> None:
        while len(self._in_flight) >= max(self._max_in_flight, 1):  # before another reduction takes its buffers
            self._finish_oldest()
        reduction = self._due[self._next]
        self._next -= 1
        whole = self._store.close(reduction, self._missing[reduction.index])
        if self.predivisor != 1.0:
            whole.div_(self.predivisor)
        is_whole = self._is_replicated and not self._zero.reduce_scatter
        sums = []
        for bucket in reduction.buckets:
            within = bucket.range if is_whole else self._shards.partition(bucket)
            place = whole[within.start - reduction.start : within.stop - reduction.start]
            sums.append(ReducedBucket(bucket, within, place))
        if self._zero.reduce_scatter:
            inputs = whole.split_with_sizes([bucket.numel for bucket in reduction.buckets])
            keys = [bucket.index for bucket in reduction.buckets]
            work = reduce_together(self._communicator, [each.reduced for each in sums], inputs, keys)
        else:
            work = self._communicator.all_reduce(whole)
        self._in_flight.append(_InFlight(reduction, work, sums))
        if not self._max_in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        reduction, work, sums = self._in_flight.popleft()
        with self._timers.measure("grads-reduce"):
            work.wait()
        self._store.finish(reduction, sums)
        if self._is_replicated and any(within != bucket.range for bucket, within, _ in sums):
            # The second half of an all-reduce.
            wholes = [self._shards.reduced_gradient(bucket, bucket.range) for bucket in reduction.buckets]
            mine = [self._shards.reduced_gradient(bucket, within) for bucket, within, _ in sums]
            self._gathering.append(gather_together(self._communicator, wholes, mine))


def most_out_at_once(layout: FlatLayout, names: Sequence[str], max_in_flight: int) -> int:
    """Return the most reductions filled or in flight at once, if gradients come from the last name to the first.

    max_in_flight: reductions that run beside backward; with 0 backward waits for each.
    """
    missing = [set(reduction.fragments) for reduction in layout.reductions]
    still_open: set[int] = set()
    in_flight, most = min(max_in_flight, len(missing)), 0  # reductions of the micro-batch before
    last = len(missing) - 1
    for name in reversed(names):
        for reduction in reversed(layout.reductions_of.get(name, ())):
            still_open.add(reduction.index)
            most = max(most, len(still_open) + in_flight)
            missing[reduction.index].discard(name)
            while last >= 0 and not missing[last]:
                still_open.discard(last)
                in_flight = min(in_flight + 1, max_in_flight)  # the oldest is waited for before another is sent
                last -= 1
    return most
