"""The persistent flat tensors of this rank, and the views everything else works on.

Working parameters are one flat tensor per section, and every `nn.Parameter` is a view of it.  Resident gradients have
the same shape, with `.grad` preset to views.  What is partitioned (reduced gradients of leased buckets, master weights,
moments) lies bucket after bucket in one flat tensor each; `owned` says which range of a bucket that is.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megazero.zero.layout import Bucket, FlatLayout, Range, Section
from megazero.zero.plan import Lifetime, ModelStateBytes, Placement, Row, ZeroPlan


class Shards:
    """Allocates the state of one rank according to the plan, and takes over the values of `parameters`."""

    def __init__(
        self, plan: ZeroPlan, layout: FlatLayout, rank: int, *, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.plan = plan
        self.layout = layout
        self.rank = rank
        self._parameters = parameters
        self._device = next(iter(parameters.values())).device
        self._positions = self._positions_by_bucket(plan.optimizer)
        self._working = [self._adopt(section) for section in layout.sections]
        self._resident_gradients = self._make_resident_gradients()
        self._gradient_shard = self._make_gradient_shard()
        owned = sum(self.owned(bucket).numel for bucket in layout.trainable_buckets)
        self._master = self._empty(owned, plan.optimizer.dtype) if plan.has_separate_master else None
        self._exp_avg = self._zeros(owned, plan.optimizer.dtype)
        self._exp_avg_sq = self._zeros(owned, plan.optimizer.dtype)
        self.optimizer_step = torch.zeros((), dtype=torch.float32, device=self._device)
        self.copy_working_to_master()

    def owned(self, bucket: Bucket) -> Range:
        """The range of the section for which this rank keeps optimizer state."""
        return self._kept(self.plan.optimizer, bucket)

    def partition(self, bucket: Bucket) -> Range:
        """This rank's partition of a bucket, whatever is kept: norms are computed on it in every stage."""
        return bucket.partition(self.rank)

    def working(self, bucket: Bucket, within: Range) -> Tensor:
        """Working parameters [numel of within], a view."""
        return self._working[bucket.section][within.start : within.stop]

    def resident_gradient(self, bucket: Bucket, within: Range) -> Tensor:
        """Unreduced (after reduction: reduced) gradients of a resident section, a view."""
        return self._resident_gradients[bucket.section][within.start : within.stop]

    def reduced_gradient(self, bucket: Bucket, within: Range) -> Tensor:
        """Reduced gradients of a range this rank keeps after reduction, a view."""
        if self.plan.gradient.lifetime is Lifetime.RESIDENT:
            return self.resident_gradient(bucket, within)
        return self._gradient_shard[self._place(bucket, within)]

    def master(self, bucket: Bucket, within: Range) -> Tensor:
        """Master weights of an owned range; at full precision the working parameters themselves."""
        if self._master is None:
            return self.working(bucket, within)
        return self._master[self._place(bucket, within)]

    def exp_avg(self, bucket: Bucket, within: Range) -> Tensor:
        """Adam's first moment of an owned range."""
        return self._exp_avg[self._place(bucket, within)]

    def exp_avg_sq(self, bucket: Bucket, within: Range) -> Tensor:
        """Adam's second moment of an owned range."""
        return self._exp_avg_sq[self._place(bucket, within)]

    def reset_resident_gradients(self) -> None:
        """Empty resident gradients, and point every `.grad` at its view again (a user's zero_grad() drops them)."""
        for index, flat in self._resident_gradients.items():
            flat.zero_()
            self._preset_gradients(self.layout.sections[index], flat)

    def copy_working_to_master(self) -> None:
        """Master = working, where they are two tensors."""
        self._between_master_and_working(to_working=False)

    def copy_master_to_working(self) -> None:
        """The owned ranges of working = master, cast."""
        self._between_master_and_working(to_working=True)

    def model_state_bytes(self) -> ModelStateBytes:
        """Bytes the flat tensors really occupy."""
        return ModelStateBytes(
            parameters=sum(_nbytes(flat) for flat in self._working),
            gradients=sum(map(_nbytes, self._resident_gradients.values())) + _nbytes(self._gradient_shard),
            master=0 if self._master is None else _nbytes(self._master),
            moments=_nbytes(self._exp_avg) + _nbytes(self._exp_avg_sq),
        )

    def _adopt(self, section: Section) -> Tensor:
        """Move a section's parameters into one flat tensor; the module's own tensors are freed one by one."""
        flat = self._zeros(section.numel, section.dtype)
        for slot in section.slots:
            parameter = self._parameters[slot.spec.name]
            view = flat[slot.start : slot.stop].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
        return flat

    def _make_resident_gradients(self) -> dict[int, Tensor]:
        row = self.plan.gradient
        if row.lifetime is not Lifetime.RESIDENT:
            return {}
        flats = {}
        for section in self.layout.sections:
            if section.trainable:
                flats[section.index] = self._zeros(section.numel, row.dtype)
                self._preset_gradients(section, flats[section.index])
        return flats

    def _preset_gradients(self, section: Section, flat: Tensor) -> None:
        """Autograd adds in place where `.grad` exists, so it accumulates straight into the flat tensor."""
        for slot in section.slots:
            parameter = self._parameters[slot.spec.name]
            if flat.dtype != parameter.dtype:
                parameter.grad_dtype = flat.dtype
            parameter.grad = flat[slot.start : slot.stop].view(parameter.shape)

    def _make_gradient_shard(self) -> Tensor:
        leased = self.plan.gradient.lifetime is Lifetime.LEASED
        numel = sum(self.owned(bucket).numel for bucket in self.layout.trainable_buckets) if leased else 0
        return self._zeros(numel, self.plan.gradient.dtype)

    def _between_master_and_working(self, *, to_working: bool) -> None:
        if self._master is None:
            return
        for bucket in self.layout.trainable_buckets:
            owned = self.owned(bucket)
            source, target = self.working(bucket, owned), self.master(bucket, owned)
            if to_working:
                source, target = target, source
            target.copy_(source)

    def _kept(self, row: Row, bucket: Bucket) -> Range:
        return bucket.range if row.placement is Placement.REPLICATED else bucket.partition(self.rank)

    def _positions_by_bucket(self, row: Row) -> dict[int, int]:
        """Where each bucket's kept range begins in the flat tensors of partitioned state."""
        positions, offset = {}, 0
        for bucket in self.layout.trainable_buckets:
            positions[bucket.index] = offset
            offset += self._kept(row, bucket).numel
        return positions

    def _place(self, bucket: Bucket, within: Range) -> slice:
        start = self._positions[bucket.index] + within.start - self.owned(bucket).start
        return slice(start, start + within.numel)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)


def _nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
