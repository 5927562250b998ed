"""The table of placements: the only file that knows what a ZeRO stage number means.

Rows are kinds of state, columns say where it lives.  A stage is a choice of cells, and everything else in `zero/` reads
cells (paper sections 5.1-5.3):

                              stage 0      stage 1                    stage 2
    working parameter         replicated   replicated                 replicated
    gradient, after reduction replicated   partitioned                partitioned
    gradient, before          resident     resident                   leased, bucket by bucket
    master weights, moments   replicated   partitioned                partitioned

*Resident* gradients are full flat tensors that live from the first micro-batch to the step's end, and are reduced once,
at the accumulation boundary; *leased* ones exist only in constant-size buffers until their bucket has been reduced, in
every micro-batch.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from megazero.config.precision import PrecisionConfig
from megazero.config.zero import ZeroConfig


class Placement(Enum):
    """Who keeps a piece of state along the data-parallel axis."""

    REPLICATED = "every rank keeps all of it"
    PARTITIONED = "every rank keeps its partition of every bucket"


class Lifetime(Enum):
    """How long unreduced gradients exist in full."""

    RESIDENT = "from the first micro-batch to the end of the step"
    LEASED = "until their bucket is reduced"


@dataclass(frozen=True)
class Row:
    """One kind of state."""

    placement: Placement
    dtype: torch.dtype
    lifetime: Lifetime = Lifetime.RESIDENT

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True)
class ZeroPlan:
    """The resolved table."""

    parameter: Row
    gradient: Row
    optimizer: Row

    @property
    def has_separate_master(self) -> bool:
        """Whether master weights are tensors of their own; at full precision the working parameter is its master."""
        return self.optimizer.dtype != self.parameter.dtype

    @property
    def widest_itemsize(self) -> int:
        """Bytes an element of the widest row takes."""
        return max(self.parameter.itemsize, self.gradient.itemsize, self.optimizer.itemsize)


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes of model states on one rank (paper section 3.1)."""

    parameters: int
    gradients: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.master + self.moments


_STAGES = {
    0: (Placement.REPLICATED, Lifetime.RESIDENT, Placement.REPLICATED),
    1: (Placement.PARTITIONED, Lifetime.RESIDENT, Placement.PARTITIONED),
    2: (Placement.PARTITIONED, Lifetime.LEASED, Placement.PARTITIONED),
}
SUPPORTED_STAGES = tuple(_STAGES)

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve(zero: ZeroConfig, precision: PrecisionConfig) -> ZeroPlan:
    """The table for a configuration that has passed its rules."""
    gradient_placement, lifetime, optimizer_placement = _STAGES[zero.zero_stage]
    parameter_dtype = DTYPES[precision.precision]
    master_dtype = torch.promote_types(parameter_dtype, torch.float32)
    widen = precision.accumulate_allreduce_grads_in_fp32
    gradient_dtype = torch.promote_types(parameter_dtype, torch.float32) if widen else parameter_dtype
    return ZeroPlan(
        parameter=Row(Placement.REPLICATED, parameter_dtype),
        gradient=Row(gradient_placement, gradient_dtype, lifetime),
        optimizer=Row(optimizer_placement, master_dtype),
    )


def model_state_bytes(plan: ZeroPlan, numel: int, partitions: int) -> ModelStateBytes:
    """Bytes per rank for `numel` parameters by formula: p + g + k with each term divided where it is partitioned.

    A resident gradient is whole on every rank until the step's end, whatever becomes of it after reduction.
    """

    def kept(row: Row, *, whole: bool = False) -> int:
        return numel if whole or row.placement is Placement.REPLICATED else numel // partitions

    owned = kept(plan.optimizer)
    return ModelStateBytes(
        parameters=kept(plan.parameter) * plan.parameter.itemsize,
        gradients=kept(plan.gradient, whole=plan.gradient.lifetime is Lifetime.RESIDENT) * plan.gradient.itemsize,
        master=owned * plan.optimizer.itemsize if plan.has_separate_master else 0,
        moments=2 * owned * plan.optimizer.itemsize,
    )
