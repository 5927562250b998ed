"""Tests the tables of keys: each key is in one table, every documented key in some, and defaults are as documented."""

import dataclasses

from support.each import each

from megazero.config.engine_sections import ActivationConfig, ZeroConfig
from megazero.dialects.deepspeed.keys import (
    ACCEPTED,
    ACTIVATION_KEYS,
    ALIASES,
    HONOURED,
    KNOWN,
    PARAMS,
    REFUSED,
    SECTIONS,
    SWITCHED,
    TOP_LEVEL,
    ZERO_KEYS,
)

# DeepSpeed's documented keys of zero_optimization with their defaults, and its aliases.
ZERO = {
    "stage": 0,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": None,
    "load_from_fp32_weights": True,
    "sub_group_size": 1e9,
    "prefetch_bucket_size": 5e7,
    "param_persistence_threshold": 1e5,
    "model_persistence_threshold": 2**63 - 1,
    "max_live_parameters": 1e9,
    "max_reuse_distance": 1e9,
    "ignore_unused_parameters": True,
    "memory_efficient_linear": True,
    "override_module_apply": True,
    "enable_sanity_checks": False,
    "mics_shard_size": -1,
    "mics_hierarchical_params_gather": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
}
ZERO_BESIDE = (
    "elastic_checkpoint offload_param offload_optimizer cpu_offload_param cpu_offload_use_pin_memory cpu_offload"
    " stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold"
    " stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save"
    " stage3_gather_fp16_weights_on_model_save legacy_stage1 round_robin_gradients"
    " pipeline_loading_checkpoint parameter_alignment compute_grad_norm"
    " stage3_module_granularity_threshold log_trace_cache_warnings save_muon_momentum_buffer_in_memory"
)
TOP = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation"
    " optimizer scheduler communication_data_type gradient_allreduce_op prescale_gradients gradient_predivide_factor"
    " sparse_gradients fp16 bf16 bfloat16 torch_autocast amp gradient_clipping zero_optimization aio tensor_parallel"
    " hybrid_engine expert_parallel disable_python_gc steps_per_print wall_clock_breakdown dump_state autotuning"
    " flops_profiler activation_checkpointing sparse_attention data_efficiency curriculum_learning tensorboard wandb"
    " comet csv_monitor comms_logger compression_training checkpoint compile data_types elasticity"
    " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer dataloader_drop_last memory_breakdown pipeline"
    " progressive_layer_drop eigenvalue quantize_training disable_allgather vocabulary_size graph_harvesting"
    " seq_parallel_comm_data_type use_data_before_expert_parallelism nebula weight_quantization timers"
)
OTHERS = {
    "gradient_clipping": 1.0,
    "gradient_allreduce_op": "mean",
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "wandb.enabled": False,
    "tensorboard.enabled": False,
    "tensorboard.job_name": "DeepSpeedJobName",
    "flops_profiler.enabled": False,
    "curriculum_learning.enabled": False,
    "data_efficiency.enabled": False,
    "data_efficiency.data_sampling.enabled": False,
    "data_efficiency.data_sampling.curriculum_learning.enabled": False,
    "wandb.project": "deepspeed",
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "zero_optimization.leaf_module.classes": (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    ),
    "zero_optimization.leaf_module.names": (),
    "zero_optimization.leaf_module.name_suffixes": (),
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_param.max_in_cpu": 1_000_000_000,
    "fp16.enabled": False,
    "fp16.loss_scale": 0.0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.consecutive_hysteresis": False,
    "fp16.min_loss_scale": 1.0,
    "fp16.auto_cast": False,
    "bf16.enabled": False,
    "torch_autocast.enabled": False,
    "torch_autocast.dtype": "bf16",
    "keep_in_fp32": (),  # megazero's own
    "activation_checkpointing.partition_activations": False,
    "activation_checkpointing.cpu_checkpointing": False,
    "activation_checkpointing.contiguous_memory_optimization": False,
    "activation_checkpointing.synchronize_checkpoint_boundary": False,
    "activation_checkpointing.profile": False,
}


def test_a_key_stands_in_one_table() -> None:
    tables = [HONOURED, PARAMS, ALIASES, ACCEPTED, REFUSED, SWITCHED]
    assert sum(len(table) for table in tables) == len(KNOWN)
    assert not SECTIONS & {*HONOURED, *ACCEPTED}
    assert SECTIONS & {*SWITCHED} == {"curriculum_learning", "data_efficiency", "tensorboard", "flops_profiler"}


def test_every_documented_key_is_known() -> None:
    names = {path.split(".")[1] for path in KNOWN if path.startswith("zero_optimization.")}
    assert [name for name in (*ZERO, *ZERO_BESIDE.split()) if name not in names] == []
    assert [name for name in TOP.split() if name not in TOP_LEVEL] == []


def test_absent_keys_have_deepspeeds_defaults() -> None:
    ours = {path: info.default for path, info in HONOURED.items() if info.default is not None}
    theirs = {f"zero_optimization.{name}": value for name, value in ZERO.items() if value is not None} | OTHERS
    assert ours == theirs


def test_every_setting_of_zero_has_its_key() -> None:
    """Every setting has a key but one for pipelines, which DeepSpeed does not combine with partitioned parameters.

    Pinning and the folder of files have several keys, and DeepSpeed shares states out between memory and files in one
    way only, and updates none late.  Its section of error feedback has keys of other names, and the forms of quantized
    numbers, and hops of all collectives, have none.
    """
    fields = {field.name for field in dataclasses.fields(ZeroConfig)}
    assert set(ZERO_KEYS) == fields - {
        "zero3_reshard_after",
        "offload_pin_memory",
        "nvme_path",
        "offload_optimizer_nvme_ratio",
        "delayed_parameter_update",
        "delayed_parameter_update_start",
        "num_distributed_optimizer_instances",
        "hierarchical_collectives",
        "zero_quantized_weights_bits",
        "zero_quantized_gradients_bits",
        "zero_quantized_block_size",
        "zero_quantized_stochastic",
        "zero_error_feedback",
        "zero_error_feedback_beta",
        "zero_error_feedback_reset",
        "zero_error_feedback_saved",
        "offload_gradients_nvme",
    }
    assert all(path in HONOURED for path in ZERO_KEYS.values())


def test_settings_of_activations_have_their_keys() -> None:
    """Every setting has a key but those that choose what is recomputed, which a DeepSpeed file leaves to the model."""
    fields = {field.name for field in dataclasses.fields(ActivationConfig)}
    rest = {"recompute_granularity", "recompute_method", "recompute_num_layers", "logits_chunk_bytes"}
    assert set(ACTIVATION_KEYS) == fields - rest and all(path in HONOURED for path in ACTIVATION_KEYS.values())
    assert HONOURED["activation_checkpointing.number_checkpoints"].default is None


@each("path", ALIASES)
def test_an_alias_names_a_key(path: str) -> None:
    target = ALIASES[path]
    assert target in {*HONOURED, *ACCEPTED, *REFUSED, *SECTIONS} and target not in ALIASES


def test_every_answer_gives_a_reason() -> None:
    reasons = [*ACCEPTED.values(), *(refused.reason for refused in REFUSED.values())]
    assert all([*reasons, *(switched.reason for switched in SWITCHED.values())])
    assert all(refused.off for refused in REFUSED.values())
