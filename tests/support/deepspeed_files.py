"""DeepSpeed configurations and the settings that each stands for, written by hand from DeepSpeed's documentation.

tests/command_line/test_deepspeed_files.py reads them at the door of a run, tests/library/test_deepspeed_files.py at the
library's.  No name or value here comes from megazero's own tables of keys.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class DeepSpeedFile(NamedTuple):
    """A configuration and the settings that it stands for, by section and name, in sections that both doors have."""

    content: dict[str, Any]
    settings: dict[str, Any]


FILES: Mapping[str, DeepSpeedFile] = MappingProxyType(
    {
        "every key of ZeRO": DeepSpeedFile(
            {
                "zero_optimization": {
                    "stage": 3,
                    "contiguous_gradients": False,
                    "reduce_scatter": False,
                    "reduce_bucket_size": 1.1e7,
                    "allgather_partitions": False,
                    "allgather_bucket_size": 12,
                    "overlap_comm": False,
                    "load_from_fp32_weights": False,
                    "sub_group_size": 13,
                    "stage3_prefetch_bucket_size": 14,
                    "stage3_param_persistence_threshold": 15,
                    "stage3_model_persistence_threshold": 16,
                    "stage3_max_live_parameters": 17,
                    "stage3_max_reuse_distance": 18,
                    "stage3_gather_16bit_weights_on_model_save": True,
                    "ignore_unused_parameters": False,
                    "memory_efficient_linear": False,
                    "override_module_apply": False,
                    "enable_sanity_checks": True,
                    "leaf_module": {"classes": ["Experts"], "names": ["layers.0"], "name_suffixes": "experts"},
                },
                "communication_data_type": "fp64",
                "gradient_predivide_factor": 4,
            },
            {
                "zero.zero_stage": 3,
                "zero.contiguous_gradients": False,
                "zero.reduce_scatter": False,
                "zero.reduce_bucket_size": 11_000_000,
                "zero.allgather_partitions": False,
                "zero.allgather_bucket_size": 12,
                "zero.overlap_comm": False,
                "zero.load_from_fp32_weights": False,
                "zero.sub_group_size": 13,
                "zero.prefetch_bucket_size": 14,
                "zero.param_persistence_threshold": 15,
                "zero.model_persistence_threshold": 16,
                "zero.max_live_parameters": 17,
                "zero.max_reuse_distance": 18,
                "zero.ignore_unused_parameters": False,
                "zero.memory_efficient_linear": False,
                "zero.override_module_apply": False,
                "zero.enable_sanity_checks": True,
                "zero.leaf_module_classes": ("Experts",),
                "zero.leaf_module_names": ("layers.0",),
                "zero.leaf_module_name_suffixes": ("experts",),
                "zero.communication_data_type": "fp64",
                "zero.prescale_gradients": False,
                "zero.gradient_predivide_factor": 4.0,
                "precision.precision": "fp32",
            },
        ),
        "a stage alone": DeepSpeedFile(
            {"zero_optimization": {"stage": 2}, "prescale_gradients": True},
            {
                "zero.zero_stage": 2,
                "zero.contiguous_gradients": True,
                "zero.reduce_scatter": True,
                "zero.reduce_bucket_size": 500_000_000,
                "zero.allgather_partitions": True,
                "zero.allgather_bucket_size": 500_000_000,
                "zero.overlap_comm": False,
                "zero.load_from_fp32_weights": True,
                "zero.sub_group_size": 1_000_000_000,
                "zero.prefetch_bucket_size": 50_000_000,
                "zero.param_persistence_threshold": 100_000,
                "zero.max_live_parameters": 1_000_000_000,
                "zero.max_reuse_distance": 1_000_000_000,
                "zero.ignore_unused_parameters": True,
                "zero.communication_data_type": "auto",
                "zero.prescale_gradients": True,
            },
        ),
        "stage 3 alone": DeepSpeedFile(
            {"zero_optimization": {"stage": 3}}, {"zero.zero_stage": 3, "zero.overlap_comm": True}
        ),
        "a section without keys": DeepSpeedFile(
            {"zero_optimization": {}}, {"zero.zero_stage": 0, "zero.overlap_comm": False}
        ),
        "a dynamic loss scale": DeepSpeedFile(
            {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,
                    "initial_scale_power": 11,
                    "loss_scale_window": 7,
                    "hysteresis": 4,
                    "consecutive_hysteresis": True,
                    "min_loss_scale": 2,
                }
            },
            {
                "precision.precision": "fp16",
                "precision.loss_scale": None,
                "precision.initial_loss_scale": 2048.0,
                "precision.loss_scale_window": 7,
                "precision.hysteresis": 4,
                "precision.consecutive_hysteresis": True,
                "precision.min_loss_scale": 2.0,
                "precision.accumulate_allreduce_grads_in_fp32": False,
            },
        ),
        "fp16 alone": DeepSpeedFile(
            {"fp16": {"enabled": True}},
            {
                "precision.precision": "fp16",
                "precision.loss_scale": None,
                "precision.initial_loss_scale": 65536.0,
                "precision.loss_scale_window": 1000,
                "precision.hysteresis": 2,
                "precision.min_loss_scale": 1.0,
            },
        ),
        "a constant loss scale": DeepSpeedFile(
            {"fp16": {"enabled": True, "loss_scale": 128}},
            {"precision.precision": "fp16", "precision.loss_scale": 128.0},
        ),
        "sums of bf16 gradients in fp32": DeepSpeedFile(
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            {"precision.precision": "bf16", "precision.accumulate_allreduce_grads_in_fp32": True},
        ),
        "master weights and moments in bf16": DeepSpeedFile(
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            {"precision.precision": "bf16", "precision.bf16_master_weights": True},
        ),
        "skipped steps in bf16": DeepSpeedFile(
            {"bf16": {"enabled": True, "check_grad_overflow": True}},
            {"precision.precision": "bf16", "precision.check_grad_overflow": True},
        ),
        "no skipped steps in bf16": DeepSpeedFile(
            {"bf16": {"enabled": True, "check_grad_overflow": False}},
            {"precision.precision": "bf16", "precision.check_grad_overflow": False},
        ),
        "sums of bf16 gradients in bf16": DeepSpeedFile(
            {"bf16": {"enabled": True}, "fp16": {"enabled": False}, "data_types": {"grad_accum_dtype": "bf16"}},
            {"precision.precision": "bf16", "precision.accumulate_allreduce_grads_in_fp32": False},
        ),
        "every key of checkpointing": DeepSpeedFile(
            {
                "activation_checkpointing": {
                    "partition_activations": False,
                    "cpu_checkpointing": True,
                    "contiguous_memory_optimization": True,
                    "number_checkpoints": 5,
                    "synchronize_checkpoint_boundary": True,
                    "profile": True,
                }
            },
            {
                "activations.partition_activations": False,
                "activations.checkpoint_in_cpu": True,
                "activations.contiguous_checkpointing": True,
                "activations.number_checkpoints": 5,
                "activations.synchronize_each_layer": True,
                "activations.profile_backward": True,
            },
        ),
        "partitioned checkpoints": DeepSpeedFile(
            {"activation_checkpointing": {"partition_activations": True}},
            {"activations.partition_activations": True, "activations.checkpoint_in_cpu": False},
        ),
    }
)


def found_settings(config: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a configuration of either door has for the settings named in `wanted`."""
    parts = {name: name.split(".") for name in wanted}
    return {name: getattr(getattr(config, section), field) for name, (section, field) in parts.items()}
