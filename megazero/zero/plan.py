"""The table of placements: the only file that defines what a ZeRO stage number means.

Rows are kinds of state, columns are stages, and a cell is the place of that state in that stage.  Everything else in
`zero/` reads cells (ZeRO, sections 5.1 to 5.3):

                              stage 0      stage 1       stage 2       stage 3
    working parameter         replicated   replicated    replicated    partitioned, gathered for use
    gradient, before          resident     resident      leased        leased
    gradient, after reduction replicated   partitioned   partitioned   partitioned
    master weights, moments   replicated   partitioned   partitioned   partitioned

*Resident* gradients are full flat tensors that live from the first micro-batch to the step's end, and are reduced once,
at the accumulation boundary; *leased* ones exist only in constant-size buffers until their bucket has been reduced, in
every micro-batch.  Without contiguous gradients resident ones become *loose*: torch's own tensors, which accumulate
until the boundary.

Every row has a *home*, which the configuration chooses: the device, host memory, or files.  The optimizer's home is
that of master weights and moments, in stages 1 to 3, and reduced gradients are there too; if it is files, they are in
host memory unless the configuration moves them to files as well.  A share of all these may stay on the device, and of
what would be in files a share in host memory.  The home of parameters, in stage 3, is that of their partitions, which
are gathered to the device for use.

Frozen parameters have a working parameter only.  Where that is partitioned it may be stored, and gathered, as blocks of
8-bit integers.
"""

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import torch

from megazero.comm.wires.codec import BlockCodec
from megazero.comm.wires.shard_group import Wires
from megazero.config.derived import secondary_size
from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.config.optimizers import EIGHT_BIT_BLOCK


class Placement(Enum):
    """The ranks of the data-parallel axis that store a piece of state."""

    REPLICATED = "every rank stores all of it"
    PARTITIONED = "every rank stores its partition of every bucket"


class Home(Enum):
    """The memory in which a piece of state lives between its uses."""

    DEVICE = "the device that computes the model"
    HOST = "host memory"
    FILE = "files, from which blocks come to host memory for use"

    __hash__ = object.__hash__  # a key of what is looked up for every bucket: an enum's own is a call in Python


class Lifetime(Enum):
    """The time for which a piece of state exists in full on a rank."""

    RESIDENT = "always; for gradients from the first micro-batch to the end of the step, in flat tensors"
    LOOSE = "gradients: the same time, in tensors of torch's own"
    LEASED = "gradients: until their bucket is reduced; parameters: while their unit computes"


@dataclass(frozen=True)
class PlacementRow:
    """The placement, number format, lifetime and home of one kind of state.

    A gradient's home is where it is after reduction.
    """

    placement: Placement
    dtype: torch.dtype
    lifetime: Lifetime = Lifetime.RESIDENT
    home: Home = Home.DEVICE

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True)
class ZeroPlan:
    """The table resolved for a configuration: a row for each kind of state."""

    parameter: PlacementRow
    gradient: PlacementRow
    optimizer: PlacementRow
    gradient_wire: torch.dtype
    """Number format in which gradients are reduced."""
    skips_not_finite: bool = False
    """True if a step whose gradients are not finite is skipped in every number format, not in fp16 alone."""
    share_at_home: float = 1.0
    """The part of the optimizer's elements that do not live on the device."""
    share_in_files: float = 1.0
    """The part of these that live in files, if the optimizer's home is files; the others live in host memory."""

    max_parameters_in_host: int = 0
    """The elements of partitions that stay in host memory on a rank, if the parameters' home is files."""

    frozen: BlockCodec | None = None
    """The form in which partitions of frozen parameters are stored and gathered; None: they are stored as others."""

    secondary: int = 1
    """The ranks over which gathered parameters are partitioned a second time; 1: they are not."""

    @property
    def may_overflow(self) -> bool:
        """True if steps are skipped: gradients pass through fp16, where large ones become infinite, or it is set."""
        return self.skips_not_finite or torch.float16 in (self.parameter.dtype, self.gradient.dtype, self.gradient_wire)

    @property
    def has_separate_master(self) -> bool:
        """True if there are master weights that are tensors of their own.

        A working parameter in the optimizer's format is its own master, unless one of the two has its home in host
        memory.
        """
        return self.separates_master(self.optimizer.home) or self.separates_master(Home.DEVICE)

    @property
    def averages_dtype(self) -> torch.dtype:
        """The format of an optimizer's averages of rows and columns: a bf16 one would soon take no small share."""
        return torch.promote_types(self.optimizer.dtype, torch.float32)

    def share_at(self, home: Home) -> float:
        """Return the part of the optimizer's elements, master weights and moments, that live in a home."""
        away = 0.0 if self.optimizer.home is Home.DEVICE else self.share_at_home
        in_files = away * self.share_in_files if self.optimizer.home is Home.FILE else 0.0
        return {Home.DEVICE: 1.0 - away, Home.HOST: away - in_files, Home.FILE: in_files}[home]

    @property
    def mixes_homes(self) -> bool:
        """True if the optimizer's elements live in more than one home."""
        return any(0.0 < self.share_at(home) < 1.0 for home in Home)

    @property
    def share_away(self) -> float:
        """The part of the optimizer's elements that the host updates, in whichever home they live."""
        return 1.0 - self.share_at(Home.DEVICE)

    def gradient_share_at(self, home: Home) -> float:
        """Return the part of the reduced gradients that live in a home."""
        in_files = self.share_at(Home.FILE) if self.gradient.home is Home.FILE else 0.0
        shares = {Home.DEVICE: self.share_at(Home.DEVICE), Home.HOST: self.share_away - in_files, Home.FILE: in_files}
        return shares[home]

    def separates_master(self, home: Home) -> bool:
        """Return True if master weights with this home are tensors of their own."""
        away = {home, self.parameter.home} != {Home.DEVICE}
        return away or self.optimizer.dtype != self.parameter.dtype


@dataclass(frozen=True)
class ModelStateBytes:
    """The bytes of model states on one rank (ZeRO, section 3.1)."""

    parameters: int
    gradients: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.master + self.moments


class _Stage(NamedTuple):
    parameter: Placement
    gradient: Placement
    gradient_lifetime: Lifetime
    optimizer: Placement


_WHOLE, _PART = Placement.REPLICATED, Placement.PARTITIONED
_STAGES = MappingProxyType(
    {
        0: _Stage(_WHOLE, _WHOLE, Lifetime.RESIDENT, _WHOLE),
        1: _Stage(_WHOLE, _PART, Lifetime.RESIDENT, _PART),
        2: _Stage(_WHOLE, _PART, Lifetime.LEASED, _PART),
        3: _Stage(_PART, _PART, Lifetime.LEASED, _PART),
    }
)

HOMES = MappingProxyType({"none": Home.DEVICE, "cpu": Home.HOST, "nvme": Home.FILE})

DTYPES = MappingProxyType({"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


def wires(zero: ZeroConfig) -> Wires:
    """Return the wires of a shard group."""
    block, stochastic = zero.zero_quantized_block_size, zero.zero_quantized_stochastic
    gathers, gradients = zero.zero_quantized_weights, zero.zero_quantized_gradients
    is_partitioned = _STAGES[zero.zero_stage].parameter is Placement.PARTITIONED
    return Wires(
        gathers_in_hops=zero.hierarchical_collectives is True or zero.mics_hierarchical_params_gather,
        sums_in_hops=zero.hierarchical_collectives is True,
        hops_if_faster=zero.hierarchical_collectives == "auto",
        weights=(
            BlockCodec(zero.zero_quantized_weights_bits, block, stochastic) if gathers and is_partitioned else None
        ),
        gradients=BlockCodec(zero.zero_quantized_gradients_bits, block, stochastic) if gradients else None,
        error_beta=zero.zero_error_feedback_beta if zero.zero_error_feedback else None,
        error_reset_steps=zero.zero_error_feedback_reset,
    )


def resolve(zero: ZeroConfig, precision: PrecisionConfig) -> ZeroPlan:
    """Return the table for a configuration that has passed its rules."""
    stage = _STAGES[zero.zero_stage]
    parameter_dtype = DTYPES[precision.precision]
    is_narrow = precision.bf16_master_weights and parameter_dtype is torch.bfloat16
    master_dtype = parameter_dtype if is_narrow else torch.promote_types(parameter_dtype, torch.float32)
    gradient_dtype = master_dtype if precision.accumulate_allreduce_grads_in_fp32 else parameter_dtype
    lifetime = stage.gradient_lifetime
    if lifetime is Lifetime.RESIDENT and not zero.contiguous_gradients:
        lifetime = Lifetime.LOOSE
    gathered = Lifetime.LEASED if stage.parameter is Placement.PARTITIONED else Lifetime.RESIDENT
    home = HOMES[zero.offload_optimizer]
    gradient_home = Home.HOST if home is Home.FILE and not zero.offload_gradients_nvme else home
    return ZeroPlan(
        parameter=PlacementRow(stage.parameter, parameter_dtype, gathered, HOMES[zero.offload_param]),
        gradient=PlacementRow(stage.gradient, gradient_dtype, lifetime, gradient_home),
        optimizer=PlacementRow(stage.optimizer, master_dtype, home=home),
        gradient_wire=DTYPES.get(zero.communication_data_type, gradient_dtype),
        skips_not_finite=precision.check_grad_overflow,
        share_at_home=zero.offload_optimizer_ratio,
        share_in_files=zero.offload_optimizer_nvme_ratio,
        max_parameters_in_host=zero.offload_param_max_in_cpu,
        frozen=BlockCodec(8, zero.zero_quantized_block_size) if zero.zero_quantized_nontrainable_weights else None,
        secondary=secondary_size(zero),
    )


class OptimizerShape(NamedTuple):
    """The properties of an optimizer that formulas need; the default is Adam's.

    num_moments: the values that it keeps for every element beside the master weights.
    num_averages: those that it keeps of rows and columns, of all parameters that a rank has elements of.
    num_passes: its passes over what a rank owns before that of the update, in which moments may change.
    in_8_bits: whether its moments are stored as codes of one byte, with a float32 for each block of them.
    """

    num_moments: int = 2
    num_averages: int = 0
    num_passes: int = 0
    in_8_bits: bool = False

    def moment_bytes(self, numel: int, itemsize: int) -> int:
        """Return the bytes of all moments of so many elements; itemsize: that of the master weights."""
        return self.num_moments * (numel + numel // EIGHT_BIT_BLOCK * 4 if self.in_8_bits else numel * itemsize)


ADAM = OptimizerShape()


def model_state_bytes(
    plan: ZeroPlan, numel: int, partitions: int, home: Home = Home.DEVICE, optimizer: OptimizerShape = ADAM
) -> ModelStateBytes:
    """Return the bytes per rank at a home for `numel` parameters by formula: p + g + k, divided where partitioned.

    Averages of rows and columns are whole on every rank's device.  A resident gradient is so until the step's end, even
    where it is partitioned after reduction.  Loose gradients are torch's own and not counted; the memory for their
    reduced sums is.
    """

    def stored(row: PlacementRow) -> int:
        return numel if row.placement is Placement.REPLICATED else numel // partitions

    resident = plan.gradient.lifetime is Lifetime.RESIDENT and home is Home.DEVICE
    partition = stored(plan.parameter)
    in_host = min(partition, plan.max_parameters_in_host) if plan.parameter.home is Home.FILE else 0
    parameters = (
        {plan.parameter.home: partition - in_host, Home.HOST: in_host} if in_host else {plan.parameter.home: partition}
    )
    if plan.secondary > 1:
        at = Home.HOST if plan.parameter.home is Home.FILE else plan.parameter.home
        parameters[at] = parameters.get(at, 0) + numel // plan.secondary
    owned = round(stored(plan.optimizer) * plan.share_at(home))
    reduced = round(stored(plan.gradient) * plan.gradient_share_at(home))
    averages = optimizer.num_averages if home is Home.DEVICE else 0
    return ModelStateBytes(
        parameters=parameters.get(home, 0) * plan.parameter.itemsize,
        gradients=(numel if resident else reduced) * plan.gradient.itemsize,
        master=owned * plan.optimizer.itemsize if plan.separates_master(home) else 0,
        moments=optimizer.moment_bytes(owned, plan.optimizer.itemsize) + averages * plan.averages_dtype.itemsize,
    )


def data_parallel_bytes(
    plan: ZeroPlan, numel: int, partitions: int, num_micro_batches: int, *, num_gathers: int | None = None
) -> int:
    """Return the bytes that a rank sends over the data-parallel axis in a step, by formula (ZeRO, section 7).

    numel: the number of parameters.  Gradients are reduced once, or in every micro-batch where they are leased.
    Parameters are published once, or, where they are partitioned, gathered num_gathers times, by default for every
    forward and every backward (as if none stayed gathered between the two).
    """
    reductions = num_micro_batches if plan.gradient.lifetime is Lifetime.LEASED else 1
    reduced = reductions * numel * plan.gradient_wire.itemsize
    if plan.parameter.placement is Placement.PARTITIONED:
        gathered = (2 * num_micro_batches if num_gathers is None else num_gathers) * numel * plan.parameter.itemsize
    else:
        row = plan.gradient if plan.gradient.placement is Placement.REPLICATED else plan.parameter
        gathered = numel * row.itemsize
    return (reduced + gathered) * (partitions - 1) // partitions
