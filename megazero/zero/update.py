"""From reduced gradients to new parameters: norms, the inner optimizer on what this rank owns, publishing."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.comm.interface import Scratch
from megazero.optim.grad_norm import first_overflow, fragment_norms
from megazero.optim.inner import AdamWRun, AdamWSettings, StepInputs, adamw, advance
from megazero.zero.gather import ParameterGather
from megazero.zero.layout import Bucket, Fragment, Range
from megazero.zero.shards import Shards


class LocalNorms(NamedTuple):
    """This rank's share of the global figures, on the device, before any reduction over ranks.

    square: sum of squares over the elements this rank counts, float64.
    first_overflow: index (in layout order) of its first parameter with a gradient that is not finite, int32.
    """

    square: Tensor
    first_overflow: Tensor


class ShardUpdate:
    """Works on the ranges this rank owns, bucket by bucket in forward order."""

    def __init__(
        self, shards: Shards, gather: ParameterGather, buffers: Scratch, *, counted_at: Mapping[str, int]
    ) -> None:
        """counted_at: this rank's coordinates on the axes over which parameters may be replicated ({"tp": 1})."""
        self._shards = shards
        self._gather = gather
        self._buffers = buffers
        self._buckets = shards.layout.trainable_buckets
        self._coordinates = dict(counted_at)
        self.parameter_names = tuple(
            slot.spec.name for section in shards.layout.sections if section.trainable for slot in section.slots
        )
        device = shards.optimizer_step.device
        index_of = {name: index for index, name in enumerate(self.parameter_names)}
        indices = [index_of[fragment.spec.name] for _, fragment in self._partition_fragments()]
        self._fragment_parameters = torch.tensor(indices, dtype=torch.int32, device=device)
        counted = [fragment.spec.is_counted_on(self._coordinates) for _, fragment in self._partition_fragments()]
        self._counted = torch.tensor(counted, dtype=torch.float64, device=device)

    def local_norms(self) -> LocalNorms:
        """Norms over this rank's partitions; the same fragments in every stage, so that stages agree to the bit."""
        gradients = [
            self._shards.reduced_gradient(bucket, self._range_of(fragment))
            for bucket, fragment in self._partition_fragments()
        ]
        norms = fragment_norms(gradients, self._counted.device)
        # A replicated fragment is not multiplied by zero but left out: 0 * inf would be nan, and the rank that does
        # count it sees the same inf.
        square = torch.where(self._counted > 0, norms.square(), 0.0).sum()
        return LocalNorms(square, first_overflow(norms, self._fragment_parameters))

    def apply(self, settings: AdamWSettings, inputs: StepInputs) -> None:
        """One optimizer step on the owned ranges; each bucket is published as soon as it is done."""
        advance(self._shards.optimizer_step, inputs)
        for bucket in self._buckets:
            owned = self._shards.owned(bucket)
            for run in self._runs(bucket):
                adamw(run, settings, self._shards.optimizer_step, inputs, buffers=self._buffers)
            if self._shards.plan.has_separate_master:
                self._shards.working(bucket, owned).copy_(self._shards.master(bucket, owned))
            self._gather.publish(bucket)

    def publish_all(self) -> None:
        """Publish every bucket, after state has been loaded into the owned ranges."""
        for bucket in self._buckets:
            self._gather.publish(bucket)

    def _runs(self, bucket: Bucket) -> Iterator[AdamWRun]:
        shards = self._shards
        section = shards.layout.sections[bucket.section]
        for decay, piece in section.group_runs(shards.owned(bucket)):
            yield AdamWRun(
                shards.master(bucket, piece),
                shards.reduced_gradient(bucket, piece),
                shards.exp_avg(bucket, piece),
                shards.exp_avg_sq(bucket, piece),
                decay,
            )

    def _partition_fragments(self) -> Iterator[tuple[Bucket, Fragment]]:
        for bucket in self._buckets:
            section = self._shards.layout.sections[bucket.section]
            for fragment in section.fragments(self._shards.partition(bucket)):
                yield bucket, fragment

    @staticmethod
    def _range_of(fragment: Fragment) -> Range:
        return Range(fragment.section_start, fragment.section_start + fragment.numel)
