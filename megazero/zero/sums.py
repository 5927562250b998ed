"""Sums of gradients over another axis than the data-parallel one, whose ranks each have a part of them.

Where activations are split along the sequence, every tensor-parallel rank holds a part of what a norm or a row-parallel
bias was used on (Korthikanti et al., arXiv 2205.05198, section 4.2.2); and what the first and the last pipeline stage
share gets a gradient on both.  The parts are added up once a step, after the reduction over the data-parallel axis, of
what this rank owns: those ranks all lay out alike.  Small pieces travel together in one constant-size buffer.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from megazero.comm.interface import Communicator
from megazero.memory.lease import Scratch
from megazero.parallel.topology import ENDS
from megazero.zero.layout import Bucket, Range
from megazero.zero.shards import Shards

_AXES = ("tp", ENDS)


class _Run(NamedTuple):
    """Adjacent elements of one bucket that are to be summed."""

    bucket: Bucket
    within: Range


class GradientSums:
    """The sums of one rank's owned gradients over the axes that `ParamSpec.summed_over` names."""

    def __init__(self, shards: Shards, axis: Callable[[str], Communicator], buffers: Scratch) -> None:
        """List what is to be summed.

        buffers: a pool whose leases may be as large as the layout's largest bucket in the gradients' dtype.
        """
        self._shards = shards
        self._buffers = buffers
        self.are_due = False
        """True while the gradients of a whole step have been reduced and not yet summed."""
        self._runs = [(axis(name), tuple(self._runs_over(name))) for name in _AXES if axis(name).size > 1]

    def apply(self) -> None:
        """Compute every sum, if any are due, and wait for it; a collective call over the axes that have some."""
        if not self.are_due:
            return
        self.are_due = False
        for communicator, runs in self._runs:
            for pack in self._packs(runs):
                self._sum(pack, communicator)

    def _runs_over(self, axis: str) -> Iterator[_Run]:
        for bucket in self._shards.layout.trainable_buckets:
            begun: Range | None = None
            for fragment in bucket.fragments_in(self._shards.owned(bucket)):
                if axis not in fragment.spec.summed_over:
                    continue
                if begun is not None and begun.stop == fragment.within.start:
                    begun = Range(begun.start, fragment.within.stop)
                    continue
                if begun is not None:
                    yield _Run(bucket, begun)
                begun = fragment.within
            if begun is not None:
                yield _Run(bucket, begun)

    def _packs(self, runs: Sequence[_Run]) -> Iterator[list[_Run]]:
        """Group runs so that each group fits into one buffer."""
        room = self._shards.layout.max_bucket_numel
        pack: list[_Run] = []
        for run in runs:
            if pack and sum(packed.within.numel for packed in pack) + run.within.numel > room:
                yield pack
                pack = []
            pack.append(run)
        if pack:
            yield pack

    def _sum(self, pack: Sequence[_Run], communicator: Communicator) -> None:
        shards = self._shards
        if len(pack) == 1 and shards.home(pack[0].bucket).is_device:
            communicator.all_reduce(shards.reduced_gradient(*pack[0])).wait()
            return
        numels = [run.within.numel for run in pack]
        lease = self._buffers.lease(sum(numels), shards.plan.gradient.dtype)
        places = torch.split(lease.tensor, numels)
        for run, place in zip(pack, places, strict=True):
            shards.load_gradient(*run, place)
        communicator.all_reduce(lease.tensor).wait()
        for run, place in zip(pack, places, strict=True):
            shards.store_gradient(*run, place)
        lease.release()
