"""Sums of gradients over other ranks than those they are partitioned over, which each have a part of them.

Where activations are split along the sequence, every tensor-parallel rank holds a part of what a norm or a row-parallel
bias was used on (Korthikanti et al., arXiv 2205.05198, section 4.2.2); what the first and the last pipeline stage share
gets a gradient on both; and where ZeRO partitions over a part of the data-parallel axis, every replica has gradients of
its own samples (MiCS, arXiv 2205.00119, section 3.4).  The parts are added up once a step, after the reduction over the
ranks of the partitions, of what this rank owns: those ranks all lay out alike.  Small pieces travel together in one
constant-size buffer.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from megazero.comm.interface import Communicator, Work
from megazero.comm.mesh import Mesh
from megazero.memory.lease import Scratch
from megazero.parallel.topology import ENDS
from megazero.zero.layout import Bucket, Range
from megazero.zero.shards import Shards

_AXES = ("tp", ENDS)
_MAX_IN_FLIGHT = 2


class SummedRun(NamedTuple):
    """Adjacent elements of one bucket that are to be summed."""

    bucket: Bucket
    within: Range


class GradientSums:
    """The sums of one rank's owned gradients over replicas, and over the axes that `ParamSpec.summed_over` names."""

    def __init__(self, shards: Shards, mesh: Mesh, buffers: Scratch) -> None:
        """List what is to be summed.

        buffers: a pool whose leases may be as large as the layout's largest reduction in the gradients' dtype.
        """
        self._shards = shards
        self._buffers = buffers
        self.are_due = False
        """True while the gradients of a whole step have been reduced and not yet summed."""
        self._runs: list[tuple[Communicator, tuple[SummedRun, ...]]] = []
        if mesh.replicas.size > 1:
            owned = (SummedRun(bucket, shards.owned(bucket)) for bucket in shards.layout.trainable_buckets)
            self._runs.append((mesh.replicas, tuple(owned)))
        axes = {name: mesh.axis(name) for name in _AXES}
        self._runs += [(axis, tuple(self._runs_over(name))) for name, axis in axes.items() if axis.size > 1]

    def apply(self) -> None:
        """Compute every sum, if any are due, and wait for it; a collective call over the axes that have some."""
        if not self.are_due:
            return
        self.are_due = False
        for communicator, runs in self._runs:
            in_flight: deque[Work] = deque()
            for pack in self._packs(runs):
                if len(pack) == 1 and self._shards.home(pack[0].bucket).is_device:
                    gradient = self._shards.reduced_gradient(*pack[0])
                    in_flight.append(communicator.all_reduce(gradient))
                else:
                    self._sum(pack, communicator)
                while len(in_flight) > _MAX_IN_FLIGHT:
                    in_flight.popleft().wait()
            for work in in_flight:
                work.wait()

    def messages(self) -> Iterator[Sequence[SummedRun]]:
        """Yield the gradients that a step sums up, by message."""
        return chain.from_iterable(self._packs(runs) for _, runs in self._runs)

    def _runs_over(self, axis: str) -> Iterator[SummedRun]:
        for bucket in self._shards.layout.trainable_buckets:
            begun: Range | None = None
            for fragment in bucket.fragments_in(self._shards.owned(bucket)):
                if axis not in fragment.spec.summed_over:
                    continue
                if begun is not None and begun.stop == fragment.within.start:
                    begun = Range(begun.start, fragment.within.stop)
                    continue
                if begun is not None:
                    yield SummedRun(bucket, begun)
                begun = fragment.within
            if begun is not None:
                yield SummedRun(bucket, begun)

    def _packs(self, runs: Sequence[SummedRun]) -> Iterator[list[SummedRun]]:
        """Group runs so that each group fits into one buffer."""
        room = self._shards.layout.max_reduced_numel
        pack: list[SummedRun] = []
        for run in runs:
            if pack and sum(packed.within.numel for packed in pack) + run.within.numel > room:
                yield pack
                pack = []
            pack.append(run)
        if pack:
            yield pack

    def _sum(self, pack: Sequence[SummedRun], communicator: Communicator) -> None:
        shards = self._shards
        numels = [run.within.numel for run in pack]
        lease = self._buffers.lease(sum(numels), shards.plan.gradient.dtype)
        places = torch.split(lease.tensor, numels)
        for run, place in zip(pack, places, strict=True):
            shards.load_gradient(*run, place)
        communicator.all_reduce(lease.tensor).wait()
        for run, place in zip(pack, places, strict=True):
            shards.store_gradient(*run, place)
        lease.release()
