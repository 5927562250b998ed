"""The tables of DeepSpeed's keys, each of which is honoured, accepted with a notice, or refused.

A key is a dotted path, `zero_optimization.stage`.  An *honoured* key has a value that megazero uses; its legal values
and DeepSpeed's default are given here.  An *accepted* key would change nothing in megazero, and causes a one-line
notice.  A *refused* key requests an effect that megazero doesn't have, unless its value turns the effect off.  A
*switched* key is a section with a switch such as `enabled`: its other keys are read if one is true and the section has
any that are honoured, and it is refused then if it has none.  Keys of `optimizer.params` and
`scheduler.params` depend on the type beside them; their tables are config/optimizers.py and config/schedules.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from megazero.config.curriculum import CurriculumConfig
from megazero.config.engine_sections import SETTINGS, ActivationConfig, ZeroConfig
from megazero.config.fields import FieldInfo


def key(path: str, kind: str, default: Any, *, choices: tuple[str, ...] = (), **bounds: float) -> FieldInfo:
    """Return the description of a key that has no setting of the same name; default None: it has no value."""
    section, _, name = path.rpartition(".")
    limits = tuple(bounds.items())
    return FieldInfo(section, name, kind, choices, default, False, "", "", (), "", limits, optional=default is None)


# --- honoured --------------------------------------------------------------------------------------------------------

# {key of `zero_optimization`: DeepSpeed's default}; the legal values are those of the settings of the same name.
_ZERO_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "stage": 0,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500_000_000,
        "allgather_partitions": True,
        "allgather_bucket_size": 500_000_000,
        "overlap_comm": None,  # true in stage 3, false below
        "load_from_fp32_weights": True,
        "sub_group_size": 1_000_000_000,
        "prefetch_bucket_size": 50_000_000,
        "param_persistence_threshold": 100_000,
        "model_persistence_threshold": 2**63 - 1,
        "max_live_parameters": 1_000_000_000,
        "max_reuse_distance": 1_000_000_000,
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
)
_LEAVES = MappingProxyType(
    {f"leaf_module_{name}": f"zero_optimization.leaf_module.{name}" for name in ("classes", "names", "name_suffixes")}
)
# {setting: the key of the section of what is offloaded}; the defaults are the same but for one.
_OFFLOADED = MappingProxyType(
    {
        "offload_optimizer": "zero_optimization.offload_optimizer.device",
        "offload_optimizer_ratio": "zero_optimization.offload_optimizer.ratio",
        "offload_param": "zero_optimization.offload_param.device",
        "offload_param_max_in_cpu": "zero_optimization.offload_param.max_in_cpu",
    }
)
_MAX_IN_CPU = 1_000_000_000
# {setting: the key of files}; left out, the settings have defaults of their own, since no result depends on them.
_FILES = MappingProxyType(
    {
        "offload_buffer_count": "zero_optimization.offload_optimizer.buffer_count",
        "offload_pipeline_read": "zero_optimization.offload_optimizer.pipeline_read",
        "offload_pipeline_write": "zero_optimization.offload_optimizer.pipeline_write",
        "offload_param_buffer_count": "zero_optimization.offload_param.buffer_count",
        "aio_block_size": "aio.block_size",
        "aio_queue_depth": "aio.queue_depth",
    }
)
# {a key of the time before those sections: the setting and the value that it stands for where it is true}
OLD_OFFLOAD: Mapping[str, str] = MappingProxyType(
    {
        "zero_optimization.cpu_offload": "offload_optimizer",
        "zero_optimization.cpu_offload_param": "offload_param",
    }
)
# {key of error feedback: its setting}; its section turns it on.
ERROR_FEEDBACK_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "zero_optimization.zeropp_loco_param.err_beta": "zero_error_feedback_beta",
        "zero_optimization.zeropp_loco_param.reset_T": "zero_error_feedback_reset",
    }
)
# The keys of the folder of files.
NVME_KEYS = ("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path")
# The keys that pin host memory, which is pinned for all that is offloaded or for none.
PIN_KEYS = (
    "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_param.pin_memory",
    "zero_optimization.cpu_offload_use_pin_memory",
)
_FORMATS = ("fp64", "fp32", "bf16", "fp16")
# The ways in which the gradients of the data-parallel processes become one.
REDUCTIONS = ("mean", "sum")
# The formats of torch.autocast; fp16 has a loss scale.
AUTOCAST = ("bf16", "fp16")

# {field of ZeroConfig: the key it comes from}
ZERO_KEYS: Mapping[str, str] = MappingProxyType(
    {
        **{("zero_stage" if name == "stage" else name): f"zero_optimization.{name}" for name in _ZERO_DEFAULTS},
        **_LEAVES,
        **_OFFLOADED,
        **_FILES,
        "communication_data_type": "communication_data_type",
        "prescale_gradients": "prescale_gradients",
        "gradient_predivide_factor": "gradient_predivide_factor",
    }
)


def _zero_keys() -> dict[str, FieldInfo]:
    fields = {info.name: info for info in SETTINGS[ZeroConfig]}
    same = {**_LEAVES, **_OFFLOADED}
    defaults = {field: fields[field].default for field in same} | dict.fromkeys(_FILES)
    defaults |= {"offload_param_max_in_cpu": _MAX_IN_CPU}
    defaults |= {
        field: _ZERO_DEFAULTS[path.rpartition(".")[2]]
        for field, path in ZERO_KEYS.items()
        if "." in path and field not in defaults
    }
    return {
        ZERO_KEYS[field]: replace(
            fields[field],
            section=ZERO_KEYS[field].rpartition(".")[0],
            default=default,
            optional=default is None or field in _OFFLOADED,
        )
        for field, default in defaults.items()
    }


# {field of ActivationConfig: the key it comes from}; the defaults are the same.
ACTIVATION_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "partition_activations": "activation_checkpointing.partition_activations",
        "checkpoint_in_cpu": "activation_checkpointing.cpu_checkpointing",
        "contiguous_checkpointing": "activation_checkpointing.contiguous_memory_optimization",
        "number_checkpoints": "activation_checkpointing.number_checkpoints",
        "synchronize_each_layer": "activation_checkpointing.synchronize_checkpoint_boundary",
        "profile_backward": "activation_checkpointing.profile",
    }
)

# {field of PrecisionConfig: the key it comes from}; DeepSpeed's loss scale 0 means a dynamic one, whose first value is
# given as a power of 2.
PRECISION_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "loss_scale": "fp16.loss_scale",
        "initial_loss_scale": "fp16.initial_scale_power",
        "min_loss_scale": "fp16.min_loss_scale",
        "loss_scale_window": "fp16.loss_scale_window",
        "hysteresis": "fp16.hysteresis",
        "consecutive_hysteresis": "fp16.consecutive_hysteresis",
    }
)

# {setting of a run: the key it comes from}
BATCH_KEYS: Mapping[str, str] = MappingProxyType(
    {"global_batch_size": "train_batch_size", "micro_batch_size": "train_micro_batch_size_per_gpu"}
)


def _activation_keys() -> dict[str, FieldInfo]:
    fields = {info.name: info for info in SETTINGS[ActivationConfig]}
    return {path: fields[field] for field, path in ACTIVATION_KEYS.items()}


# The two sections that may hold a curriculum by sequence length: an older one, and a metric of data_efficiency's.
METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
CURRICULA = ("curriculum_learning", f"{METRICS}.seqlen_truncate")
# The switches of the second, all of which are on where it has an effect.
EFFICIENCY_SWITCHES = tuple(
    f"data_efficiency{part}.enabled" for part in ("", ".data_sampling", ".data_sampling.curriculum_learning")
)
# {setting of a curriculum: the key in its section}
CURRICULUM_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "curriculum_min_seqlen": "min_difficulty",
        "curriculum_max_seqlen": "max_difficulty",
        "curriculum_schedule": "schedule_type",
        "curriculum_steps": "schedule_config.total_curriculum_step",
        "curriculum_seqlen_step": "schedule_config.difficulty_step",
        "curriculum_root_degree": "schedule_config.root_degree",
        "curriculum_seqlens": "schedule_config.difficulty",
        "curriculum_last_steps": "schedule_config.max_step",
    }
)


def _curriculum_keys() -> Iterator[FieldInfo]:
    fields = {info.name: info for info in SETTINGS[CurriculumConfig]}
    for place in CURRICULA:
        for setting, path in CURRICULUM_KEYS.items():
            section, _, name = f"{place}.{path}".rpartition(".")
            yield replace(fields[setting], section=section, name=name, default=None, optional=True)
    yield key("curriculum_learning.enabled", "bool", False)
    yield key("curriculum_learning.curriculum_type", "str", None, choices=("seqlen",))
    yield key(f"{CURRICULA[1]}.difficulty_type", "str", None, choices=("value",))
    yield key(f"{CURRICULA[1]}.clustering_type", "str", None, choices=("single_cluster",))
    yield from (key(path, "bool", False) for path in EFFICIENCY_SWITCHES)


HONOURED: Mapping[str, FieldInfo] = MappingProxyType(
    _zero_keys()
    | _activation_keys()
    | {
        f"{info.section}.{info.name}" if info.section else info.name: info
        for info in (
            key("train_batch_size", "int", None, ge=1),
            key("train_micro_batch_size_per_gpu", "int", None, ge=1),
            key("gradient_accumulation_steps", "int", None, ge=1),
            key("gradient_clipping", "float", 1.0, ge=0),
            key("steps_per_print", "int", 10, ge=1),
            key("wall_clock_breakdown", "bool", False),
            key("wandb.enabled", "bool", False),
            key("wandb.project", "str", "deepspeed"),
            key("wandb.team", "str", None),
            key("wandb.group", "str", None),
            key("gradient_allreduce_op", "str", "mean", choices=REDUCTIONS),
            key("communication_data_type", "str", None, choices=_FORMATS),
            key("prescale_gradients", "bool", False),
            key("gradient_predivide_factor", "float", 1.0, gt=0),
            key("optimizer.type", "str", None),
            key("scheduler.type", "str", None),
            key("data_types.grad_accum_dtype", "str", None, choices=_FORMATS),
            key("data_types.buffer_dtype", "str", None, choices=("fp32", "bf16", "fp16")),
            key("keep_in_fp32", "list", ()),  # megazero's own
            key("bf16.enabled", "bool", False),
            key("bf16.check_grad_overflow", "bool", None),
            key("bf16.bf16_master_weights_and_grads", "bool", None),
            key("bf16.bf16_optimizer_states", "bool", None),
            key("torch_autocast.enabled", "bool", False),
            key("torch_autocast.dtype", "str", "bf16", choices=AUTOCAST),
            *_curriculum_keys(),
            key("tensorboard.enabled", "bool", False),
            key("tensorboard.output_path", "str", None),
            key("tensorboard.job_name", "str", "DeepSpeedJobName"),
            key("flops_profiler.enabled", "bool", False),
            key("fp16.enabled", "bool", False),
            key("fp16.loss_scale", "float", 0.0, ge=0),
            key("fp16.initial_scale_power", "int", 16, ge=0, le=127),
            key("fp16.loss_scale_window", "int", 1000, ge=1),
            key("fp16.hysteresis", "int", 2, ge=1),
            key("fp16.consecutive_hysteresis", "bool", False),
            key("fp16.min_loss_scale", "float", 1.0, ge=0),
            key("fp16.auto_cast", "bool", False),
            *(key(path, "bool", None) for path in (*OLD_OFFLOAD, *PIN_KEYS)),
            *(key(path, "str", None) for path in NVME_KEYS),
            key("zero_optimization.zeropp_loco_param.err_beta", "float", None, ge=0, lt=1),
            key("zero_optimization.zeropp_loco_param.reset_T", "int", None, ge=1),
        )
    }
)

# Sections whose keys depend on the type beside them.
PARAMS = ("optimizer.params", "scheduler.params")

_STAGE3 = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters"
    " max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold"
    " use_all_reduce_for_fetch_params allgather_sequential partition_stream_chunk_size"
)
# {other spelling: the key}
ALIASES: Mapping[str, str] = MappingProxyType(
    {f"zero_optimization.stage3_{name}": f"zero_optimization.{name}" for name in _STAGE3.split()}
    | {
        f"zero_optimization.{prefix}gather_fp16_weights_on_model_save": (
            "zero_optimization.gather_16bit_weights_on_model_save"
        )
        for prefix in ("stage3_", "")
    }
    | {"bfloat16": "bf16", "fp16.fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads"}
)


# --- accepted --------------------------------------------------------------------------------------------------------


def _paths(rows: Iterable[tuple[str, str, str]]) -> Mapping[str, str]:
    """Return {path: text} from rows of (text, section, names separated by blanks)."""
    return MappingProxyType(
        {f"{section}.{name}" if section else name: text for text, section, names in rows for name in names.split()}
    )


_NO_CUT = "a configuration does not cut a model into pipeline stages"
_WHOLE_SEQUENCES = "attention sees whole sequences"
_STREAMS = "it chooses how a gather moves its bytes, and here every gather is one all-gather into place"

ACCEPTED: Mapping[str, str] = _paths(
    (
        ("reports are the program's own", "", "log_level dump_state"),
        ("wall_clock_breakdown times the parts of a step, and nothing else is timed", "", "memory_breakdown timers"),
        ("any optimizer that works element by element runs under ZeRO", "", "zero_allow_untested_optimizer"),
        ("an optimizer whose home is host memory is torch's own there too", "", "zero_force_ds_cpu_optimizer"),
        ("each of queue_depth requests has a thread of its own", "aio", "thread_count intra_op_parallelism"),
        ("a thread makes one request at a time", "aio", "single_submit overlap_events"),
        ("the caller's data loader decides", "", "dataloader_drop_last"),
        ("the model has its vocabulary", "", "vocabulary_size"),
        ("Python's garbage collector is left as it is", "", "disable_python_gc"),
        (_WHOLE_SEQUENCES, "", "seq_parallel_comm_data_type"),
        ("there are no experts", "", "use_data_before_expert_parallelism"),
        ("there is one implementation of each optimizer", "optimizer", "legacy_fusion"),
        ("samples come in the run's own order", "data_efficiency", "seed"),
        ("samples come in the program's order", "data_efficiency.data_sampling", "num_epochs num_workers pin_memory"),
        ("nothing is clustered", "data_efficiency.data_sampling.curriculum_learning", "data_cluster_path"),
        ("rows are cut wherever they come from", CURRICULA[1], "index_to_sample_path index_to_metric_path"),
        (
            "model FLOPs are counted for the model as a whole",
            "flops_profiler",
            "recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        ),
        ("it chooses a kernel", "fp16", "fused_mode"),
        ("levels are apex's, and fp16.enabled alone chooses the format", "fp16", "opt_level"),
        (
            "bf16 reaches as far as fp32, so that no loss is scaled",
            "bf16",
            "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale",
        ),
        ("a bucket is reduced as soon as it is complete", "bf16", "immediate_grad_update"),
        ("communication_data_type narrows gradients", "torch_autocast", "lower_precision_safe_modules"),
        (
            "every bucket is already cut into equal slices for all ranks",
            "zero_optimization",
            "round_robin_gradients use_multi_rank_bucket_allreduce",
        ),
        (
            "every checkpoint fits every layout, and a process reads its own part of it",
            "zero_optimization",
            "elastic_checkpoint pipeline_loading_checkpoint",
        ),
        ("every checkpoint fits every layout", "checkpoint", "load_universal"),
        ("all processes agree on a checkpoint's name before it is published", "checkpoint", "tag_validation"),
        ("every process writes its own part", "checkpoint", "parallel_write"),
        ("the global gradient norm is always computed", "zero_optimization", "compute_grad_norm"),
        ("a unit of gathering is a whole module already", "zero_optimization", "module_granularity_threshold"),
        (
            "save_16bit_model gathers what it writes, unit by unit, wherever it is called",
            "zero_optimization",
            "gather_16bit_weights_on_model_save",
        ),
        (_STREAMS, "zero_optimization", "use_all_reduce_for_fetch_params allgather_sequential"),
        ("nothing is cached that could warn", "zero_optimization", "log_trace_cache_warnings"),
        ("there is no Muon", "zero_optimization", "save_muon_momentum_buffer_in_memory"),
        (
            "moments begin as zeros, which are not written before the first step",
            "zero_optimization.offload_optimizer",
            "fast_init",
        ),
        ("a buffer is as large as a bucket's partition", "zero_optimization.offload_param", "buffer_size"),
        (_NO_CUT, "pipeline", "partition seed_layers pipe_partitioned grad_partitioned use_reentrant"),
        (
            "a configuration does not split a model",
            "tensor_parallel",
            "preset_model partition_config tp_overlap_comm vocab_parallel_lm_head",
        ),
    )
)


# --- refused ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """A key whose effect megazero lacks: the reason, the values that turn it off, and a legal alternative."""

    reason: str
    off: tuple[Any, ...] = (False, None)
    legal: str = ""


_MASTERS = "moments have the master weights' format, and squares of small gradients are 0 in fp16"
_RECOMPUTE = (
    "what is recomputed is the model's choice: pretrain_gpt.py has --recompute-granularity, a model of one's own calls"
    " megazero.recompute"
)

REFUSED: Mapping[str, Refused] = MappingProxyType(
    {
        "aio.use_gds": Refused("files of states come to host memory, where they are updated"),
        "zero_optimization.zenflow": Refused("an update waits for all gradients of its step"),
        "zero_optimization.legacy_stage1": Refused("there is one implementation of every ZeRO stage"),
        "zero_optimization.parameter_alignment": Refused("parameters lie in their bucket without gaps"),
        "zero_optimization.partition_stream_chunk_size": Refused(
            "a parameter is made whole before it is partitioned", (0, None), "partition_stream_chunk_size: 0"
        ),
        "fp16.fp16_master_weights_and_grads": Refused(
            _MASTERS, legal="bf16.enabled with bf16_master_weights_and_grads and bf16_optimizer_states"
        ),
        "data_types.param_dtype": Refused("parameters have the format of fp16.enabled and bf16.enabled", (None,)),
        "checkpoint.use_node_local_storage": Refused("a checkpoint is one folder that all processes see"),
        "pipeline.stages": Refused(
            f"{_NO_CUT}; pretrain_gpt.py has --pipeline-model-parallel-size", (1, None), "stages: 1"
        ),
        "pipeline.activation_checkpoint_interval": Refused(_RECOMPUTE, (0,), "activation_checkpoint_interval: 0"),
        "tensor_parallel.autotp_size": Refused(
            "a configuration does not split a model; pretrain_gpt.py has --tensor-model-parallel-size",
            (0, 1),
            "autotp_size: 0",
        ),
        "sequence_parallel_size": Refused(_WHOLE_SEQUENCES, (1, None)),
        "managed_gradient_accumulation": Refused(
            "the engine counts micro-batches itself", (True,), "managed_gradient_accumulation: true"
        ),
        "disable_allgather": Refused("updated parameters are always published"),
        "sparse_gradients": Refused("gradients are dense"),
        "sparse_attention": Refused("attention is the model's own", (None, {})),
        "graph_harvesting": Refused("kernels are not captured in graphs"),
        "weight_quantization": Refused("there is no quantization", (None, {})),
    }
)


SWITCHES = ("enabled", "deepcompile")


@dataclass(frozen=True)
class Switched:
    """A section that is refused if a switch in it is true; `names` are its legal keys, () if any key is legal."""

    reason: str
    names: tuple[str, ...] = ()
    legal: str = ""


def _switched(reason: str, names: str = "", legal: str = "") -> Switched:
    return Switched(reason, ("enabled", *names.split()) if names else (), legal)


_CURRICULUM = "samples keep their order, and every layer computes all tokens of a row"
_CURRICULUM_SWITCH = "the curriculum is one by sequence length"
_TRACKER = "reports go to the program's own writers"
_COMPRESSION = "weights keep their values and number format"

SWITCHED: Mapping[str, Switched] = MappingProxyType(
    {
        "tensorboard": _switched(_TRACKER, "output_path job_name", "pretrain_gpt.py has --tensorboard-dir"),
        "comet": _switched(
            _TRACKER, "workspace project samples_log_interval experiment_name api_key experiment_key online mode"
        ),
        "csv_monitor": _switched(_TRACKER, "output_path job_name", "pretrain_gpt.py has --metrics-file"),
        "comms_logger": _switched(
            "bytes of every collective are counted anyway, and nothing more",
            "verbose prof_all debug prof_ops",
            "pretrain_gpt.py has --metrics-file",
        ),
        "flops_profiler": _switched(
            "there is no profiler hook; run the program under torch.profiler or nsys",
            "recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        ),
        "autotuning": _switched("nothing is tuned; every size is given"),
        "elasticity": _switched("the batch does not change with the number of processes"),
        "amp": _switched("apex is not used; fp16.enabled and bf16.enabled set the precision"),
        "curriculum_learning": _switched(_CURRICULUM_SWITCH),
        "data_efficiency": _switched(_CURRICULUM_SWITCH),
        "data_efficiency.data_routing": _switched(_CURRICULUM),
        "progressive_layer_drop": _switched("every layer runs in every step", "theta gamma"),
        "compression_training": _switched(_COMPRESSION),
        "quantize_training": _switched(_COMPRESSION),
        "eigenvalue": _switched(_COMPRESSION),
        "hybrid_engine": _switched("the engine trains; generation is a program of its own"),
        "expert_parallel": _switched("there are no experts"),
        "nebula": _switched("checkpoints have one format, written by the processes themselves"),
        "compile": _switched(
            "the program compiles its model; compile block by block", legal="pretrain_gpt.py has --compile"
        ),
    }
)

# All keys that may stand in a file; sections are the beginnings of the paths.
KNOWN: frozenset[str] = frozenset((*HONOURED, *PARAMS, *ALIASES, *ACCEPTED, *REFUSED, *SWITCHED))
SECTIONS: frozenset[str] = frozenset(
    path[:end] for path in KNOWN for end, character in enumerate(path) if character == "."
)
TOP_LEVEL: frozenset[str] = frozenset(path.partition(".")[0] for path in KNOWN)
