"""ZeRO: which model states the data-parallel processes share out among themselves.

Names are DeepSpeed's, so that its users find them; defaults are megazero's own.  What a DeepSpeed configuration leaves
out gets DeepSpeed's defaults instead (config/deepspeed.py).
"""

from typing import Literal

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting

# The largest size that says "no limit", the same as in a DeepSpeed configuration that leaves the limit out.
UNLIMITED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ZeroConfig:
    """Stage, buckets, and how long gathered parameters stay (Rajbhandari et al., arXiv 1910.02054, section 5)."""

    zero_stage: int = setting(
        1,
        help="0: every process holds all model states; 1: optimizer states are partitioned; 2: gradients too;"
        " 3: parameters too",
        beyond="there is nothing left to partition after stage 3",
        ge=0,
        le=3,
    )
    reduce_bucket_size: int = setting(
        16_777_216,
        help="most gradient elements that one reduction moves; a bucket respects this and allgather_bucket_size,"
        " and is never smaller than data-parallel size x 16 elements",
        unit="elements",
        ge=0,
    )
    allgather_bucket_size: int = setting(
        16_777_216, help="most parameter elements that one gather moves; a bucket respects both", unit="elements", ge=0
    )
    overlap_comm: bool = setting(True, help="let reductions and gathers run while the model computes")
    contiguous_gradients: bool = setting(
        True,
        help="copy a gradient into its bucket as soon as autograd has made it; false: when the bucket is complete",
    )
    reduce_scatter: bool = setting(
        True, help="reduce gradients so that a process gets its partition only; false reduces by all-reduce"
    )
    allgather_partitions: bool = setting(
        True, help="publish updated parameters by all-gather; false publishes them by one broadcast per owner"
    )
    load_from_fp32_weights: bool = setting(
        True,
        help="without optimizer states, take master weights from a checkpoint's fp32 weights;"
        " false: from its working parameters, rounded",
    )
    ignore_unused_parameters: bool = setting(
        True, help="parameters without a gradient count as zero gradients; false: they stop the run with their names"
    )
    sub_group_size: int = setting(
        1_000_000_000, help="most elements that the optimizer updates at once", unit="elements", ge=1
    )
    prefetch_bucket_size: int | None = setting(
        None,
        help="stage 3: most parameter elements gathered ahead of use; 0 gathers each unit when it is needed;"
        " without it, as many as the largest unit has",
        unit="elements",
        aliases=("stage3-prefetch-bucket-size",),
        ge=0,
    )
    param_persistence_threshold: int = setting(
        0,
        help="stage 3: parameters smaller than this stay whole on every process",
        unit="elements",
        aliases=("stage3-param-persistence-threshold",),
        ge=0,
    )
    model_persistence_threshold: int = setting(
        UNLIMITED,
        help="stage 3: most elements that stay whole on every process, all parameters together",
        unit="elements",
        aliases=("stage3-model-persistence-threshold",),
        ge=0,
    )
    max_live_parameters: int = setting(
        1_000_000_000,
        help="stage 3: most gathered elements on a process; a unit in use may exceed it",
        unit="elements",
        aliases=("stage3-max-live-parameters",),
        ge=0,
    )
    max_reuse_distance: int = setting(
        0,
        help="stage 3: keep a unit gathered when it is needed again within this many elements of parameters;"
        " 0 releases what is not needed next",
        unit="elements",
        aliases=("stage3-max-reuse-distance",),
        ge=0,
    )
    zero3_reshard_after: Literal["microbatch", "window"] = setting(
        "microbatch",
        help="stage 3: when a unit's parameters go again: after every forward and backward that reads them, or after a"
        " window of the schedule, in which they stay gathered as far as max_live_parameters allows",
    )
    gather_16bit_weights_on_model_save: bool = setting(
        False,
        help="stage 3: let a model be saved in working precision as one file, gathering it unit by unit",
        aliases=("stage3-gather-16bit-weights-on-model-save",),
    )
    override_module_apply: bool = setting(
        True, help="stage 3: Module.apply sees whole parameters; false: what this process keeps"
    )
    memory_efficient_linear: bool = setting(
        True,
        help="stage 3: false: what autograd has saved of a gathered unit stays in memory until its backward",
    )
    communication_data_type: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = setting(
        "auto", help="number format in which gradients are reduced; auto is the gradients' own"
    )
    prescale_gradients: bool = setting(
        False, help="divide gradients by the data-parallel size before they are reduced, not after"
    )
    gradient_predivide_factor: float = setting(
        1.0, help="divide gradients by this before they are reduced, and by the rest of the average after", gt=0
    )
