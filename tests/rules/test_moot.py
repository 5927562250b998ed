"""Every setting without effect is reported, by the programs and by the library; the same one with an effect is not."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import yaml
from support.configs import SMALL, make_run
from support.each import each

from megazero.command_line.parse import ParsedRun, parse
from megazero.config.presets import ZERO_CONFIGS
from megazero.config.run import FIELDS
from megazero.config.yaml_file import to_yaml
from megazero.dialects.megatron import PUBLISHED, SHORTHANDS
from megazero.errors import ConfigError, Problem
from megazero.library.config import EngineConfig, load_engine_config
from megazero.rules.moot import ALONE, LIBRARY, RUN, SHARED, on_one_process

Settings = Mapping[str, Any]
INFO = {info.name: info for info in FIELDS}
ERROR, NOTICE = "error", "notice"


class Case(NamedTuple):
    """A setting, what its flag leads to where it has no effect, and other settings that make it moot or effective."""

    setting: str
    value: Any
    flag_earns: str
    moot: Settings
    works: Settings


STAGE_3: Settings = {"zero_stage": 3}
IN_FILES: Settings = {"offload_optimizer": "nvme", "nvme_path": "/tmp"}
INCREASE: Settings = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.01, "end_weight_decay": 0.1}
FP16: Settings = {"precision": "fp16"}
BF16: Settings = {"precision": "bf16"}
FP8: Settings = {**BF16, "fp8_format": "hybrid"}
DELAYED: Settings = {"fp8_recipe": "delayed"}
FULL: Settings = {"recompute_granularity": "full"}
STATIC: Settings = {**FP16, "loss_scale": 8}
LOADED: Settings = {"load": "ckpt"}
OWN_CORPORA: Settings = {"mock_data": False, "train_data_path": ["a"], "valid_data_path": ["b"]}
CUT: Settings = {"curriculum_learning": True}
CURRICULUM: Settings = {**CUT, "curriculum_steps": 5}
LISTED: Settings = {
    **{"curriculum_schedule": "fixed_discrete", "curriculum_seqlens": ["8", "16"]},
    "curriculum_last_steps": ["4"],
}
FIM: Settings = {"mock_data": False, "data_path": ["a"], "fim_data": True}
GROUPS: Settings = {
    "mock_data": False,
    "train_weighted_split_paths": ["t: 1 0:1 a"],
    "valid_weighted_split_paths": ["v: 1 0:1 b"],
}
CORPUS: Settings = {"mock_data": False, "data_path": ["0.5", "a", "0.5", "b"]}
REMOTE: Settings = {"mock_data": False, "data_path": ["0.5", "s3://bucket/a", "0.5", "s3://bucket/b"]}
ROPE: Settings = {"position_embedding_type": "rope"}
PARALLEL: Settings = {"tensor_model_parallel_size": 2}

# Cases of sections that the library has too.
SHARED_CASES = (
    Case("prefetch_bucket_size", 100, ERROR, {}, STAGE_3),
    Case("prefetch_bucket_size", 100, ERROR, {**STAGE_3, "overlap_comm": False}, STAGE_3),
    Case("allgather_bucket_size", 900, ERROR, {"zero_stage": 0}, {"zero_stage": 1}),
    Case("allgather_bucket_size", 900, ERROR, {"zero_stage": 2, "allgather_partitions": False}, {"zero_stage": 2}),
    Case("param_persistence_threshold", 100, ERROR, {"zero_stage": 2}, STAGE_3),
    Case("param_persistence_threshold", 100, ERROR, {**STAGE_3, "model_persistence_threshold": 0}, STAGE_3),
    Case(
        "model_persistence_threshold",
        100,
        ERROR,
        {"zero_stage": 0},
        {**STAGE_3, "param_persistence_threshold": 9},
    ),
    Case("model_persistence_threshold", 100, ERROR, STAGE_3, {**STAGE_3, "param_persistence_threshold": 9}),
    Case("max_live_parameters", 5, ERROR, {}, STAGE_3),
    Case("max_reuse_distance", 5, ERROR, {"zero_stage": 2}, STAGE_3),
    Case("memory_efficient_linear", False, ERROR, {}, STAGE_3),
    Case("enable_sanity_checks", True, ERROR, {}, STAGE_3),
    Case("allgather_partitions", False, ERROR, {"zero_stage": 0}, {"zero_stage": 1}),
    Case("allgather_partitions", False, ERROR, STAGE_3, {**STAGE_3, "param_persistence_threshold": 9}),
    Case("offload_optimizer", "cpu", ERROR, {"offload_optimizer_ratio": 0.0}, {}),
    Case("offload_optimizer_ratio", 0.5, ERROR, {}, {"offload_optimizer": "cpu"}),
    Case("mics_shard_size", 1, ERROR, {"zero_stage": 0}, {}),
    Case("num_distributed_optimizer_instances", 2, ERROR, {"zero_stage": 0}, {}),
    Case("zero_hpz_partition_size", 2, ERROR, {"zero_stage": 2}, STAGE_3),
    Case("zero_quantized_weights", True, ERROR, {"zero_stage": 2}, STAGE_3),
    Case("mics_hierarchical_params_gather", True, ERROR, {"hierarchical_collectives": True}, {}),
    Case("zero_quantized_weights_bits", 4, ERROR, STAGE_3, {**STAGE_3, "zero_quantized_weights": True}),
    *(
        Case(name, value, ERROR, {}, {"zero_quantized_gradients": True})
        for name, value in (
            ("zero_quantized_gradients_bits", 8),
            ("zero_error_feedback", True),
            ("zero_quantized_block_size", 64),
            ("zero_quantized_stochastic", True),
        )
    ),
    *(
        Case(
            name,
            value,
            ERROR,
            {"zero_quantized_gradients": True},
            {"zero_quantized_gradients": True, "zero_error_feedback": True},
        )
        for name, value in (
            ("zero_error_feedback_beta", 0.5),
            ("zero_error_feedback_reset", 9),
            ("zero_error_feedback_saved", False),
        )
    ),
    Case("delayed_parameter_update", True, ERROR, {}, {"offload_optimizer": "cpu"}),
    Case(
        "delayed_parameter_update_start",
        5,
        ERROR,
        {"offload_optimizer": "cpu"},
        {"offload_optimizer": "cpu", "delayed_parameter_update": True},
    ),
    Case("offload_pin_memory", False, ERROR, STAGE_3, {**STAGE_3, "offload_param": "cpu"}),
    *(
        Case(name, value, ERROR, {"offload_optimizer": "cpu"}, IN_FILES)
        for name, value in (
            ("offload_optimizer_nvme_ratio", 0.5),
            ("offload_gradients_nvme", True),
            ("offload_buffer_count", 9),
            ("offload_pipeline_read", False),
            ("offload_pipeline_write", False),
            ("aio_block_size", 8192),
            ("aio_queue_depth", 3),
        )
    ),
    Case("offload_param_buffer_count", 2, ERROR, STAGE_3, {**STAGE_3, "offload_param": "nvme", "nvme_path": "/tmp"}),
    Case("offload_param_max_in_cpu", 9, ERROR, STAGE_3, {**STAGE_3, "offload_param": "nvme", "nvme_path": "/tmp"}),
    Case("nvme_path", "/tmp", ERROR, {}, {"offload_optimizer": "nvme"}),
    Case("loss_scale", 8.0, NOTICE, BF16, FP16),
    Case("initial_loss_scale", 4.0, NOTICE, {}, FP16),
    Case("min_loss_scale", 2.0, NOTICE, BF16, FP16),
    Case("loss_scale_window", 9, NOTICE, {}, FP16),
    Case("hysteresis", 3, NOTICE, {"precision": "fp64"}, FP16),
    Case("consecutive_hysteresis", True, ERROR, {}, FP16),
    Case("initial_loss_scale", 4.0, NOTICE, STATIC, FP16),
    Case("min_loss_scale", 2.0, NOTICE, STATIC, FP16),
    Case("loss_scale_window", 9, NOTICE, STATIC, FP16),
    Case("hysteresis", 3, NOTICE, STATIC, FP16),
    Case("consecutive_hysteresis", True, ERROR, STATIC, FP16),
    Case("max_skipped_steps_at_min_loss_scale", 5, ERROR, {}, STATIC),
    Case("max_skipped_steps_at_min_loss_scale", 5, ERROR, BF16, {"communication_data_type": "fp16"}),
    Case("max_skipped_steps_at_min_loss_scale", 7, ERROR, BF16, {"check_grad_overflow": True}),
    Case("check_grad_overflow", True, ERROR, FP16, BF16),
    Case("bf16_master_weights", True, ERROR, FP16, BF16),
    Case("tf32", True, ERROR, BF16, {}),
    Case("tf32", True, ERROR, {"precision": "fp64"}, {"precision": "fp32"}),
    Case("accumulate_allreduce_grads_in_fp32", True, NOTICE, {}, BF16),
    Case("accumulate_allreduce_grads_in_fp32", True, NOTICE, {"precision": "fp64"}, FP16),
)
RUN_CASES = (
    Case("zero3_reshard_after", "window", ERROR, {"zero_stage": 2}, STAGE_3),
    Case("load_from_fp32_weights", False, ERROR, BF16, {**BF16, **LOADED, "finetune": True}),
    Case("load_from_fp32_weights", False, ERROR, {**BF16, **LOADED}, {**BF16, **LOADED, "no_load_optim": True}),
    Case("load_from_fp32_weights", False, ERROR, {**LOADED, "finetune": True}, {**FP16, **LOADED, "finetune": True}),
    Case("recompute_method", "block", NOTICE, {}, FULL),
    Case("recompute_num_layers", 2, NOTICE, {"recompute_granularity": "selective"}, FULL),
    Case("partition_activations", True, NOTICE, PARALLEL, {**PARALLEL, **FULL}),
    Case("partition_activations", "auto", NOTICE, {}, FULL),
    Case("partition_activations", True, NOTICE, FULL, {**PARALLEL, **FULL}),
    Case("partition_activations", True, NOTICE, {**PARALLEL, **FULL, "sequence_parallel": True}, {**PARALLEL, **FULL}),
    Case("checkpoint_in_cpu", True, NOTICE, {"recompute_granularity": "selective"}, FULL),
    Case("contiguous_checkpointing", True, ERROR, {}, FULL),
    Case("number_checkpoints", 3, ERROR, FULL, {**FULL, "contiguous_checkpointing": True}),
    Case(
        "number_checkpoints",
        3,
        ERROR,
        {**FULL, "contiguous_checkpointing": True, "checkpoint_in_cpu": True},
        {**FULL, "contiguous_checkpointing": True, "checkpoint_in_cpu": "auto"},
    ),
    Case("synchronize_each_layer", True, NOTICE, {}, FULL),
    Case("synchronize_each_layer", True, NOTICE, {**FULL, "device": "cpu"}, {**FULL, "device": "cuda"}),
    Case("profile_backward", True, NOTICE, {"recompute_granularity": "selective"}, FULL),
    Case("eval_interval", 5, NOTICE, {"eval_iters": 0}, {"eval_iters": 1}),
    Case("eval_at_start", True, ERROR, {"eval_iters": 0}, {}),
    Case("compile_num_layers", 2, ERROR, {"compile": "off"}, {"compile": "on"}),
    Case("compile_num_layers", 2, ERROR, {"device": "cpu"}, {"device": "cuda"}),
    Case("compile_num_layers", 2, ERROR, {"ledger": True, "metrics_file": "run.jsonl"}, {}),
    Case("compile_num_layers", 2, ERROR, PARALLEL, {"compile": "on"}),
    Case("compile_num_layers", 2, ERROR, {"recompute_granularity": "selective"}, {"compile": "on"}),
    Case("compile_num_layers", 2, ERROR, FULL, {**FULL, "recompute_num_layers": 2}),
    Case("enable_cuda_graph", True, ERROR, {"device": "cpu"}, {"device": "cuda"}),
    Case("attention_backend", "flash3", NOTICE, {"device": "cpu"}, {"device": "cuda"}),
    Case("fp8_cache_weights", True, ERROR, BF16, FP8),
    Case("fp8_cache_weights", True, ERROR, {**FP8, **DELAYED, **STAGE_3}, {**FP8, **DELAYED}),
    Case("fp8_recipe", "delayed", ERROR, BF16, FP8),
    Case("fp8_margin", 1, ERROR, {**FP8, "fp8_recipe": "tensorwise"}, {**FP8, **DELAYED}),
    Case(
        "fp8_amax_history_len",
        9,
        ERROR,
        {**FP8, "fp8_recipe": "tensorwise"},
        {**FP8, **DELAYED, "fp8_amax_compute_algo": "max"},
    ),
    Case("fp8_amax_history_len", 9, ERROR, {**FP8, **DELAYED}, {**FP8, **DELAYED, "fp8_amax_compute_algo": "max"}),
    Case("fp8_amax_compute_algo", "max", ERROR, {**FP8, **DELAYED}, {**FP8, **DELAYED, "fp8_amax_history_len": 9}),
    Case("compile", "max", ERROR, {"device": "cpu"}, {"device": "cuda"}),
    Case("attention_backend", "efficient", NOTICE, {"device": "cpu"}, {"device": "cuda"}),
    Case("attention_backend", "flash", NOTICE, {"device": "cpu"}, {"device": "cpu", "attention_dropout": 0}),
    Case("tf32", True, ERROR, {"device": "cpu"}, {"device": "cuda"}),
    Case(
        "offload_pin_memory",
        False,
        ERROR,
        {"device": "cpu", "offload_optimizer": "cpu"},
        {"device": "cuda", "offload_optimizer": "cpu"},
    ),
    Case("deterministic_mode", True, NOTICE, {"device": "cpu"}, {"device": "cuda"}),
    Case("min_lr", 1e-5, NOTICE, {"lr_decay_style": "constant"}, {"lr_decay_style": "cosine"}),
    Case("lr_decay_iters", 9, NOTICE, {"lr_decay_style": "constant"}, {}),
    Case("min_lr", 1e-5, NOTICE, {"lr_decay_style": "LRRangeTest"}, {"lr_decay_style": "OneCycle"}),
    Case("lr_decay_iters", 9, NOTICE, {"lr_decay_style": "OneCycle"}, {}),
    Case("lr_decay_samples", 90, NOTICE, {"lr_decay_style": "constant"}, {}),
    Case("lr_decay_tokens", 900, NOTICE, {"lr_decay_style": "OneCycle"}, {}),
    Case("lr_warmup_samples", 2, ERROR, {"lr_decay_style": "OneCycle"}, {}),
    Case("lr_warmup_tokens", 2, ERROR, {"lr_decay_style": "LRRangeTest"}, {}),
    Case("lr_warmup_iters", 2, ERROR, {"lr_decay_style": "OneCycle"}, {}),
    Case("lr_warmup_fraction", 0.1, ERROR, {"lr_decay_style": "LRRangeTest"}, {}),
    Case("lr_decay_params", ["cycle_first_step_size=9"], ERROR, {}, {"lr_decay_style": "OneCycle"}),
    Case("adam_beta1", 0.8, NOTICE, {"lr_decay_style": "OneCycle"}, {"lr_decay_style": "LRRangeTest"}),
    Case(
        "lr_decay_iters",
        9,
        NOTICE,
        {"lr_decay_style": "constant", "lr_warmup_iters": 2},
        {"lr_decay_style": "constant", "lr_warmup_fraction": 0.1},
    ),
    Case("lr_warmup_init", 1e-5, NOTICE, {}, {"lr_warmup_iters": 2}),
    Case("lr_warmup_init", 2e-5, NOTICE, {}, {"lr_warmup_tokens": 20}),
    Case("lr_warmup_type", "log", ERROR, {"lr_warmup_fraction": 0}, {"lr_warmup_fraction": 0.1}),
    Case("weight_decay", 0.5, NOTICE, {"optimizer": "rprop"}, {"optimizer": "sgd"}),
    Case("weight_decay", 0.5, NOTICE, INCREASE, {}),
    Case("decoupled_lr", 0.5, ERROR, {"lr_decay_style": "OneCycle"}, {}),
    Case("decoupled_min_lr", 0.1, ERROR, {}, {"decoupled_lr": 0.5}),
    Case("decoupled_min_lr", 0.1, ERROR, {"decoupled_lr": 0.5, "lr_decay_style": "constant"}, {"decoupled_lr": 0.5}),
    Case("start_weight_decay", 0.5, ERROR, {}, {**INCREASE, "end_weight_decay": 0.5}),
    Case("end_weight_decay", 0.5, ERROR, {}, {**INCREASE, "start_weight_decay": 0.0}),
    Case("weight_decay_incr_style", "cosine", ERROR, {**INCREASE, "optimizer": "rprop"}, INCREASE),
    Case("lr_wsd_decay_iters", 3, ERROR, {}, {"lr_decay_style": "WSD"}),
    Case("lr_wsd_decay_samples", 3, ERROR, {}, {"lr_decay_style": "WSD"}),
    Case("lr_wsd_decay_style", "cosine", ERROR, {}, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3}),
    Case("adam_beta1", 0.5, NOTICE, {"optimizer": "sgd"}, {"optimizer": "nadam"}),
    Case("adam_beta2", 0.5, NOTICE, {"optimizer": "rmsprop"}, {"optimizer": "radam"}),
    Case("adam_eps", 0.5, NOTICE, {"optimizer": "rmsprop"}, {"optimizer": "adamax"}),
    Case("sgd_momentum", 0.5, NOTICE, {}, {"optimizer": "sgd"}),
    Case("adam_beta2", 0.5, NOTICE, {"optimizer": "lion"}, {"optimizer": "adam"}),
    Case("lion_beta1", 0.5, ERROR, {}, {"optimizer": "lion"}),
    Case("lion_beta1", 0.5, ERROR, {"optimizer": "lion", "lr_decay_style": "OneCycle"}, {"optimizer": "lion"}),
    Case("lion_beta2", 0.5, ERROR, {}, {"optimizer": "lion"}),
    Case("override_opt_param_scheduler", True, NOTICE, {}, LOADED),
    Case("use_checkpoint_opt_param_scheduler", True, NOTICE, {}, LOADED),
    Case("no_load_optim", True, NOTICE, {}, LOADED),
    Case("strict_load", True, ERROR, {}, LOADED),
    Case("strict_load", True, ERROR, {"load": "runs/step_0000002"}, LOADED),
    Case("override_opt_param_scheduler", True, NOTICE, {**LOADED, "finetune": True}, LOADED),
    Case("no_load_optim", True, NOTICE, {**LOADED, "finetune": True}, LOADED),
    Case("begin_without_checkpoint", True, ERROR, {}, LOADED),
    Case("begin_without_checkpoint", True, ERROR, {**LOADED, "finetune": True}, LOADED),
    Case("begin_without_checkpoint", True, ERROR, {"load": "ckpt", "save": "x/../ckpt"}, {**LOADED, "save": "other"}),
    Case("save_interval", 5, NOTICE, {}, {"save": "ckpt"}),
    Case("keep_last", 5, ERROR, {}, {"save": "ckpt"}),
    Case("keep_every", 5, ERROR, {}, {"save": "ckpt"}),
    Case("no_save_optim", True, NOTICE, {}, {"save": "ckpt"}),
    Case("async_save", True, NOTICE, {}, {"save": "ckpt"}),
    Case("sequence_parallel", True, NOTICE, {}, PARALLEL),
    Case("allow_tensor_parallel_across_nodes", True, ERROR, {}, PARALLEL),
    Case("rank_order", "dp-pp-tp", ERROR, {}, {"pipeline_model_parallel_size": 2}),
    Case("rank_order", "tp-pp-dp", ERROR, {"pipeline_model_parallel_size": 2}, PARALLEL),
    Case("rank_order", "pp-tp-dp", ERROR, {}, PARALLEL),
    Case("cpu_threads", 2, ERROR, {"device": "cuda"}, {"device": "auto"}),
    Case("cpu_threads", 2, ERROR, {**STAGE_3, "device": "cuda"}, {**STAGE_3, "device": "cuda", "offload_param": "cpu"}),
    Case("split", "90,5,5", NOTICE, {}, CORPUS),
    Case("split", "90,5,5", NOTICE, OWN_CORPORA, CORPUS),
    Case("mmap_bin_files", False, NOTICE, {}, OWN_CORPORA),
    Case("mmap_bin_files", False, NOTICE, REMOTE, CORPUS),
    Case("zero_quantized_nontrainable_weights", True, ERROR, STAGE_3, {**STAGE_3, "lora_rank": 2, "load": "base"}),
    Case("lora_alpha", 4.0, ERROR, {}, {"lora_rank": 2, "load": "base"}),
    Case("lora_dropout", 0.1, ERROR, {}, {"lora_rank": 2, "load": "base"}),
    Case("lora_targets", ("linear_qkv",), ERROR, {}, {"lora_rank": 2, "load": "base"}),
    Case("lora_random_base", True, ERROR, {}, {"lora_rank": 2}),
    Case("answer_loss_mask", "on", ERROR, {}, CORPUS),
    Case("data_cache_path", "cache", NOTICE, {}, REMOTE),
    Case("data_cache_path", "cache", NOTICE, OWN_CORPORA, {**OWN_CORPORA, "valid_data_path": ["s3://bucket/b"]}),
    Case("tiktoken_pattern", "v1", NOTICE, {}, {"tokenizer_type": "TikTokenizer"}),
    Case("tiktoken_num_special_tokens", 9, ERROR, {}, {"tokenizer_type": "TikTokenizer"}),
    Case(
        "tiktoken_num_special_tokens",
        9,
        ERROR,
        {"tokenizer_type": "TikTokenizer", "tiktoken_pattern": "llama3"},
        {"tokenizer_type": "TikTokenizer", "tiktoken_pattern": "v1"},
    ),
    Case("vocab_file", "v", NOTICE, {}, {"tokenizer_type": "GPT2BPETokenizer"}),
    Case("merge_file", "m", NOTICE, {"tokenizer_type": "ByteTokenizer"}, {"tokenizer_type": "GPT2BPETokenizer"}),
    Case(
        "tokenizer_model",
        "t",
        NOTICE,
        {"tokenizer_type": "GPT2BPETokenizer"},
        {"tokenizer_type": "SentencePieceTokenizer"},
    ),
    Case("tensorboard_queue_size", 5, NOTICE, {}, {"tensorboard_dir": "tb"}),
    Case("tensorboard_log_interval", 5, NOTICE, {}, {"tensorboard_dir": "tb"}),
    Case("log_timers_to_tensorboard", True, NOTICE, {}, {"metrics_file": "m.jsonl"}),
    *(
        Case(f"wandb_{name}", value, NOTICE if name != "group" else ERROR, {}, {"wandb_project": "p"})
        for name, value in {"exp_name": "n", "entity": "e", "group": "g", "save_dir": "d"}.items()
    ),
    Case("mlflow_run_name", "n", ERROR, {}, {"mlflow_experiment": "e"}),
    Case("mlflow_tracking_uri", "sqlite:///db", ERROR, {}, {"mlflow_experiment": "e"}),
    Case("log_memory_to_tensorboard", True, NOTICE, {"metrics_file": "m.jsonl"}, {"wandb_project": "p"}),
    Case("timing_log_option", "all", NOTICE, {}, {"timing_log_level": 1}),
    Case("timing_log_option", "max", NOTICE, {}, {"log_timers_to_tensorboard": True, "metrics_file": "m.jsonl"}),
    Case("log_memory_to_tensorboard", True, NOTICE, {}, {"tensorboard_dir": "tb"}),
    Case("log_validation_ppl_to_tensorboard", True, NOTICE, {}, {"tensorboard_dir": "tb"}),
    *(
        Case(setting, value, NOTICE, {}, {"profile": True, "tensorboard_dir": "tb"})
        for setting, value in {
            "profile_step_start": 11,
            "profile_step_end": 20,
            "profile_ranks": ["0", "00"],
            "use_pytorch_profiler": True,
        }.items()
    ),
    Case("profile", True, ERROR, {"device": "cpu"}, {"device": "cuda"}),
    Case("record_memory_history", True, NOTICE, {"device": "cuda"}, {"device": "cuda", "profile": True}),
    Case(
        "record_memory_history",
        True,
        NOTICE,
        {"device": "cpu", "profile": True, "use_pytorch_profiler": True, "tensorboard_dir": "tb"},
        {"profile": True},
    ),
    Case("memory_snapshot_path", "m.pickle", NOTICE, {}, {"profile": True, "record_memory_history": True}),
    Case("log_layer_grad_norms", True, ERROR, {}, {"metrics_file": "m.jsonl"}),
    Case("log_optimizer_states_to_tensorboard", True, NOTICE, {}, {"metrics_file": "m.jsonl"}),
    Case(
        "log_validation_ppl_to_tensorboard",
        True,
        NOTICE,
        {"tensorboard_dir": "tb", "eval_iters": 0},
        {"tensorboard_dir": "tb"},
    ),
    Case("eval_sample_tokens", 8, ERROR, {}, {"tokenizer_type": "ByteTokenizer"}),
    Case(
        "eval_sample_tokens",
        8,
        ERROR,
        {"tokenizer_type": "ByteTokenizer", "eval_iters": 0},
        {"tokenizer_type": "ByteTokenizer"},
    ),
    Case("tensorboard", True, ERROR, {"ledger_limit": 64}, {"save": "ckpt"}),
    Case("tensorboard", True, ERROR, {}, {"tensorboard_dir": "tb"}),  # a file's, and a flag's that names the folder
    Case("log_timers_to_tensorboard", True, NOTICE, {"save": "ckpt"}, {"save": "ckpt", "tensorboard": True}),
    Case("rotary_base", 5e5, NOTICE, {}, ROPE),
    Case("rotary_percent", 0.5, NOTICE, {}, ROPE),
    Case("rotary_seq_len_interpolation_factor", 2.0, NOTICE, {"position_embedding_type": "alibi"}, ROPE),
    Case("use_rope_scaling", True, ERROR, {}, ROPE),
    Case("rope_scaling_factor", 4.0, ERROR, ROPE, {**ROPE, "use_rope_scaling": True}),
    Case("make_vocab_size_divisible_by", 64, NOTICE, {"pad_vocab_size_to": 128}, {}),
    Case("split", "9,1,0", NOTICE, GROUPS, CORPUS),
    *(
        Case(f"fim_{name}", value, NOTICE, CORPUS, {**CORPUS, **fim})
        for fim in ({"fim_data": True, "fim_split_sample": "<file>"},)
        for name, value in (
            *(("rate", 0.2), ("spm_rate", 0.2), ("split_sample", "<f>"), ("fragment_rate", 0.2), ("no_prefix", "#")),
            *((f"{sign}_token", "<x>") for sign in ("prefix", "middle", "suffix", "pad", "eod")),
        )
    ),
    *(
        Case(name, value, ERROR, {}, {**(CUT if schedule is LISTED else CURRICULUM), **schedule})
        for name, value, schedule in (
            ("curriculum_schedule", "fixed_root", {}),
            ("curriculum_min_seqlen", 4, {}),
            ("curriculum_max_seqlen", 8, {}),
            ("curriculum_steps", 9, {}),
            ("curriculum_seqlen_step", 4, {}),
            ("curriculum_root_degree", 3, {"curriculum_schedule": "fixed_root"}),
            ("curriculum_seqlens", ["8", "16"], LISTED),
            ("curriculum_last_steps", ["5"], LISTED),
        )
    ),
    Case("curriculum_root_degree", 3, ERROR, CURRICULUM, {**CURRICULUM, "curriculum_schedule": "fixed_root"}),
    Case("curriculum_steps", 9, ERROR, {**CUT, **LISTED}, CURRICULUM),
    Case("curriculum_seqlens", ["8", "16"], ERROR, CURRICULUM, {**CUT, **LISTED}),
    Case("fim_fragment_rate", 0.2, NOTICE, FIM, {**FIM, "fim_split_sample": "<f>"}),
    Case("num_query_groups", 2, NOTICE, {}, {"group_query_attention": True}),
    Case("add_qkv_bias", True, ERROR, {}, {"disable_bias_linear": True}),
    Case("reset_position_ids", True, ERROR, {"position_embedding_type": "none"}, {}),
    Case("ledger", True, ERROR, {}, {"metrics_file": "run.jsonl"}),
    Case("ledger_dir", "pictures", ERROR, {}, {"ledger": True}),
    Case("ledger_dir", "pictures", ERROR, {"metrics_file": "run.jsonl"}, {"ledger_limit": 64}),
)
CASES = (*SHARED_CASES, *RUN_CASES)

# Settings whose effect no other setting takes away.
_EFFECTIVE = """
num_layers hidden_size num_attention_heads seq_length max_position_embeddings ffn_hidden_size vocab_size
lora_rank hidden_dropout attention_dropout init_method_std norm_epsilon
untie_embeddings_and_output_weights kv_channels group_query_attention position_embedding_type normalization
qk_layernorm embed_layernorm swiglu squared_relu disable_bias_linear
micro_batch_size global_batch_size train_iters train_samples train_tokens seed
rampup_batch_size step_batch_size_schedule skip_train_iteration_range eval_iters
exit_interval exit_duration_in_mins kill_switch_path trigger_path
exit_status_when_stopped optimizer optimizer_params param_groups lr lr_decay_style
clip_grad precision
tensor_model_parallel_size pipeline_model_parallel_size
distributed_backend distributed_timeout_minutes device zero_stage
distributed_join_timeout_minutes distributed_timeout_seconds_after_init
reduce_bucket_size overlap_comm contiguous_gradients ignore_unused_parameters
sub_group_size communication_data_type gradient_predivide_factor recompute_granularity logits_chunk_bytes
train_weighted_split_paths valid_weighted_split_paths test_weighted_split_paths pad_vocab_size_to fim_data
data_path train_data_path valid_data_path test_data_path data_skip_samples mock_data tokenizer_type num_workers
eod_mask_loss reset_attention_mask save load log_interval metrics_file tensorboard_dir
ledger_limit pipeline_trace_dir log_params_norm log_num_zeros_in_grad check_for_nan_in_loss_and_grad timing_log_level
wandb_project mlflow_experiment curriculum_learning
"""
EFFECTIVE = frozenset(_EFFECTIVE.split())
# Settings that other rules refuse where they cannot take effect.
_REFUSED_ELSEWHERE = """
num_layers_per_virtual_pipeline_stage pipeline_schedule pipeline_split fp8_format finetune offload_param
"""
REFUSED_ELSEWHERE = frozenset(_REFUSED_ELSEWHERE.split())


UNREAD: Mapping[str, object] = MappingProxyType(
    {
        "override_module_apply": False,
        "leaf_module_classes": ["Experts"],
        "leaf_module_names": ["layers.0"],
        "leaf_module_name_suffixes": ["experts"],
    }
)


def words(settings: Settings) -> Iterator[str]:
    """Yield the settings as words of a command line; a switch that is on by default is --no-NAME."""
    for name, value in settings.items():
        info = INFO[name]
        if value is False and info.default is True:
            yield f"--no-{info.flag.removeprefix('--')}"
        elif value is not False:
            yield info.flag
            yield from [] if value is True else map(str, value) if isinstance(value, list) else [str(value)]


def run(settings: Settings, *more: str, world_size: int | None = None) -> ParsedRun:
    return parse([*words({**SMALL, **settings}), *more], world_size=world_size)


def from_file(folder: Path, settings: Settings, *more: str) -> ParsedRun:
    (folder / "run.yaml").write_text(yaml.safe_dump({**SMALL, **settings}))
    return parse(["--config", str(folder / "run.yaml"), *more])


def problems(error: pytest.ExceptionInfo[ConfigError]) -> list[Problem]:
    return list(error.value.problems)


def name_of(case: Case) -> str:
    return f"{case.setting} {case.value} with {dict(case.moot)}"


# --- a run -----------------------------------------------------------------------------------------------------------


@each("case", CASES, ids=name_of)
def test_a_moot_flag_is_told_and_an_effective_one_is_not(case: Case) -> None:
    moot, works = {**case.moot, case.setting: case.value}, {**case.works, case.setting: case.value}
    (flag, *_) = words({case.setting: case.value})
    if case.flag_earns == NOTICE:
        mine = [notice for notice in run(moot).notices if notice.startswith(flag)]
        assert len(mine) == 1 and ": moot here, because " in mine[0]
    with pytest.raises(ConfigError) as caught:
        run(moot, *(["--strict"] if case.flag_earns == NOTICE else []))
    (problem,) = (problem for problem in problems(caught) if problem.given.startswith(flag))
    assert problem.rule.startswith("it has no effect here: ") and "leave it out" in problem.legal
    assert run(works, "--strict").notices == ()


@each("case", CASES, ids=name_of)
def test_the_remedy_is_one(case: Case) -> None:
    """Each remedy that a message names removes the problem; any path serves for a folder or file that it names."""
    with pytest.raises(ConfigError) as caught:
        run({**case.moot, case.setting: case.value}, "--strict")
    (flag, *_) = words({case.setting: case.value})
    (problem,) = (problem for problem in problems(caught) if problem.given.startswith(flag))
    for way in problem.legal.removesuffix("leave it out").removesuffix("or ").split(", "):
        if not way:
            continue
        try:
            parse([*words({**SMALL, **case.moot, case.setting: case.value}), *way.split(), "--strict"])
        except ConfigError as error:
            assert problem not in error.problems


@each("case", CASES, ids=name_of)
def test_a_file_of_megazeros_own_has_no_moot_setting(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, {**case.moot, case.setting: case.value})
    assert f"{tmp_path}/run.yaml: {case.setting}: " in "".join(problem.given for problem in problems(caught))
    assert from_file(tmp_path, {**case.works, case.setting: case.value}).notices == ()


def test_there_are_many_cases() -> None:
    assert len({name_of(case) for case in CASES}) == len(CASES) >= 60


@each("setting", UNREAD)
def test_what_no_run_reads(setting: str) -> None:
    for stage in range(4):
        with pytest.raises(ConfigError) as caught:
            run({setting: UNREAD[setting], "zero_stage": stage})
        assert [problem.legal for problem in problems(caught)] == ["leave it out"]


def test_every_setting_is_decided_on() -> None:
    table = {name for row in (*RUN, *SHARED, *ALONE) for name in row.settings}
    assert table | EFFECTIVE | REFUSED_ELSEWHERE == set(INFO)
    assert not table & EFFECTIVE and not table & REFUSED_ELSEWHERE and not EFFECTIVE & REFUSED_ELSEWHERE
    assert {case.setting for case in CASES} | {*ALONE[0].settings, *UNREAD} == table


def test_published_flags_are_flags_of_settings_that_can_be_moot() -> None:
    table = {name for row in (*RUN, *SHARED) for name in row.settings}
    spelt = {name for info in FIELDS if info.name in table for name in (info.flag.removeprefix("--"), *info.aliases)}
    spelt |= {f"no-{INFO[name].flag.removeprefix('--')}" for name in table if INFO[name].default is True}
    assert set(PUBLISHED) - spelt == set() and not set(PUBLISHED) & set(SHORTHANDS)


def test_the_spelling_of_a_flag_tells_whose_it_is() -> None:
    assert "only layers that are recomputed whole" in run({}, "--contigious-checkpointing").notices[0]
    with pytest.raises(ConfigError, match="it has no effect here"):
        run({}, "--contiguous-checkpointing")
    (notice,) = run({}, "--use-tp-pp-dp-mapping").notices
    assert notice.startswith("--use-tp-pp-dp-mapping: moot here, because with --tensor-model-parallel-size 1 and")


def test_a_default_asks_for_nothing(tmp_path: Path) -> None:
    given = {"hysteresis": 2, "max_live_parameters": 1_000_000_000, "split": None, "mmap_bin_files": True}
    assert from_file(tmp_path, given, "--strict").notices == ()
    assert run({"initial_loss_scale": 2**32}, "--strict").notices == ()


def test_a_preset_is_never_wrong() -> None:
    for name in ZERO_CONFIGS:
        notices = run({}, "--zero-config", name, "--strict", "--recompute-granularity", "none").notices
        assert notices and all(notice.startswith(f"--zero-config {name}: ") for notice in notices)
    assert run({}, "--zero-config", "C1", "--strict").notices == ()
    (notice,) = run({}, "--zero-config", "C4").notices
    assert notice == (
        "--zero-config C4: partition_activations True: moot here, because with --tensor-model-parallel-size 1 there is"
        " nothing to split over"
    )


def test_the_configuration_that_a_run_saves_loads_again(tmp_path: Path) -> None:
    parsed = run({"hysteresis": 3, "min_lr": 1e-5, "lr_decay_style": "constant"}, "--zero-config", "C2")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(parsed.config))
    again = parse(["--config", str(file), "--strict"])
    assert again.config == parsed.config
    names = [notice.removeprefix(f"{file}: ").split(":")[0] for notice in again.notices]
    assert sorted(names) == ["hysteresis", "min_lr", "partition_activations"]
    file.write_text(to_yaml(make_run(zero_stage=3, prefetch_bucket_size=9)))
    assert parse(["--config", str(file), "--strict"]).notices == ()
    (notice,) = parse(["--config", str(file), "--zero-stage", "1"]).notices
    assert notice == f"{file}: prefetch_bucket_size: 9: moot here, because ZeRO stage 1 keeps parameters whole"


@pytest.mark.parametrize("setting", ["reduce_scatter", "allgather_partitions", "prescale_gradients"])
def test_one_data_parallel_process_earns_a_notice(setting: str) -> None:
    settings = {setting: not INFO[setting].default}
    (notice,) = run(settings, world_size=1).notices
    assert "one data-parallel process exchanges no gradients" in notice
    assert run({**settings, "tensor_model_parallel_size": 2}, world_size=2).notices == (notice,)
    assert run(settings, "--strict", world_size=2).notices == run(settings, "--strict").notices == ()
    with pytest.raises(ConfigError):
        run(settings, "--strict", world_size=1)


def test_strict_is_a_flag_that_is_true_or_false(tmp_path: Path) -> None:
    assert len(run({"hysteresis": 3}, "--strict", "--strict", "false").notices) == 1
    for given, rule in (("--strict maybe", "--strict is true or false"), ("--strict 1 2", "--strict is true or false")):
        with pytest.raises(ConfigError) as caught:
            run({}, *given.split())
        assert [(problem.given, problem.rule) for problem in problems(caught)] == [(given, rule)]
    (tmp_path / "run.yaml").write_text("strict: true\n")
    with pytest.raises(ConfigError, match="a flag of the command line only"):
        run({}, "--config", str(tmp_path / "run.yaml"))


def test_a_setting_that_depends_on_an_invalid_one_is_passed_over() -> None:
    with pytest.raises(ConfigError) as caught:
        run({"zero_stage": 9, "prefetch_bucket_size": 4})
    assert [problem.given for problem in problems(caught)] == ["--zero-stage 9"]
    with pytest.raises(ConfigError) as caught:
        load_engine_config({"zero": {"zero_stage": 9, "prefetch_bucket_size": 4}})
    assert [problem.given for problem in problems(caught)] == ["config: zero.zero_stage: 9"]


# --- a DeepSpeed configuration ---------------------------------------------------------------------------------------

DEEPSPEED = {
    "zero_optimization": {
        "stage": 2,
        "stage3_prefetch_bucket_size": 100,
        "stage3_max_reuse_distance": 7,
        "stage3_max_live_parameters": "auto",
    },
    "fp16": {"enabled": True, "loss_scale": 64, "hysteresis": 4},
}


def test_deepspeeds_keys_earn_notices_at_both_doors(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED))
    told = ("stage3_prefetch_bucket_size: 100", "stage3_max_reuse_distance: 7", "hysteresis: 4")
    for notices in (run({}, "--deepspeed-config", str(file)).notices, load_engine_config(DEEPSPEED).notices):
        moot = [notice for notice in notices if ": moot here, because " in notice]
        assert len(moot) == len(told) and all(any(f"{name}: moot" in notice for notice in moot) for name in told)
    with pytest.raises(ConfigError) as caught:
        run({}, "--deepspeed-config", str(file), "--strict")
    assert len(problems(caught)) == len(told)


def test_deepspeeds_defaults_are_not_told(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "loss_scale": 64}}')
    parsed = run({}, "--deepspeed-config", str(file), "--strict")
    assert parsed.config.zero.prefetch_bucket_size == 50_000_000 and parsed.notices == ()
    foreign = load_engine_config({"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0})
    assert foreign.notices == () and load_engine_config(foreign) == foreign


# --- the library -----------------------------------------------------------------------------------------------------


def mapping(settings: Settings) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        sections.setdefault(INFO[name].section, {})[name] = value
    return sections


LIBRARY_CASES = (
    *SHARED_CASES,
    Case("number_checkpoints", 3, ERROR, {}, {"contiguous_checkpointing": True}),
    Case(
        "number_checkpoints",
        3,
        ERROR,
        {"contiguous_checkpointing": True, "checkpoint_in_cpu": True},
        {"contiguous_checkpointing": True},
    ),
)


@each("case", LIBRARY_CASES, ids=name_of)
def test_the_library_tells_the_same(case: Case) -> None:
    info = INFO[case.setting]
    content = mapping({"zero_stage": 1, **case.moot, case.setting: case.value})
    with pytest.raises(ConfigError) as caught:
        load_engine_config(content)
    (problem,) = (problem for problem in problems(caught) if f"{info.section}.{case.setting}: " in problem.given)
    assert problem.rule.startswith("it has no effect here: ") and "leave it out" in problem.legal
    made = EngineConfig(**{name: _section(name, values) for name, values in content.items()})
    with pytest.raises(ConfigError) as caught:
        load_engine_config(made)
    assert problem in problems(caught)
    assert load_engine_config(mapping({"zero_stage": 1, **case.works, case.setting: case.value})).notices == ()


def _section(name: str, values: Settings) -> Any:
    kind: Any = type(getattr(EngineConfig(), name))
    paths = {setting: Path(value) for setting, value in values.items() if INFO[setting].kind == "path"}
    return kind(**values | paths)


def test_what_a_model_decides_for_itself() -> None:
    for setting, value in (
        ("recompute_granularity", "full"),
        ("logits_chunk_bytes", 9),
        ("zero3_reshard_after", "window"),
        ("fp8_format", "hybrid"),
        ("fp8_cache_weights", True),
        ("fp8_recipe", "delayed"),
        ("fp8_margin", 1),
        ("fp8_amax_history_len", 2),
        ("fp8_amax_compute_algo", "max"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_engine_config(mapping({"zero_stage": 3, "precision": "bf16", setting: value}))
        assert [problem.legal for problem in problems(caught)] == ["leave it out"]
    named = {name for row in LIBRARY for name in row.settings if "." not in name}
    assert named <= {*INFO, "update_unused_parameters", "steps_per_print"}


CYCLE: Settings = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}


@each(
    ("optimizer", "scheduler", "given"),
    [
        ({"lr": 0.5}, {"type": "WarmupLR"}, "config: optimizer.lr: 0.5"),
        ({"type": "SGD", "lr": 0.1, "params": {"dampening": 0.5}}, None, "config: optimizer.params.dampening: 0.5"),
        (
            {"type": "Adam", "lr": 0.1, "params": {"decoupled_weight_decay": True}},
            None,
            "config: optimizer.params.decoupled_weight_decay: true",
        ),
        ({"lr": 0.5}, {"type": "LRRangeTest"}, "config: optimizer.lr: 0.5"),
        ({"lr": 0.5}, {"type": "OneCycle", "params": CYCLE}, "config: optimizer.lr: 0.5"),
        (
            {},
            {"type": "OneCycle", "params": {**CYCLE, "decay_lr_rate": 0.5}},
            "config: scheduler.params.decay_lr_rate: 0.5",
        ),
        (
            {},
            {"type": "OneCycle", "params": {**CYCLE, "decay_step_size": 5}},
            "config: scheduler.params.decay_step_size: 5",
        ),
        (
            {},
            {"type": "OneCycle", "params": {**CYCLE, "cycle_momentum": False, "cycle_max_mom": 0.95}},
            "config: scheduler.params.cycle_max_mom: 0.95",
        ),
        (
            {"lr": 0.5},
            {"type": "constant", "params": {"lr_warmup_type": "log"}},
            'config: scheduler.params.lr_warmup_type: "log"',
        ),
    ],
)
def test_optimizers_that_do_not_read_a_parameter(optimizer: Settings, scheduler: Any, given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config({"zero": {}, "optimizer": optimizer, "scheduler": scheduler})
    assert [problem.given for problem in problems(caught)] == [given]


@each(
    ("optimizer", "scheduler"),
    [
        ({"lr": 0.5}, {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}),
        ({"lr": 0.5}, {"type": "WarmupCosineLR", "params": {"total_num_steps": 2000}}),
        ({}, {"type": "OneCycle", "params": {**CYCLE, "decay_step_size": 5, "decay_lr_rate": 0.5}}),
        ({"lr": 0.5}, {"type": "constant", "params": {"lr_warmup_type": "log", "lr_warmup_iters": 9}}),
        ({"type": "SGD", "lr": 0.1, "params": {"dampening": 0.5, "momentum": 0.5}}, None),
        ({"type": "Adam", "lr": 0.1, "params": {"decoupled_weight_decay": True, "weight_decay": 0.1}}, None),
    ],
)
def test_optimizers_that_read_it(optimizer: Settings, scheduler: Any) -> None:
    assert load_engine_config({"zero": {}, "optimizer": optimizer, "scheduler": scheduler}).notices == ()


@pytest.mark.parametrize(
    ("settings", "words", "reason"),
    [
        ({"optimizer": "sgd", "sgd_momentum": 0}, ["dampening=0.5"], "without momentum nothing is dampened"),
        ({"optimizer": "nadam", "weight_decay": 0}, ["decoupled_weight_decay=true"], "there is no weight decay"),
        ({"weight_decay": 0}, ["amsgrad=true", "decoupled_weight_decay=no"], "there is no weight decay"),
    ],
    ids=str,
)
def test_a_run_reads_the_same_parameters(settings: Settings, words: list[str], reason: str, tmp_path: Path) -> None:
    settings = {**settings, "optimizer_params": words}
    with pytest.raises(ConfigError) as caught:
        run(settings)
    (problem,) = problems(caught)
    assert words[-1] in problem.given and problem.rule == f"it has no effect here: {reason}"
    with pytest.raises(ConfigError, match=reason):
        from_file(tmp_path, settings)
    effective = {name: value for name, value in settings.items() if value != 0}
    assert run(effective, "--strict").notices == ()
    assert run({**settings, "optimizer_params": [word.partition("=")[0] + "=auto" for word in words]}).notices == ()


def test_a_run_reads_the_same_parameters_of_a_cycle() -> None:
    settings = {"lr_decay_style": "OneCycle", "lr_decay_params": ["decay_lr_rate=0.5", "cycle_first_step_size=9"]}
    with pytest.raises(ConfigError) as caught:
        run(settings)
    (problem,) = problems(caught)
    assert problem.given.startswith("decay_lr_rate=0.5 in --lr-decay-params")
    assert problem.rule == "it has no effect here: with decay_step_size 0 nothing decays"
    words = [*settings["lr_decay_params"], "decay_step_size=3"]
    assert run({**settings, "lr_decay_params": words}, "--strict").notices == ()


def test_deepspeeds_parameters_earn_the_same_notice_at_both_doors(tmp_path: Path) -> None:
    content = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "dampening": 0.5}}, "gradient_clipping": 1}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    settings = {name: value for name, value in SMALL.items() if name != "lr"}
    (notice,) = parse([*words(settings), "--deepspeed-config", str(tmp_path / "ds.json")]).notices
    (other,) = load_engine_config(content).notices
    reason = other.partition("because ")[2]
    assert notice == f"{tmp_path}/ds.json: optimizer: dampening=0.5: moot here, because {reason}"


def test_a_schedule_with_its_own_peak_says_so_of_a_deepspeed_rate() -> None:
    content = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25}},
        "gradient_clipping": 0,
    }
    (notice,) = load_engine_config(content).notices
    assert notice == (
        "config: optimizer.params.lr: 0.5: moot here, because WarmupLR sets the learning rate, up to warmup_max_lr 0.25"
    )


def test_a_parameter_that_is_written_with_its_default_asks_for_nothing() -> None:
    clip = {"gradient_clipping": 0}
    content = {"optimizer": {"type": "SGD", "params": {"dampening": 0}}, "scheduler": {"type": "constant"}, **clip}
    assert load_engine_config(content).notices == ()
    (notice,) = load_engine_config({"optimizer": {"type": "SGD", "params": {"dampening": 0.5}}, **clip}).notices
    assert notice == "config: optimizer.params.dampening: 0.5: moot here, because without momentum nothing is dampened"


def test_what_an_optimizer_does_not_take_names_what_it_takes() -> None:
    with pytest.raises(ConfigError) as caught:
        run({"optimizer": "rmsprop", "sgd_momentum": 0.5}, "--strict")
    (problem,) = problems(caught)
    assert "--optimizer rmsprop takes --weight-decay, --optimizer-params alpha=... eps=... momentum=" in problem.rule
    assert problem.legal == "--optimizer sgd, or leave it out"


def test_the_library_on_one_process() -> None:
    config = load_engine_config({"zero": {"prescale_gradients": True}})
    (notice,) = on_one_process(config, sums=False)
    assert notice.startswith("zero.prescale_gradients: true: moot here, because one data-parallel process")
    (notice,) = on_one_process(load_engine_config({}), sums=True)
    assert notice.startswith('gradient_allreduce_op: "sum": moot here')
    assert on_one_process(load_engine_config({}), sums=False) == ()
