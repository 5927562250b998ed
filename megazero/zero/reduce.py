"""Gradients: from autograd, bucket by bucket, over the data-parallel axis, to where the plan keeps them.

A bucket is *complete* when every parameter that overlaps it has its gradient, and is reduced as soon as all buckets
behind it in the model have been: every rank launches in the same order, whatever order its gradients arrive in.  At
most `_MAX_IN_FLIGHT` reductions run beside backward (none without overlap: backward then waits for each).  Where a
bucket's unreduced gradients live is the plan's business, behind the two small classes at the end of this file:

    resident   gradients accumulate in full flat tensors; reduced in place at the accumulation boundary
    leased     gradients are copied into a constant-size buffer and dropped, reduced in every micro-batch, and the
               reduced slices accumulate in this rank's shard (paper section 5.2)
    loose      gradients accumulate where autograd puts them, and go the way of leased ones at the boundary

With contiguous gradients the buffers are slots of an arena that is made once (MD, paper section 6.3), as many as are
out at once when gradients come in the reverse of the parameters' order; should more be, the pool lends them.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from megazero.comm.interface import Communicator, Lease, Scratch, Work
from megazero.config.zero import ZeroConfig
from megazero.errors import Problem, UsageError
from megazero.memory.address_book import ArenaStatistics
from megazero.memory.arena_scratch import ArenaScratch
from megazero.zero.layout import Bucket, FlatLayout, Range
from megazero.zero.plan import Lifetime, Placement
from megazero.zero.shards import Shards

_MAX_IN_FLIGHT = 2


class UnreducedGradients(Protocol):
    """Where the gradients of a bucket are until they have been reduced."""

    def begin_step(self) -> None:
        """Nothing has been accumulated yet."""

    def is_due(self, *, last_micro_batch: bool) -> bool:
        """Whether buckets are reduced in this micro-batch."""

    def deposit(self, bucket: Bucket, name: str) -> None:
        """Parameter `name` has its gradient; store the part that lies in `bucket`."""

    def drop(self, name: str) -> None:
        """Every part of the parameter's gradient has been deposited."""

    def close(self, bucket: Bucket, missing: set[str]) -> Tensor:
        """All of the bucket's gradients [numel] in the wire's dtype, zeros for `missing`; they are on their way now."""

    def settle(self, bucket: Bucket, within: Range, reduced: Tensor) -> None:
        """The oldest reduction has finished: `reduced` [numel of within] are its sums."""

    def abandon(self) -> None:
        """What has been deposited goes nowhere; no reduction is under way."""


class _InFlight(NamedTuple):
    bucket: Bucket
    work: Work
    within: Range
    reduced: Tensor


class GradientReducer:
    """Counts arriving gradients and launches reductions in one order on all ranks."""

    def __init__(
        self,
        shards: Shards,
        communicator: Communicator,
        buffers: Scratch,
        parameters: Mapping[str, nn.Parameter],
        zero: ZeroConfig,
    ) -> None:
        self._shards = shards
        self._communicator = communicator
        self._zero = zero
        self._max_in_flight = _MAX_IN_FLIGHT if zero.overlap_comm else 0
        self.predivisor = float(communicator.size) if zero.prescale_gradients else zero.gradient_predivide_factor
        self._buckets = shards.layout.trainable_buckets
        self._buckets_of = _buckets_by_parameter(shards.layout)
        self._members = {index: set(names) for index, names in _parameters_by_bucket(shards.layout).items()}
        self.bucket_arena = self._make_arena(list(parameters), buffers) if zero.contiguous_gradients else None
        self.scratch: Scratch = self.bucket_arena or buffers
        """Lends buckets on the wire; between backward and the next one it is free for others."""
        self._store = _make_store(shards, self.scratch, parameters, contiguous=zero.contiguous_gradients)
        self._everyone_keeps_all = shards.plan.gradient.placement is Placement.REPLICATED
        self._in_flight: deque[_InFlight] = deque()
        self._gathering: list[Work] = []
        self._missing: dict[int, set[str]] = {}
        self._came: set[str] | None = None  # parameters with a gradient in this micro-batch; None: none is due
        self._due: Sequence[Bucket] = ()  # the buckets that this micro-batch's backward fills
        self._next = -1  # position in self._due of the next bucket to launch; -1: none is left

    @property
    def arenas(self) -> dict[str, ArenaStatistics]:
        """Of gradients that are "kept", and of "buckets", where there are such arenas."""
        found = {"kept": self._shards.gradient_arena, "buckets": self.bucket_arena}
        return {name: arena.statistics for name, arena in found.items() if arena is not None}

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self._store.begin_step()

    def begin_micro_batch(self, buckets: Sequence[Bucket], *, is_last: bool) -> None:
        """Expect the gradients of one backward pass, which fills these buckets; is_last: of those that do."""
        if self._store.is_due(last_micro_batch=is_last):
            self._missing = {bucket.index: set(self._members[bucket.index]) for bucket in buckets}
            self._came = set()
            self._due = buckets
            self._next = len(buckets) - 1

    def gradient_ready(self, name: str) -> None:
        """Autograd has finished the gradient of a parameter.  Raises UsageError if it wasn't the parameter's first."""
        if self._came is None:
            return
        if name in self._came:
            rule = "a parameter gets its whole gradient at once, since it may be on its way to the other ranks then"
            legal = "torch.utils.checkpoint.checkpoint(..., use_reentrant=False); one backward a micro-batch"
            raise UsageError(Problem(f"a second gradient of {name} in one micro-batch", rule, legal))
        self._came.add(name)
        for bucket in reversed(self._buckets_of.get(name, ())):  # none if it has no elements
            self._store.deposit(bucket, name)
            self._missing[bucket.index].discard(name)
            self._launch_complete()
        self._store.drop(name)

    def end_micro_batch(self) -> None:
        """Backward is over: launch what is left; parameters without a gradient count as zeros.

        Raises UsageError with their names where unused parameters are not to be ignored.
        """
        if not self._zero.ignore_unused_parameters:
            self._check_all_came()
        while self._next >= 0:
            self._launch()
        self._came = None

    def abandon(self) -> None:
        """Backward has failed: reductions in flight end, and nothing of the step is kept."""
        self.finish()
        self._next = -1
        self._store.abandon()

    def finish(self) -> None:
        """Wait for every reduction in flight."""
        while self._in_flight:
            self._settle_oldest()
        while self._gathering:
            self._gathering.pop().wait()

    def _make_arena(self, names: Sequence[str], buffers: Scratch) -> ArenaScratch | None:
        """Room for the buckets that are out at once, or for one update's gradients; none where no bucket is leased."""
        shards, plan = self._shards, self._shards.plan
        if plan.gradient.lifetime is not Lifetime.RESIDENT:
            num_slots = most_out_at_once(shards.layout, names, self._max_in_flight)
        elif plan.gradient_wire != plan.gradient.dtype and self._buckets:
            num_slots = max(self._max_in_flight, 1)
        else:
            num_slots = 0
        if not num_slots:
            return None
        slot_bytes = shards.layout.max_bucket_numel * plan.gradient_wire.itemsize
        update_bytes = max(shards.owned(bucket).numel for bucket in self._buckets) * plan.optimizer.itemsize
        num_slots = max(num_slots, -(-update_bytes // slot_bytes))
        return ArenaScratch(num_slots, slot_bytes, shards.device, fallback=buffers, ledger=shards.ledger)

    def _check_all_came(self) -> None:
        pending = [bucket for bucket in self._due[: self._next + 1] if self._missing[bucket.index]]
        unused = sorted({name for bucket in pending for name in self._missing[bucket.index]})
        if unused:
            rule = "every trainable parameter has a part in the loss (ignore_unused_parameters is false)"
            legal = "freeze them, use them, or set ignore_unused_parameters"
            raise UsageError(Problem(f"no gradient for {', '.join(unused)}", rule, legal))

    def _launch_complete(self) -> None:
        while self._next >= 0 and not self._missing[self._due[self._next].index]:
            self._launch()

    def _launch(self) -> None:
        while len(self._in_flight) >= max(self._max_in_flight, 1):  # before another takes its buffers
            self._settle_oldest()
        bucket = self._due[self._next]
        self._next -= 1
        whole = self._store.close(bucket, self._missing[bucket.index])
        if self.predivisor != 1.0:
            whole.div_(self.predivisor)
        partition = self._shards.partition(bucket)
        mine = whole[partition.start - bucket.start : partition.stop - bucket.start]
        if self._zero.reduce_scatter:
            flight = _InFlight(bucket, self._communicator.reduce_scatter_into(mine, whole), partition, mine)
        elif self._everyone_keeps_all:
            flight = _InFlight(bucket, self._communicator.all_reduce(whole), bucket.range, whole)
        else:
            flight = _InFlight(bucket, self._communicator.all_reduce(whole), partition, mine)
        self._in_flight.append(flight)
        if not self._max_in_flight:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        bucket, work, within, reduced = self._in_flight.popleft()
        work.wait()
        self._store.settle(bucket, within, reduced)
        if self._everyone_keeps_all and within != bucket.range:  # the second half of an all-reduce
            whole = self._shards.reduced_gradient(bucket, bucket.range)
            mine = self._shards.reduced_gradient(bucket, within)
            self._gathering.append(self._communicator.all_gather_into(whole, mine))


class ResidentGradients:
    """Gradients accumulate in flat tensors that `.grad` points into; a bucket's sum replaces them in place.

    Only a wire of another dtype takes a buffer on the way.
    """

    def __init__(self, shards: Shards, buffers: Scratch) -> None:
        self._shards = shards
        self._buffers = buffers
        self._converts = shards.plan.gradient_wire != shards.plan.gradient.dtype
        self._sent: deque[Lease] = deque()

    def begin_step(self) -> None:
        self._shards.reset_resident_gradients()

    def is_due(self, *, last_micro_batch: bool) -> bool:
        return last_micro_batch

    def deposit(self, bucket: Bucket, name: str) -> None:
        """Nothing to move: autograd has added in place."""

    def drop(self, name: str) -> None:
        """Nothing to drop: the flat tensor stays."""

    def close(self, bucket: Bucket, missing: set[str]) -> Tensor:
        whole = self._shards.resident_gradient(bucket, bucket.range)
        if not self._converts:
            return whole
        self._sent.append(self._buffers.lease(bucket.numel, self._shards.plan.gradient_wire))
        return self._sent[-1].tensor.copy_(whole)

    def settle(self, bucket: Bucket, within: Range, reduced: Tensor) -> None:
        if self._converts:
            self._shards.resident_gradient(bucket, within).copy_(reduced)
            self._sent.popleft().release()

    def abandon(self) -> None:
        """The next step empties the flat tensors."""


class LeasedGradients:
    """Gradients are copied into leased buffers; reduced slices add up in the gradient shard.

    every_micro_batch: whether buckets are reduced in each micro-batch, or gradients accumulate until the last.
    at_once: whether a gradient is copied and dropped as soon as it has come, or when its buckets are complete.
    """

    def __init__(
        self,
        shards: Shards,
        buffers: Scratch,
        parameters: Mapping[str, nn.Parameter],
        *,
        every_micro_batch: bool,
        at_once: bool,
    ) -> None:
        self._shards = shards
        self._buffers = buffers
        self._parameters = parameters
        self._every_micro_batch = every_micro_batch
        self._at_once = at_once
        self._open: dict[int, Lease] = {}  # being filled, by bucket
        self._sent: deque[Lease] = deque()  # being reduced, oldest first: the next micro-batch may fill its bucket anew
        self._has_sum: set[int] = set()  # buckets whose shard already holds earlier micro-batches
        self._last_buckets = {name: buckets[0].index for name, buckets in _buckets_by_parameter(shards.layout).items()}

    def begin_step(self) -> None:
        self._has_sum.clear()

    def is_due(self, *, last_micro_batch: bool) -> bool:
        return self._every_micro_batch or last_micro_batch

    def deposit(self, bucket: Bucket, name: str) -> None:
        if self._at_once:
            self._fill(bucket, {name})

    def drop(self, name: str) -> None:
        if self._at_once:
            self._parameters[name].grad = None

    def close(self, bucket: Bucket, missing: set[str]) -> Tensor:
        section = self._shards.layout.sections[bucket.section]
        members = {fragment.spec.name for fragment in section.fragments(bucket.range)}
        if not self._at_once:
            self._fill(bucket, members - missing)
        if missing:
            self._fill(bucket, missing)
        if not self._at_once:
            for name in members:
                if self._last_buckets[name] == bucket.index:  # buckets are closed from the last to the first
                    self._parameters[name].grad = None
        self._sent.append(self._open.pop(bucket.index))
        return self._sent[-1].tensor

    def settle(self, bucket: Bucket, within: Range, reduced: Tensor) -> None:
        target = self._shards.reduced_gradient(bucket, within)
        if bucket.index in self._has_sum:
            target.add_(reduced)
        else:
            target.copy_(reduced)
            self._has_sum.add(bucket.index)
        self._sent.popleft().release()

    def abandon(self) -> None:
        while self._open:
            self._open.popitem()[1].release()

    def _fill(self, bucket: Bucket, names: set[str]) -> None:
        """Copy parameters' gradients into the bucket, zeros for those that got none."""
        whole = self._buffer(bucket)
        section = self._shards.layout.sections[bucket.section]
        for fragment in section.fragments(bucket.range):
            if fragment.spec.name not in names:
                continue
            start = fragment.section_start - bucket.start
            target = whole[start : start + fragment.numel]
            gradient = self._parameters[fragment.spec.name].grad
            if gradient is None:
                target.zero_()
            else:
                target.copy_(gradient.reshape(-1)[fragment.start : fragment.stop])

    def _buffer(self, bucket: Bucket) -> Tensor:
        if bucket.index not in self._open:
            lease = self._buffers.lease(bucket.numel, self._shards.plan.gradient_wire)
            padding_start = self._shards.layout.sections[bucket.section].used_numel - bucket.start
            lease.tensor[padding_start:].zero_()
            self._open[bucket.index] = lease
        return self._open[bucket.index].tensor


def _make_store(
    shards: Shards, buffers: Scratch, parameters: Mapping[str, nn.Parameter], *, contiguous: bool
) -> UnreducedGradients:
    lifetime = shards.plan.gradient.lifetime
    if lifetime is Lifetime.RESIDENT:
        return ResidentGradients(shards, buffers)
    every = lifetime is Lifetime.LEASED
    return LeasedGradients(shards, buffers, parameters, every_micro_batch=every, at_once=contiguous)


def most_out_at_once(layout: FlatLayout, names: Sequence[str], max_in_flight: int) -> int:
    """The most buckets that are being filled or reduced at once, if gradients come from the last name to the first.

    max_in_flight: reductions that run beside backward; with 0 backward waits for each.
    """
    buckets, buckets_of = layout.trainable_buckets, _buckets_by_parameter(layout)
    missing = {index: set(members) for index, members in _parameters_by_bucket(layout).items()}
    still_open: set[int] = set()
    in_flight, most = min(max_in_flight, len(buckets)), 0  # those of the micro-batch before
    last = len(buckets) - 1
    for name in reversed(names):
        for bucket in reversed(buckets_of.get(name, ())):
            still_open.add(bucket.index)
            most = max(most, len(still_open) + in_flight)
            missing[bucket.index].discard(name)
            while last >= 0 and not missing[buckets[last].index]:
                still_open.discard(buckets[last].index)
                in_flight = min(in_flight + 1, max_in_flight)  # the oldest is waited for before another is sent
                last -= 1
    return most


def _parameters_by_bucket(layout: FlatLayout) -> dict[int, list[str]]:
    """{bucket index: names of the parameters that overlap it}."""
    return {
        bucket.index: [f.spec.name for f in layout.sections[bucket.section].fragments(bucket.range)]
        for bucket in layout.trainable_buckets
    }


def _buckets_by_parameter(layout: FlatLayout) -> dict[str, list[Bucket]]:
    """{parameter: the buckets it overlaps, in order}."""
    found: dict[str, list[Bucket]] = {}
    for bucket in layout.trainable_buckets:
        for fragment in layout.sections[bucket.section].fragments(bucket.range):
            found.setdefault(fragment.spec.name, []).append(bucket)
    return found
