"""A communicator whose works finish as late as its interface allows: no result is there until `wait()` returns.

The collectives of the wrapped communicator run on copies.  From a call to the end of its wait

    the output holds poison (nan, for floating-point types), and must not be written to;
    the input must not change;

so a missing wait gives wrong values, and memory that is used again too early is an AssertionError at the wait.  With a
seed, waiting for a work also finishes some earlier ones, in a random order, as a backend may.

A *message* (a send) counts as delivered for its sender once a later message has brought the news that the receiver has
waited for it: every message carries its sender's table of deliveries.  A wait for any other send is recorded, because
it would hold up its rank on a backend whose sends wait for receivers.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.comm.interface import Communicator, ReduceKind, Work, gather_in_turn, reduce_in_turn
from megazero.comm.mesh import WEIGHTS, Mesh
from megazero.comm.metered import MeteredCommunicator
from megazero.comm.startup import plain_parts
from megazero.comm.wires.forwarding import ForwardingCommunicator
from megazero.comm.wires.shard_group import PLAIN, Wires, stack
from megazero.memory.fused_buffers import FusedBuffers

_POISON_BYTE = 0xA5  # fills types that have no nan
_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})  # by bytes

_SCRATCH_BYTES = 1 << 24


class Deliveries:
    """One rank's table of the messages that have been delivered, on several communicators."""

    def __init__(self, num_communicators: int, num_ranks: int) -> None:
        self.known = torch.zeros(num_communicators, num_ranks, num_ranks, dtype=torch.int64)
        """How many messages have been delivered: [communicator, sender, receiver]."""
        self.unproven_waits: list[str] = []
        """Waits for sends that had not been delivered for all that this rank knew."""


class LateCommunicator:
    """A communicator that delays the results of `inner`.  index: its place among those that share `deliveries`."""

    def __init__(
        self,
        inner: Communicator,
        *,
        seed: int | None = None,
        deliveries: Deliveries | None = None,
        index: int = 0,
    ) -> None:
        self.inner = inner
        self.size = inner.size
        self.rank = inner.rank
        self.deliveries = Deliveries(1, inner.size) if deliveries is None else deliveries
        self.unfinished: list[_LateWork] = []
        """Works that have not been waited for, the oldest first."""
        self.most_unfinished = 0
        self._index = index
        self._random = None if seed is None else random.Random(seed)
        self._num_sent = [0] * self.size

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        work = _LateWork(self, f"all_gather_into of {input.numel()} elements", output)
        own = output.view(self.size, input.numel())[self.rank]
        is_in_place = own.data_ptr() == input.data_ptr()
        work.keep("input", input)
        for rank, place in enumerate(output.view(self.size, input.numel())):
            if not (is_in_place and rank == self.rank):
                work.poison(place)
        return work.begin([self.inner.all_gather_into(work.result, input.detach().clone(), label)])

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        return gather_in_turn(self, outputs, inputs, label)

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        work = _LateWork(self, f"reduce_scatter_into of {input.numel()} elements", output)
        copy = input.detach().clone()
        slices = input.view(self.size, output.numel())
        for rank, part in enumerate(slices):
            if part.data_ptr() != output.data_ptr() or rank != self.rank:
                work.keep("input", part)
        work.poison(output)
        return work.begin([self.inner.reduce_scatter_into(work.result, copy, key)])

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        return reduce_in_turn(self, outputs, inputs, keys)

    def all_to_all_into(self, output: Tensor, input: Tensor) -> Work:
        work = _LateWork(self, f"all_to_all_into of {input.numel()} elements", output)
        work.keep("input", input)
        work.poison(output)
        return work.begin([self.inner.all_to_all_into(work.result, input.detach().clone())])

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        work = self._in_place(f"all_reduce of {tensor.numel()} elements", tensor)
        return work.begin([self.inner.all_reduce(work.result, kind)])

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        work = self._in_place(f"all_reduce_scalars of {tensor.numel()} elements", tensor)
        return work.begin([self.inner.all_reduce_scalars(work.result, kind)])

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        name = f"broadcast of {tensor.numel()} elements"
        if source == self.rank:
            work = _LateWork(self, name, None)
            work.keep("input", tensor)
            return work.begin([self.inner.broadcast(tensor.detach().clone(), source)])
        work = self._in_place(name, tensor)
        return work.begin([self.inner.broadcast(work.result, source)])

    def send(self, tensor: Tensor, to: int) -> Work:
        self._num_sent[to] += 1
        work = _Sent(self, to, self._num_sent[to])
        work.keep("input", tensor)
        known = self.deliveries.known.clone()
        return work.begin([self.inner.send(known, to), self.inner.send(tensor.detach().clone(), to)])

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        work = _Received(self, source, tensor)
        work.poison(tensor)
        known = self.inner.receive_into(work.known, source)
        return work.begin([known, self.inner.receive_into(work.result, source)])

    def barrier(self) -> None:
        self.inner.barrier()

    def _in_place(self, name: str, tensor: Tensor) -> "_LateWork":
        work = _LateWork(self, name, tensor)
        work.result.copy_(tensor.detach())
        work.poison(tensor)
        return work

    def finish(self, work: "_LateWork") -> None:
        """Finish a work, and with a seed also some earlier collectives, which a backend completes before this one."""
        before = self.unfinished[: self.unfinished.index(work)]
        works = [work]
        if self._random is not None and work.is_collective:
            works += [other for other in before if other.is_collective and self._random.random() < 0.5]
            self._random.shuffle(works)
        for one in works:
            self.unfinished.remove(one)
            one.finish()


class _LateWork:
    """A collective whose result lies in `result`, a copy of `output`, until it is waited for."""

    is_collective = True

    def __init__(self, communicator: LateCommunicator, name: str, output: Tensor | None) -> None:
        self.communicator = communicator
        self.name = name
        self.result = torch.empty(0) if output is None else torch.empty_like(output.detach())
        self._output = output
        self._works: Sequence[Work] = ()
        self._kept: list[tuple[str, Tensor, Tensor]] = []  # must not change: (input or output, tensor, its bytes)

    def keep(self, which: str, tensor: Tensor) -> None:
        """Require that the tensor does not change until the work has been waited for."""
        assert tensor.is_contiguous(), f"{self.name}: its {which} is not dense"
        self._kept.append((which, tensor, _bits(tensor).clone()))

    def poison(self, tensor: Tensor) -> None:
        """Fill a part of the output with values that no result has."""
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)
        else:
            tensor.data.reshape(-1).view(torch.uint8).fill_(tensor.dtype is torch.bool or _POISON_BYTE)
        self.keep("output", tensor)

    def begin(self, works: Sequence[Work]) -> Work:
        self._works = works
        axis = self.communicator
        axis.unfinished.append(self)
        axis.most_unfinished = max(axis.most_unfinished, len(axis.unfinished))
        return self

    def wait(self) -> None:
        if self in self.communicator.unfinished:
            self.communicator.finish(self)

    def finish(self) -> None:
        for which, tensor, before in self._kept:
            assert torch.equal(_bits(tensor), before), f"{self.name}: its {which} was written to before its wait"
        for work in self._works:
            work.wait()
        if self._output is not None:
            self._output.data.copy_(self.result)
        self._works, self._kept, self._output = (), [], None


class _Sent(_LateWork):
    """A message to another rank."""

    is_collective = False

    def __init__(self, communicator: LateCommunicator, to: int, number: int) -> None:
        super().__init__(communicator, f"send number {number} to rank {to}", None)
        self._place = communicator._index, communicator.rank, to
        self._number = number

    def finish(self) -> None:
        deliveries = self.communicator.deliveries
        if deliveries.known[self._place] < self._number:
            deliveries.unproven_waits.append(self.name)
        super().finish()


class _Received(_LateWork):
    """A message from another rank, with the sender's table of deliveries at the time of sending."""

    is_collective = False

    def __init__(self, communicator: LateCommunicator, source: int, output: Tensor) -> None:
        super().__init__(communicator, f"receive from rank {source}", output)
        self.known = torch.empty_like(communicator.deliveries.known)
        self._place = communicator._index, source, communicator.rank

    def finish(self) -> None:
        super().finish()
        known = self.communicator.deliveries.known
        torch.maximum(known, self.known, out=known)
        known[self._place] += 1


def late_mesh(mesh: Mesh, seed: int | None = None, wires: Wires = PLAIN) -> Mesh:
    """Return the mesh with every communicator late, counted by the same meter; all ranks must call this together.

    wires: those of the mesh, which are stacked anew over the late communicators.
    """
    deliveries = Deliveries(len(mesh.communicators), mesh.topology.world_size)
    plain = {key: _plain(one) for key, one in mesh.communicators.items() if key != WEIGHTS}
    late: dict[int, Communicator] = {}  # by what is late, which may have several keys
    for index, metered in enumerate(plain.values()):
        if isinstance(metered, MeteredCommunicator) and id(metered) not in late:
            inner = LateCommunicator(metered._inner, seed=seed, deliveries=deliveries, index=index)
            late[id(metered)] = MeteredCommunicator(inner, metered._axis, mesh.meter, links=metered._links)
    communicators = {key: late.get(id(one), one) for key, one in plain.items()}
    scratch = FusedBuffers(_SCRATCH_BYTES, mesh.device)
    stacked = stack(wires, plain_parts(mesh.topology, communicators), scratch, mesh.device, mesh.rank)
    return replace(mesh, communicators=communicators | stacked.communicators, wire_state=stacked.state)


def _plain(communicator: Communicator) -> Communicator:
    while isinstance(communicator, ForwardingCommunicator):
        communicator = communicator._inner
    return communicator


def late_communicators(mesh: Mesh) -> list[LateCommunicator]:
    """Return the late communicators of a mesh."""
    inner = [metered._inner for metered in mesh.communicators.values() if isinstance(metered, MeteredCommunicator)]
    return [communicator for communicator in inner if isinstance(communicator, LateCommunicator)]


def unfinished(mesh: Mesh) -> list[str]:
    """Return the names of a late mesh's works that have not been waited for."""
    return [work.name for communicator in late_communicators(mesh) for work in communicator.unfinished]


def forget_unfinished(mesh: Mesh) -> None:
    """Drop the works under way, which no code will wait for: gathers prefetched for a use that has not come."""
    for communicator in late_communicators(mesh):
        communicator.unfinished.clear()


def unproven_waits(mesh: Mesh) -> list[str]:
    """Return the names of sends that this rank has waited for without proof of their delivery."""
    return late_communicators(mesh)[0].deliveries.unproven_waits


def _bits(tensor: Tensor) -> Tensor:
    """Return a dense tensor as integers of its elements' width, since nan is not equal to itself.

    A comparison of bytes would take longer than all other work of this file.
    """
    return tensor.data.reshape(-1).view(_INTEGERS[tensor.element_size()])
