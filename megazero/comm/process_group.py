"""torch.distributed behind the communicator interface.

Four choices are made here and nowhere else.  *Calls*: methods of the group itself are called, not the functions of
torch.distributed around them, which look a group up in torch's list and cost several Python calls a message.  *Names*:
torch 2.13 renamed the single-tensor collectives (`all_gather_single`, `reduce_scatter_single`, `all_to_all_single`);
whichever exists is used.  *Algorithm*: gloo's reduce-scatter is an all-reduce that discards most of its result, and its
all-gather and all-to-all copy what a rank sends to itself.  On gloo all three are made of messages: every rank sends
every other one its slice, from the input's memory into the output's, and a reduce-scatter sums up what it receives (in
rank order; bfloat16 in float32).  That is the ring's number of bytes, without a copy.
*Directions*: gloo locks a connection while it writes to it, and its thread that reads from the same connection looks
for the lock without a pause until then.  So of an axis with two groups every connection carries messages in one
direction, which takes half the processor's time.
"""

from collections import deque
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

from megazero.comm.interface import LabelMismatch, ReduceKind, Work
from megazero.memory.lease import Lease, Scratch

_MAX_IN_FLIGHT = 64  # exchanges of one group
_IS_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single")
ALL_GATHER = "all_gather_single" if _IS_RENAMED else "_allgather_base"
REDUCE_SCATTER = "reduce_scatter_single" if _IS_RENAMED else "_reduce_scatter_base"
ALL_GATHER_COALESCED = "all_gather_single_coalesced" if _IS_RENAMED else "allgather_into_tensor_coalesced"
REDUCE_SCATTER_COALESCED = "reduce_scatter_single_coalesced" if _IS_RENAMED else "reduce_scatter_tensor_coalesced"
ALL_TO_ALL = "all_to_all_single" if _IS_RENAMED else "alltoall_base"
# Tags of messages: those between two ranks of a group that have the same tag keep their order.  Two communicators of
# one axis share its groups, so each adds its lane, 0 or 1.
_TAG, _LABEL, _GATHER = 0, 2, 4
# Tags of a gather's messages follow from their size: where ranks gather different things by mistake, messages of
# different sizes never meet, for which gloo would end the process.
_GATHER_TAGS = 2**30 - _GATHER


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
        self._lane = lane
        groups = (group, group if beside is None else beside)
        # The group over which messages go up to higher ranks, and the one over which they come down.
        self._up, self._down = groups[lane], groups[1 - lane]
        self._in_flight: deque[_Exchange] = deque()

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
        return _Pending(self._group.send([tensor], to, _TAG))

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        return _Pending(self._group.recv([tensor], source, _TAG))

    def barrier(self) -> None:
        options = BarrierOptions()
        has_nccl = self._group.name() == "nccl"
        options.device = torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")
        self._group.barrier(options).wait()

    def _exchange_to_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None) -> Work:
        check = None if label is None or self.size == 1 else self._compare(label)
        works: list[Any] = []
        for output, input in zip(outputs, inputs, strict=True):
            slices = output.view(self.size, input.numel())
            if slices[self.rank].data_ptr() != input.data_ptr():
                slices[self.rank].copy_(input)
            tag = _GATHER + 2 * (input.nbytes % _GATHER_TAGS)
            for peer in self._peers:
                works += self._swap(slices[self.rank], slices[peer], peer, tag)
        return self._retain(_Exchange(works, check))

    def _compare(self, label: int) -> Callable[[], None]:
        """Send the label to the next rank; return a function that waits for that of the rank before, and compares."""
        before, sent = (self.rank - 1) % self.size, torch.tensor([label])
        received = sent.clone()  # what a dry group, which receives nothing, leaves there
        receiving = self._receive(received, before, _LABEL)
        sending = self._send(sent, (self.rank + 1) % self.size, _LABEL)

        def check() -> None:
            receiving.wait()
            sending.wait()
            if (theirs := int(received)) != label:
                raise LabelMismatch(before, theirs, label)

        return check

    def _exchange_and_sum(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        """Exchange slices of tensors of one dtype, and sum up what is received in one buffer for all."""
        numels = [output.numel() for output in outputs]
        rows = 1 if self.size == 2 else self.size  # a sum of two needs no copy of this rank's slice
        received = self._scratch.lease(rows * sum(numels), inputs[0].dtype)
        works: list[Any] = []
        sums: list[Callable[[], Any]] = []
        places = received.tensor.split_with_sizes([rows * numel for numel in numels])
        for output, input, place in zip(outputs, inputs, places, strict=True):
            slices, summands = input.view(self.size, -1), place.view(rows, -1)
            for peer in self._peers:
                works += self._swap(slices[peer], summands[peer if rows > 1 else 0], peer)
            if self.size == 2:
                sums.append(partial(torch.add, slices[self.rank], place, out=output))
            else:
                summands[self.rank].copy_(slices[self.rank])
                sums.append(partial(torch.sum, summands, dim=0, out=output))
        return _ThenSum(self._retain(_Exchange(works)), received, sums)

    def _exchange_slices(self, output: Tensor, input: Tensor) -> Work:
        theirs, mine = output.view(self.size, -1), input.view(self.size, -1)
        works = [work for peer in self._peers for work in self._swap(mine[peer], theirs[peer], peer)]
        theirs[self.rank].copy_(mine[self.rank])
        return self._retain(_Exchange(works))

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

    def _swap(self, mine: Tensor, theirs: Tensor, peer: int, tag: int = _TAG) -> list[Any]:
        """Begin to send `mine` to rank `peer`, and to receive `theirs` from it."""
        receiving = self._receive(theirs, peer, tag)
        return [receiving, self._send(mine, peer, tag)]

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        return (self._up if peer > self.rank else self._down).send([tensor], peer, tag + self._lane)

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Any:
        return (self._down if peer > self.rank else self._up).recv([tensor], peer, tag + self._lane)


class _Pending:
    """A torch Work; torch returns None for a rank outside the group, which never happens here."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


class _Exchange:
    """The sends and receives of one exchange; `check` is called before they are waited for."""

    def __init__(self, works: Sequence[Any], check: Callable[[], None] | None = None) -> None:
        self._works = works
        self._check = check
        self.is_complete = False

    def wait(self) -> None:
        if not self.is_complete:
            if self._check is not None:
                self._check()
            for work in self._works:
                work.wait()
            self.is_complete, self._works = True, ()  # which frees the tensors


class _ThenSum:
    """The second half of reduce-scatters: add up what was received, then release the buffer."""

    def __init__(self, exchange: _Exchange, received: Lease, sums: Sequence[Callable[[], Any]]) -> None:
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
