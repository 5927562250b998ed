"""ZeRO-R: which activations are computed again in backward, and how what that starts from is kept.

A *checkpoint* is the input of layers that are recomputed together.  Names are Megatron-LM's and Megatron-DeepSpeed's
(Rajbhandari et al., arXiv 1910.02054, sections 4.2 and 6; Korthikanti et al., arXiv 2205.05198).
"""

from typing import Literal

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActivationConfig:
    """Recomputation of activations, and where its checkpoints lie (arXiv 1910.02054, sections 4.2 and 6)."""

    recompute_granularity: Literal["none", "selective", "full"] = setting(
        "none", help="what backward computes again; selective: the attention core; full: whole layers"
    )
    recompute_method: Literal["uniform", "block"] | None = setting(
        None,
        help="full recomputation: uniform: all layers, in segments of recompute_num_layers; block: the first"
        " recompute_num_layers layers, each on its own; without it, uniform",
        aliases=("activations-checkpoint-method",),
    )
    recompute_num_layers: int | None = setting(
        None,
        help="full recomputation: layers of a segment, or recomputed layers of each pipeline chunk; without it, 1",
        unit="layers",
        aliases=("checkpoint-num-layers", "activations-checkpoint-num-layers"),
        ge=1,
    )
    partition_activations: bool | Literal["auto"] = setting(
        False,
        help="full recomputation: keep every checkpoint in slices, one on each tensor-parallel process;"
        " auto: where that pays",
        aliases=("distribute-saved-activations", "distribute-checkpointed-activations"),
    )
    checkpoint_in_cpu: bool | Literal["auto"] = setting(
        False,
        help="full recomputation: keep checkpoints, or this process's slices of them, in host memory;"
        " auto: where that pays",
    )
    contiguous_checkpointing: bool = setting(
        False,
        help="full recomputation: keep checkpoints in one arena, allocated beforehand",
        aliases=("contigious-checkpointing",),
    )
    number_checkpoints: int | None = setting(
        None,
        help="checkpoints that the arena has room for; without it, as many as one micro-batch makes",
        unit="checkpoints",
        ge=1,
    )
    synchronize_each_layer: bool = setting(
        False,
        help="full recomputation: wait for the device before and after each segment",
        aliases=("synchronize-checkpoint-boundary",),
    )
    profile_backward: bool = setting(
        False, help="full recomputation: time the forward and the recomputation of each segment"
    )
    logits_chunk_bytes: int | None = setting(
        None,
        help="the largest piece of the logits that exists at once; without it, 64 MiB on CPUs, 1 GiB on GPUs",
        unit="bytes",
        ge=1,
    )
