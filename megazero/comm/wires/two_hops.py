"""An axis whose ranks lie on several nodes: every byte crosses from one node to another as seldom as it can.

The axis is a product of two: `inside`, the ranks of this rank's node, over the fast link; and `across`, the ranks that
have the same place on the other nodes, over the slow one.  Ranks are numbered node by node:

    rank = across.rank * inside.size + inside.rank

With A nodes of I ranks and slices of n bytes, a rank sends (A-1) n bytes across for an all-gather and as many for a
reduce-scatter, and A (I-1) n inside; over one ring of all ranks a node's link carries (A I - 1) n, I times as many as
there.  This is the hierarchical gather of MiCS (Zhang et al., 2022, section 3.3).

*Sums* are those of the node first, in the order and precision of `inside`, then those of the nodes' sums in that of
`across`: the same at every call and on every rank, and rounded to the tensor's dtype after each hop.

`hops.py` has the order in which hops begin, and what a call waits for.  Both hops are counted where `inside` and
`across` are metered; nothing is counted here.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megazero.comm.interface import (
    Communicator,
    JoinedWork,
    LabelMismatch,
    ReduceKind,
    Work,
    gather_together,
    in_runs,
    reduce_together,
)
from megazero.comm.wires.forwarding import ForwardingCommunicator
from megazero.comm.wires.hops import Hops
from megazero.memory.lease import Scratch

_Hops = Iterator[Sequence[Work]]


class TwoHopCommunicator(ForwardingCommunicator):
    """The collectives over `across.size * inside.size` ranks; all but gathers and reductions are those of `whole`."""

    def __init__(
        self,
        inside: Communicator,
        across: Communicator,
        whole: Communicator,
        scratch: Scratch,
        *,
        hops: Hops | None = None,
    ) -> None:
        """whole: the axis as one.

        scratch: lends 1/I of what is gathered or scattered, for each call that has not been waited for.
        hops: those of the other communicators that use `inside` and `across`; by default there are none.
        """
        super().__init__(whole)
        assert (whole.size, whole.rank) == (across.size * inside.size, across.rank * inside.size + inside.rank)
        self._inside = inside
        self._across = across
        self._scratch = scratch
        self._hops = hops or Hops()
        self._only = inside if across.size == 1 else across if inside.size == 1 else None  # where there is one hop

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        if self._only is not None:
            return self._only.all_gather_into(output, input, label)
        return self._hops.begin(self._gather([output], [input], label), 2, is_gather=True)

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        if self._only is not None:
            return self._only.all_gather_coalesced(outputs, inputs, label)
        leased = [self._across.size * input.nbytes for input in inputs]
        works = [
            self._hops.begin(self._gather(outputs[run], inputs[run], None if run.start else label), 2, is_gather=True)
            for run in in_runs(inputs, leased, self._scratch.buffer_bytes)
        ]
        return JoinedWork(works)

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        if self._only is not None:
            return self._only.reduce_scatter_into(output, input, key)
        return self._hops.begin(self._reduce_scatter([output], [input]), 2)

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        if self._only is not None:
            return self._only.reduce_scatter_coalesced(outputs, inputs, keys)
        return self._hops.begin(self._reduce_scatter(outputs, inputs), 2)

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        if self._only is not None:
            return self._only.all_reduce(tensor, kind)
        # Slices cross, unless the tensor has no equal slices: those of padding would cost a copy of it, and such
        # tensors are small.  No communicator scatters a maximum.
        if kind == "sum" and tensor.numel() % self._inside.size == 0:
            return self._hops.begin(self._reduce_in_slices(tensor), 3)
        return self._hops.begin(_in_turn(tensor, kind, self._inside.all_reduce, self._across.all_reduce), 2)

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        if self._only is not None:
            return self._only.all_reduce_scalars(tensor, kind)
        calls = self._inside.all_reduce_scalars, self._across.all_reduce_scalars
        return self._hops.begin(_in_turn(tensor, kind, *calls), 2)

    def _gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None) -> _Hops:
        """Gather the slices of this rank's place on every node, then each node's whole.

        Both hops compare labels: the first those of the ranks with one place, the second those of the node.
        """
        num_nodes, numels = self._across.size, [input.numel() for input in inputs]
        leased = self._scratch.lease(num_nodes * sum(numels), inputs[0].dtype)
        columns = torch.split(leased.tensor, [num_nodes * n for n in numels])
        gathering = gather_together(self._across, columns, inputs, label)
        yield [_MismatchOnAxis(gathering, lambda node: node * self._inside.size + self._inside.rank)]
        slices = [place for column in columns for place in column.view(num_nodes, -1)]
        nodes = [node for output in outputs for node in output.view(num_nodes, -1)]
        # This rank's slice may lie in its place, and is not written to then.
        slices[self._across.rank :: num_nodes] = inputs
        work = gather_together(self._inside, nodes, slices, label)
        yield [_MismatchOnAxis(work, lambda place: self._across.rank * self._inside.size + place)]
        leased.release()

    def _reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Hops:
        """Sum up each node's whole into the slices of this rank's place, for each node; then those slices."""
        num_nodes, numels = self._across.size, [output.numel() for output in outputs]
        leased = self._scratch.lease(num_nodes * sum(numels), inputs[0].dtype)
        columns = torch.split(leased.tensor, [num_nodes * n for n in numels])
        places = [place for column in columns for place in column.view(num_nodes, -1)]
        nodes = [node for input in inputs for node in input.view(num_nodes, -1)]
        yield [self._inside.reduce_scatter_coalesced(places, nodes)]
        yield [reduce_together(self._across, outputs, columns)]
        leased.release()

    def _reduce_in_slices(self, tensor: Tensor) -> _Hops:
        flat, per_node = tensor.view(-1), self._inside.size
        mine = flat.view(per_node, flat.numel() // per_node)[self._inside.rank]
        yield [self._inside.reduce_scatter_into(mine, flat)]
        yield [self._across.all_reduce(mine)]
        yield [self._inside.all_gather_into(flat, mine)]


def _in_turn(tensor: Tensor, kind: ReduceKind, *reductions: Callable[[Tensor, ReduceKind], Work]) -> _Hops:
    for reduction in reductions:
        yield [reduction(tensor, kind)]


class _MismatchOnAxis:
    """A work over some ranks of the axis, whose mismatch names the rank's number on the axis."""

    def __init__(self, work: Work, number: Callable[[int], int]) -> None:
        self._work = work
        self._number = number

    def wait(self) -> None:
        try:
            self._work.wait()
        except LabelMismatch as error:
            raise LabelMismatch(self._number(error.rank), error.label, error.mine) from None
