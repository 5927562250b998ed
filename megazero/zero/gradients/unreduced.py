"""Storage of gradients until they have been reduced; the plan chooses one of three.

    resident   gradients accumulate in full flat tensors, where autograd adds them or to which they are copied; reduced
               in place at the accumulation boundary
    leased     gradients are copied into a constant-size buffer and dropped, reduced in every micro-batch, and the
               reduced slices accumulate in this rank's shard (ZeRO, section 5.2)
    loose      gradients accumulate where autograd puts them, and are treated as leased ones at the boundary

Sums of buckets whose home is not the device travel there beside backward (`Departures`), block by block where they
are in files.

Layers that write gradients themselves (`parallel/gradient_slot.py`) write into resident and leased memory.  The
gradients of a block that is compiled as a whole, which autograd gets at once, are added to resident memory by one
operation instead of one for each parameter.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megazero.memory.copies import Arrival
from megazero.memory.lease import Lease, Scratch
from megazero.parallel.gradient_slot import GradientSlot, add_to
from megazero.zero.layout import Bucket, Range, Reduction
from megazero.zero.plan import Lifetime
from megazero.zero.shards import Shards

# Parts of sums on their way home beside those that are being reduced.
_MAX_UNDER_WAY = 2


class ReducedBucket(NamedTuple):
    """The sums of a part of a bucket, `reduced` [numel of within]."""

    bucket: Bucket
    within: Range
    reduced: Tensor


class UnreducedGradients(Protocol):
    """A store of the gradients of buckets until they have been reduced."""

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""

    def is_due(self, *, last_micro_batch: bool) -> bool:
        """Return True if buckets are reduced in this micro-batch."""

    def gradient_slot(self, name: str) -> GradientSlot | None:
        """Return memory for a parameter's gradient, written before it is deposited; None: autograd gets it."""

    def arrive(self, name: str) -> None:
        """Take a gradient that backward has finished; called in every micro-batch."""

    def deposit(self, reduction: Reduction, name: str) -> None:
        """Store the part of a finished gradient that lies in `reduction`."""

    def free(self, name: str) -> None:
        """Free the tensor of a gradient whose parts have all been deposited."""

    def close(self, reduction: Reduction, missing: set[str]) -> Tensor:
        """Return a reduction's gradients [numel] in the wire's dtype, zeros for `missing`, ready to be reduced."""

    def finish(self, reduction: Reduction, sums: Sequence[ReducedBucket]) -> None:
        """Store the sums of the oldest reduction, those of each bucket, or begin to."""

    def wait_until_stored(self) -> None:
        """Wait until the host may read every sum that is stored."""

    def reset(self) -> None:
        """Forget what has been deposited; no reduction is in flight."""


class _Departure(NamedTuple):
    """A part of a bucket's sums on their way home, to `target`; lease: the memory that the last ones are copied from.

    A target in a file is in memory as long as it is referred to.
    """

    bucket: Bucket
    part: Range
    target: Tensor
    arrival: Arrival
    lease: Lease | None


class Departures:
    """The sums of gradients on their way home: of at most a few parts, of none where home is the device itself.

    Sums of several micro-batches are added up on the device, for which those so far come back: no host waits, and the
    arithmetic is that of sums that never leave.
    """

    def __init__(self, shards: Shards, buffers: Scratch) -> None:
        self._shards = shards
        self._buffers = buffers
        self._under_way: deque[_Departure] = deque()

    def expect(self, reduction: Reduction) -> None:
        """Begin to read the first sums in a file that others are going to be added to."""
        away = (bucket for bucket in reduction.buckets if not self._shards.home(bucket).is_device)
        if (first := next(away, None)) is not None:
            self._shards.fetch_gradient(first)

    def send(self, sums: Sequence[ReducedBucket], lease: Lease | None, *, adds: bool) -> None:
        """Begin to copy a reduction's sums home, or to add them to those there.

        lease: their memory, released behind the last of them; None if it stays unchanged until `wait_until_stored`.
        """
        # Those that leave the device are the last to need the memory, and are waited for in order.
        in_order = sorted(sums, key=lambda each: not self._shards.home(each.bucket).is_device)
        for index, each in enumerate(in_order, 1):
            self._send(each, lease if index == len(in_order) else None, adds=adds)

    def _send(self, sums: ReducedBucket, lease: Lease | None, *, adds: bool) -> None:
        bucket, within, reduced = sums
        shards, home = self._shards, self._shards.home(bucket)
        if home.is_device:
            target = shards.reduced_gradient(bucket, within)
            if adds:  # in place, without a temporary
                target.add_(reduced)
            else:
                target.copy_(reduced)
            if lease is not None:
                lease.release()
            return
        shards.late.wait_for(bucket)  # it may still be updated with the sums of the step before
        dtype = shards.plan.gradient.dtype
        if adds or reduced.dtype != dtype:
            total = self._buffers.lease(within.numel, dtype)
            if adds:
                self._wait_for(bucket)
                shards.load_gradient(bucket, within, total.tensor)
                total.tensor.add_(reduced)
            else:
                total.tensor.copy_(reduced)
            if lease is not None:
                lease.release()
            reduced, lease = total.tensor, total
        for part in shards.gradient_parts(bucket, within):
            while len(self._under_way) >= _MAX_UNDER_WAY:
                self._release(self._under_way.popleft())
            target = shards.new_gradient(bucket, part)
            arrival = home.store(target, reduced[part.start - within.start : part.stop - within.start])
            of_last = lease if part.stop == within.stop else None
            self._under_way.append(_Departure(bucket, part, target, arrival, of_last))

    def wait_until_stored(self) -> None:
        """Wait until the host may read all sums at home."""
        while self._under_way:
            departure = self._under_way.popleft()
            departure.arrival.finish()
            self._release(departure)

    def _wait_for(self, bucket: Bucket) -> None:
        while any(departure.bucket is bucket for departure in self._under_way):
            self._release(self._under_way.popleft())

    def _release(self, departure: _Departure) -> None:
        self._shards.keep_gradient(departure.bucket, departure.part, departure.arrival)
        if departure.lease is not None:
            departure.lease.release()


class ResidentGradients:
    """A store of gradients in flat tensors that `.grad` points into, where a bucket's sum replaces them in place.

    Only a wire of another dtype takes a buffer on the way.
    """

    def __init__(self, shards: Shards, buffers: Scratch, parameters: Mapping[str, nn.Parameter]) -> None:
        self._shards = shards
        self._buffers = buffers
        self._parameters = parameters
        self._converts = shards.plan.gradient_wire != shards.plan.gradient.dtype
        self._sent: deque[Lease] = deque()
        self._departures = Departures(shards, buffers)
        self._written: set[str] = set()  # parameters whose slot has been written in this step
        self._alone: set[str] = set()  # parameters whose gradients are moved here one by one
        self._block_sizes: dict[str, int] = {}  # parameters of a compiled block: how many of them arrive together
        for section in shards.layout.sections:
            together = [slot.spec.name for slot in section.slots if slot.spec.arrives_with_block]
            self._block_sizes |= dict.fromkeys(together, len(together))
            self._alone.update(slot.spec.name for slot in section.slots if slot.spec.arrives_alone)
        self._arrived: dict[str, None] = {}  # those whose gradient autograd has, in order

    def begin_step(self) -> None:
        self._shards.reset_resident_gradients()
        self._written.clear()
        self._arrived.clear()

    def gradient_slot(self, name: str) -> GradientSlot:
        is_first = name not in self._written
        self._written.add(name)
        return GradientSlot(self._shards.resident_gradient_of(name), is_first)

    def is_due(self, *, last_micro_batch: bool) -> bool:
        return last_micro_batch

    def arrive(self, name: str) -> None:
        if name in self._alone:
            self._move(name)
        elif name in self._block_sizes:
            self._arrived[name] = None
            if len(self._arrived) >= self._block_sizes[name]:
                self._add_arrived()

    def _add_arrived(self) -> None:
        """Add the gradients of a compiled block to their slots, all by one operation, or copy those that are first."""
        found = {name: grad for name in self._arrived if (grad := self._parameters[name].grad) is not None}
        first = [name for name in found if name not in self._written]
        later = [name for name in found if name in self._written]
        for names, put in ((first, torch._foreach_copy_), (later, torch._foreach_add_)):
            if names:
                put([self._shards.resident_gradient_of(name) for name in names], [found[name] for name in names])
        self._written.update(found)
        for name in found:
            self._parameters[name].grad = None
        self._arrived.clear()

    def deposit(self, reduction: Reduction, name: str) -> None:
        """Do nothing: autograd has added in place."""

    def free(self, name: str) -> None:
        """Do nothing: the flat tensor stays."""

    def close(self, reduction: Reduction, missing: set[str]) -> Tensor:
        whole = self._shards.resident_gradient(reduction, reduction.range)
        if self._arrived:
            self._add_arrived()
        for fragment in reduction.fragments.values():
            if not fragment.spec.accumulates_in_place:
                self._complete(fragment.spec.name)
        if not self._converts:
            return whole
        self._sent.append(self._buffers.lease(reduction.numel, self._shards.plan.gradient_wire))
        return self._sent[-1].tensor.copy_(whole)

    def _move(self, name: str) -> None:
        """Move the gradient that autograd has just made to the slot."""
        parameter = self._parameters[name]
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # else it was another engine's
            add_to(self._shards.resident_gradient_of(name), gradient.detach(), is_first=name not in self._written)
            self._written.add(name)

    def _complete(self, name: str) -> None:
        """Add the gradient that autograd computed beside the layer's to the slot; if there is neither, write zeros."""
        gradient, self._parameters[name].grad = self._parameters[name].grad, None
        is_written = name in self._written
        if gradient is not None or not is_written:
            tensor, is_first = self.gradient_slot(name)
            add_to(tensor, tensor.new_zeros(()) if gradient is None else gradient, is_first=is_first)

    def finish(self, reduction: Reduction, sums: Sequence[ReducedBucket]) -> None:
        lease = self._sent.popleft() if self._converts else None
        if lease is None:
            sums = [each for each in sums if not self._shards.reduces_in_place(each.bucket)]
        self._departures.send(sums, lease, adds=False)

    def wait_until_stored(self) -> None:
        self._departures.wait_until_stored()

    def reset(self) -> None:
        """Forget only what has arrived: the next step zeroes the flat tensors."""
        self._arrived.clear()


class LeasedGradients:
    """A store whose gradients are copied into leased buffers; reduced slices add up in the gradient shard.

    every_micro_batch: whether buckets are reduced in each micro-batch, or gradients accumulate until the last.
    at_once: whether a gradient is copied and freed as soon as it is finished, or when its buckets are complete.
    reads_ahead: whether sums so far, which are in files, are read while those of another micro-batch are reduced.
    """

    def __init__(
        self,
        shards: Shards,
        buffers: Scratch,
        parameters: Mapping[str, nn.Parameter],
        *,
        every_micro_batch: bool,
        at_once: bool,
        reads_ahead: bool,
    ) -> None:
        self._shards = shards
        self._buffers = buffers
        self._parameters = parameters
        self._every_micro_batch = every_micro_batch
        self._at_once = at_once
        self._reads_ahead = reads_ahead
        self._open: dict[int, Lease] = {}  # being filled, by reduction
        self._sent: deque[Lease] = deque()  # being reduced, oldest first: the next micro-batch may fill one anew
        self._departures = Departures(shards, buffers)
        self._has_sum: set[int] = set()  # reductions whose sums of earlier micro-batches are at home
        # Parameters whose gradient is in the buffer already, by reduction.
        self._written: defaultdict[int, set[str]] = defaultdict(set)
        reductions_of = shards.layout.reductions_of
        self._last_of = {name: reductions[0].index for name, reductions in reductions_of.items()}
        # A layer writes into the one buffer that its parameter lies in; a gradient that spans several is copied.
        in_one = {name: reductions[0] for name, reductions in reductions_of.items() if len(reductions) == 1}
        self._reduction_of_slot = in_one if every_micro_batch and at_once else {}

    def begin_step(self) -> None:
        self._has_sum.clear()

    def is_due(self, *, last_micro_batch: bool) -> bool:
        return self._every_micro_batch or last_micro_batch

    def gradient_slot(self, name: str) -> GradientSlot | None:
        if name not in self._reduction_of_slot:
            return None
        reduction = self._reduction_of_slot[name]
        written = self._written[reduction.index]
        is_first = name not in written
        written.add(name)
        within = reduction.fragments[name].within
        memory = self._buffer(reduction)[within.start - reduction.start : within.stop - reduction.start]
        return GradientSlot(memory.view(self._parameters[name].shape), is_first)

    def arrive(self, name: str) -> None:
        """Do nothing: a gradient is copied by `deposit`."""

    def deposit(self, reduction: Reduction, name: str) -> None:
        if not self._at_once:
            return
        if name not in self._written[reduction.index]:
            self._fill(reduction, (name,))
            return
        gradient, slot = self._parameters[name].grad, self.gradient_slot(name)
        if gradient is not None and slot is not None:  # autograd's part, from a use beside the layer's
            add_to(slot.tensor, gradient, is_first=False)

    def free(self, name: str) -> None:
        if self._at_once:
            self._parameters[name].grad = None

    def close(self, reduction: Reduction, missing: set[str]) -> Tensor:
        self._fill(reduction, missing if self._at_once else reduction.fragments)
        if not self._at_once:
            for name in reduction.fragments:
                if self._last_of[name] == reduction.index:  # they are closed from the last to the first
                    self._parameters[name].grad = None
        if self._reads_ahead and reduction.index in self._has_sum:
            self._departures.expect(reduction)
        self._written.pop(reduction.index, None)
        self._sent.append(self._open.pop(reduction.index))
        return self._sent[-1].tensor

    def finish(self, reduction: Reduction, sums: Sequence[ReducedBucket]) -> None:
        lease, adds = self._sent.popleft(), reduction.index in self._has_sum
        self._has_sum.add(reduction.index)
        self._departures.send(sums, lease, adds=adds)

    def wait_until_stored(self) -> None:
        self._departures.wait_until_stored()

    def reset(self) -> None:
        self._written.clear()
        while self._open:
            self._open.popitem()[1].release()
        for name in self._last_of:
            self._parameters[name].grad = None

    def _fill(self, reduction: Reduction, names: Iterable[str]) -> None:
        """Copy parameters' gradients into the buffer, zeros for those that got none."""
        whole = self._buffer(reduction)
        for name in names:
            fragment = reduction.fragments[name]
            target = whole[fragment.within.start - reduction.start : fragment.within.stop - reduction.start]
            gradient = self._parameters[name].grad
            if gradient is None:
                target.zero_()
            else:
                target.copy_(gradient.reshape(-1)[fragment.start : fragment.stop])

    def _buffer(self, reduction: Reduction) -> Tensor:
        if reduction.index not in self._open:
            lease = self._buffers.lease(reduction.numel, self._shards.plan.gradient_wire)
            for start, stop in reduction.padding:
                lease.tensor[start - reduction.start : stop - reduction.start].zero_()
            self._open[reduction.index] = lease
        return self._open[reduction.index].tensor


def make_store(
    shards: Shards, buffers: Scratch, parameters: Mapping[str, nn.Parameter], *, contiguous: bool, reads_ahead: bool
) -> UnreducedGradients:
    """Make the store that the plan chooses.

    contiguous: copies and frees each gradient once it is finished.  reads_ahead: of sums that are in files.
    """
    lifetime = shards.plan.gradient.lifetime
    if lifetime is Lifetime.RESIDENT:
        return ResidentGradients(shards, buffers, parameters)
    every = lifetime is Lifetime.LEASED
    return LeasedGradients(
        shards, buffers, parameters, every_micro_batch=every, at_once=contiguous, reads_ahead=reads_ahead
    )
