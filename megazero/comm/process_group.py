"""torch.distributed behind the communicator interface.

Three choices are made here and nowhere else.  *Calls*: methods of the group itself are called, not the functions of
torch.distributed around them, which look a group up in torch's list and cost several Python calls a message.  *Names*:
torch 2.13 renamed the single-tensor collectives (`all_gather_single`, `reduce_scatter_single`, `all_to_all_single`);
whichever exists is used.  *Algorithm*: gloo's reduce-scatter is an all-reduce that discards most of its result, and its
all-gather and all-to-all copy what a rank sends to itself.  On gloo all three are made of messages: every rank sends
every other one its slice (`messages.py`; through memory where they share some, `shared_memory.py`), and a
reduce-scatter sums up what it receives (in rank order; bfloat16 in float32).  That is the ring's number of bytes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from megazero.comm.interface import ReduceKind, Work
from megazero.comm.messages import TAG, ExchangePart, GlooMessages, Messages
from megazero.memory.lease import Lease, Scratch

_IS_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single")
ALL_GATHER = "all_gather_single" if _IS_RENAMED else "_allgather_base"
REDUCE_SCATTER = "reduce_scatter_single" if _IS_RENAMED else "_reduce_scatter_base"
ALL_GATHER_COALESCED = "all_gather_single_coalesced" if _IS_RENAMED else "allgather_into_tensor_coalesced"
REDUCE_SCATTER_COALESCED = "reduce_scatter_single_coalesced" if _IS_RENAMED else "reduce_scatter_tensor_coalesced"
ALL_TO_ALL = "all_to_all_single" if _IS_RENAMED else "alltoall_base"


class ProcessGroupCommunicator:
    """The collectives of one torch process group; gloo's reduce-scatter borrows memory from `scratch`."""

    def __init__(
        self, group: dist.ProcessGroup, scratch: Scratch, *, beside: dist.ProcessGroup | None = None, lane: int = 0
    ) -> None:
        """beside: another group of the same ranks, so that messages of each direction have connections of their own.

        lane: 0 or 1; the communicator that has the two groups the other way round has the other number.
        """
        self._group = group
        self._all_gather: Any = getattr(group, ALL_GATHER)
        self._all_gather_coalesced: Any = getattr(group, ALL_GATHER_COALESCED)
        self._reduce_scatter: Any = getattr(group, REDUCE_SCATTER)
        self._reduce_scatter_coalesced: Any = getattr(group, REDUCE_SCATTER_COALESCED)
        self._all_to_all: Any = getattr(group, ALL_TO_ALL)
        self._scratch = scratch
        self.size = group.size()
        self.rank = group.rank()
        # The other ranks, every rank beginning with the one behind it, so that no two begin with the same.
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._exchanges = group.name() == "gloo"
        self.messages: Messages = GlooMessages(group, beside, lane)
        """The way in which gloo's exchanges travel."""

    @property
    def limit_seconds(self) -> float:
        """The time limit of a collective."""
        backend: Any = self._group._get_backend(torch.device("cpu"))
        limit: float = backend.options._timeout.total_seconds()
        return limit

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        if self._exchanges:
            return self._exchange_to_gather([output], [input], label)
        return _Pending(self._all_gather(output, input, _asynchronous(AllgatherOptions())))

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        if self._exchanges:
            return self._exchange_to_gather(outputs, inputs, label)
        options = _asynchronous(AllgatherOptions())
        return _Pending(self._all_gather_coalesced(list(outputs), list(inputs), options))

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        if self._exchanges:
            return self._exchange_and_sum([output], [input])
        return _Pending(self._reduce_scatter(output, input, _asynchronous(ReduceScatterOptions())))

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        if self._exchanges:
            return self._exchange_and_sum(outputs, inputs)
        options = _asynchronous(ReduceScatterOptions())
        return _Pending(self._reduce_scatter_coalesced(list(outputs), list(inputs), options))

    def all_to_all_into(self, output: Tensor, input: Tensor) -> Work:
        if self._exchanges:
            return self._exchange_slices(output, input)
        return _Pending(self._all_to_all(output, input, [], [], _asynchronous(AllToAllOptions())))

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        options = _asynchronous(AllreduceOptions())
        options.reduceOp = _operation(kind)
        return _Pending(self._group.allreduce([tensor], options))

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return self.all_reduce(tensor, kind)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        options = _asynchronous(BroadcastOptions())
        options.rootRank, options.rootTensor = source, 0
        return _Pending(self._group.broadcast([tensor], options))

    def send(self, tensor: Tensor, to: int) -> Work:
        return _Pending(self._group.send([tensor], to, TAG))

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        return _Pending(self._group.recv([tensor], source, TAG))

    def barrier(self) -> None:
        options = BarrierOptions()
        has_nccl = self._group.name() == "nccl"
        options.device = torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")
        self._group.barrier(options).wait()

    def _exchange_to_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None) -> Work:
        slices = self._by_rank(outputs)
        mine = slices[self.rank]
        for place, input in zip(mine, inputs, strict=True):
            if place.data_ptr() != input.data_ptr():
                place.copy_(input)
        return self.messages.exchange([ExchangePart(peer, mine, slices[peer]) for peer in self._peers], label)

    def _exchange_and_sum(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        """Exchange slices of tensors of one dtype, and sum up what is received, in one buffer for all."""
        numels = list(map(Tensor.numel, outputs))
        rows = 1 if self.size == 2 else self.size  # a sum of two needs no copy of this rank's slice
        received = self._scratch.lease(rows * sum(numels), inputs[0].dtype)
        slices = self._by_rank(inputs)
        mine = slices[self.rank]
        if self.size == 2:
            other, places = self._peers[0], received.tensor.split_with_sizes(numels)
            part = ExchangePart(other, slices[other], places, partial(_add, mine, outputs))
            return _ThenSum(self.messages.exchange([part]), received)
        rooms = received.tensor.split_with_sizes([rows * numel for numel in numels])
        summands = self._by_rank(rooms)
        for place, own in zip(summands[self.rank], mine, strict=True):
            place.copy_(own)
        parts = [ExchangePart(peer, slices[peer], summands[peer]) for peer in self._peers]
        sums = [
            partial(torch.sum, room.view(rows, -1), dim=0, out=output)
            for room, output in zip(rooms, outputs, strict=True)
        ]
        return _ThenSum(self.messages.exchange(parts), received, sums)

    def _by_rank(self, wholes: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return each rank's slices of tensors, flat."""
        if len(wholes) == 1:
            return list(zip(wholes[0].view(self.size, -1).unbind(), strict=True))
        return list(zip(*(whole.view(self.size, -1).unbind() for whole in wholes), strict=True))

    def _exchange_slices(self, output: Tensor, input: Tensor) -> Work:
        theirs, mine = output.view(self.size, -1), input.view(self.size, -1)
        exchange = self.messages.exchange([ExchangePart(peer, [mine[peer]], [theirs[peer]]) for peer in self._peers])
        theirs[self.rank].copy_(mine[self.rank])
        return exchange


def _add(mine: Sequence[Tensor], sums: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Sum up the slices of two ranks."""
    for place, ours, others in zip(sums, mine, theirs, strict=True):
        torch.add(ours, others, out=place)


class _Pending:
    """A torch Work; torch returns None for a rank outside the group, which never happens here."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


class _ThenSum:
    """The second half of reduce-scatters: add up what was received, then release the buffer."""

    def __init__(self, exchange: Work, received: Lease, sums: Sequence[Callable[[], Any]] = ()) -> None:
        self._exchange = exchange
        self._received = received
        self._sums = sums

    def wait(self) -> None:
        self._exchange.wait()
        for add_up in self._sums:
            add_up()
        self._received.release()


def _asynchronous(options: Any) -> Any:
    """Return options of a collective that its caller waits for later."""
    options.asyncOp = True
    return options


def _operation(kind: ReduceKind) -> Any:
    return {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[kind]
