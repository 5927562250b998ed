"""torch.distributed behind the communicator interface.

Two choices are made here and nowhere else.  *Names*: torch 2.13 renamed the single-tensor collectives
(`all_gather_single`, `reduce_scatter_single`); whichever exists is used.  *Algorithm*: gloo's reduce-scatter is an
all-reduce that throws most of its result away, so on gloo it is done as an all-to-all of the slices followed by a local
sum in rank order: half the bytes on the wire, about half the time, and bfloat16 is summed in float32.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.interface import Lease, ReduceKind, Scratch, Work

_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessGroupCommunicator:
    """Collectives of one torch process group; `scratch` lends the memory that gloo's reduce-scatter needs."""

    def __init__(self, group: dist.ProcessGroup, scratch: Scratch) -> None:
        self._group = group
        self._scratch = scratch
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._exchanges_to_reduce = dist.get_backend(group) == "gloo"

    def all_gather_into(self, output: Tensor, input: Tensor) -> Work:
        return _Pending(_ALL_GATHER(output, input, group=self._group, async_op=True))

    def reduce_scatter_into(self, output: Tensor, input: Tensor) -> Work:
        if self._exchanges_to_reduce:
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

    def _exchange_and_sum(self, output: Tensor, input: Tensor) -> Work:
        received = self._scratch.lease(input.numel(), input.dtype)
        work = dist.all_to_all_single(received.tensor, input, group=self._group, async_op=True)
        return _SumOnWait(work, received, output)


class _Pending:
    """A torch Work; torch gives None for a rank outside the group, which never happens here."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


class _SumOnWait:
    """The second half of gloo's reduce-scatter: add up the slices received, then give the buffer back."""

    def __init__(self, work: Any, received: Lease, output: Tensor) -> None:
        self._work = work
        self._received = received
        self._output = output

    def wait(self) -> None:
        self._work.wait()
        slices = self._received.tensor.view(-1, self._output.numel())  # [size, n]
        torch.sum(slices, dim=0, out=self._output)
        self._received.release()


def _operation(kind: ReduceKind) -> Any:
    return {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[kind]
