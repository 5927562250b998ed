"""torch.distributed behind the communicator interface.

Two choices are made here and nowhere else.  *Names*: torch 2.13 renamed the single-tensor collectives
(`all_gather_single`, `reduce_scatter_single`); whichever exists is used.  *Algorithm*: gloo's reduce-scatter is an
all-reduce that discards most of its result, and its all-gather and all-to-all copy what a rank sends to itself.  On
gloo both are made of messages: every rank sends every other one its slice, from the input's memory into the output's,
and sums up what it receives (in rank order; bfloat16 in float32).  That is the ring's number of bytes, without a copy.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.interface import ReduceKind, Work
from megazero.memory.lease import Lease, Scratch

_MAX_IN_FLIGHT = 64  # exchanges of one group
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessGroupCommunicator:
    """The collectives of one torch process group; gloo's reduce-scatter borrows memory from `scratch`."""

    def __init__(self, group: dist.ProcessGroup, scratch: Scratch) -> None:
        self._group = group
        self._scratch = scratch
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._exchanges = dist.get_backend(group) == "gloo"
        self._in_flight: deque[_Exchange] = deque()

    def all_gather_into(self, output: Tensor, input: Tensor) -> Work:
        if self._exchanges:
            return self._exchange_to_gather(output, input)
        return _Pending(_ALL_GATHER(output, input, group=self._group, async_op=True))

    def reduce_scatter_into(self, output: Tensor, input: Tensor) -> Work:
        if self._exchanges:
            return self._exchange_and_sum(output, input)
        return _Pending(_REDUCE_SCATTER(output, input, group=self._group, async_op=True))

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return _Pending(dist.all_reduce(tensor, _operation(kind), group=self._group, async_op=True))

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return self.all_reduce(tensor, kind)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return _Pending(dist.broadcast(tensor, group_src=source, group=self._group, async_op=True))

    def send(self, tensor: Tensor, to: int) -> Work:
        return _Pending(dist.isend(tensor, group_dst=to, group=self._group))

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        return _Pending(dist.irecv(tensor, group_src=source, group=self._group))

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def _exchange_to_gather(self, output: Tensor, input: Tensor) -> Work:
        slices = output.view(self.size, input.numel())
        if slices[self.rank].data_ptr() != input.data_ptr():
            slices[self.rank].copy_(input)
        works = [work for peer in self._peers() for work in self._swap(slices[self.rank], slices[peer], peer)]
        return self._retain(_Exchange(works))

    def _exchange_and_sum(self, output: Tensor, input: Tensor) -> Work:
        slices, peers = input.view(self.size, output.numel()), self._peers()
        if len(peers) == 1:  # one sum of two, which needs no copy of this rank's slice
            received = self._scratch.lease(output.numel(), input.dtype)
            works = self._swap(slices[peers[0]], received.tensor, peers[0])
            add_up = partial(torch.add, slices[self.rank], received.tensor, out=output)
            return _ThenSum(self._retain(_Exchange(works)), received, add_up)
        received = self._scratch.lease(input.numel(), input.dtype)
        summands = received.tensor.view(self.size, output.numel())
        works = [work for peer in peers for work in self._swap(slices[peer], summands[peer], peer)]
        summands[self.rank].copy_(slices[self.rank])
        return _ThenSum(self._retain(_Exchange(works)), received, partial(torch.sum, summands, dim=0, out=output))

    def _retain(self, exchange: "_Exchange") -> "_Exchange":
        """Retain an exchange until it completes.

        A message whose Work is freed is never delivered, and the rank that receives it would wait for ever.  An
        exchange that is not waited for when many more have begun is waited for here: by then it is complete, or it
        completes without this rank.
        """
        self._in_flight.append(exchange)
        while self._in_flight and (self._in_flight[0].is_complete or len(self._in_flight) > _MAX_IN_FLIGHT):
            self._in_flight.popleft().wait()
        return exchange

    def _swap(self, mine: Tensor, theirs: Tensor, peer: int) -> list[Any]:
        """Begin to send `mine` to rank `peer`, and to receive `theirs` from it."""
        receiving = dist.irecv(theirs, group_src=peer, group=self._group)
        return [receiving, dist.isend(mine, group_dst=peer, group=self._group)]

    def _peers(self) -> list[int]:
        """Return the other ranks, every rank beginning with the one behind it, so that no two begin with the same."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


class _Pending:
    """A torch Work; torch returns None for a rank outside the group, which never happens here."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


class _Exchange:
    """The sends and receives of one exchange."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self.is_complete = False

    def wait(self) -> None:
        if not self.is_complete:
            for work in self._works:
                work.wait()
            self.is_complete, self._works = True, ()  # which frees the tensors


class _ThenSum:
    """The second half of a reduce-scatter: add up what was received, then release the buffer."""

    def __init__(self, exchange: _Exchange, received: Lease, add_up: Callable[[], Any]) -> None:
        self._exchange = exchange
        self._received = received
        self._add_up = add_up

    def wait(self) -> None:
        self._exchange.wait()
        self._add_up()
        self._received.release()


def _operation(kind: ReduceKind) -> Any:
    return {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[kind]
