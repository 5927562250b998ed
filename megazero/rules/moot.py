"""Finds settings that have no effect in their configuration, by one table for runs and for the library.

A setting is *moot* if, because of other settings, no value of it would change what happens.  A value equal to the
setting's default requests nothing, given or not, and is passed over; so runs and the library agree, also on sections
that were made in Python.  A number that is never reached (an interval longer than the run) has its stated effect and is
not moot; neither is a value that "auto" would have become.

The outcome for a moot setting depends on the source of its value (`config/origin.py`).  In megazero's own terms it is
an error.  From a DeepSpeed configuration, or by a flag that published Megatron scripts carry, it is a notice, and an
error under --strict.  From a preset or the configuration that a run has saved it is a notice.  A setting that is moot
because the job has one data-parallel process is a notice at most, since the same configuration also serves larger jobs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

from megazero.config import derived
from megazero.config.choices import OptimizerChoice, SchedulerChoice, changed_params
from megazero.config.corpora import corpus_words
from megazero.config.curriculum import DISCRETE, CurriculumConfig
from megazero.config.engine_sections import ActivationConfig, PrecisionConfig, ReportConfig, ZeroConfig
from megazero.config.optimizers import DECOUPLED, OPTIMIZERS, RUN_NAMES, run_settings
from megazero.config.origin import Origin
from megazero.config.run import FIELDS, RunConfig
from megazero.config.schedules import RATE_SETTINGS
from megazero.config.validate import Unknown
from megazero.config.values import Diagnostics, ParsedValue, shown
from megazero.errors import Problem
from megazero.rules.files import TOKENIZER_FILES, weight_of
from megazero.rules.optimizer import choose_for_run, sweep_for_run


class SharedSections(Protocol):
    """The sections that a run's configuration and the library's have in common."""

    @property
    def zero(self) -> ZeroConfig: ...
    @property
    def precision(self) -> PrecisionConfig: ...
    @property
    def activations(self) -> ActivationConfig: ...
    @property
    def reports(self) -> ReportConfig: ...
    @property
    def curriculum(self) -> CurriculumConfig: ...


class LibrarySections(SharedSections, Protocol):
    """The sections of the library's configuration."""

    @property
    def optimizer(self) -> OptimizerChoice | None: ...
    @property
    def scheduler(self) -> SchedulerChoice | None: ...
    @property
    def autocast(self) -> str | None: ...


_INFO = MappingProxyType({info.name: info for info in FIELDS})
S = TypeVar("S", contravariant=True)


@dataclass(frozen=True)
class Row(Generic[S]):
    """Settings that are moot for the same reason.

    because: a function that returns the reason as a phrase, or "" if the settings have an effect.
    remedy: other settings, with a value each, any one of which would give these settings an effect.
    """

    settings: tuple[str, ...]
    because: Callable[[S], str]
    remedy: Mapping[str, object] = field(default_factory=dict)


# --- sections of a run and of the library ----------------------------------------------------------------------------

_STAGE_3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "zero3_reshard_after",
    "memory_efficient_linear",
    "enable_sanity_checks",
    "leaf_module_classes",
    "leaf_module_names",
    "leaf_module_name_suffixes",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
)
_DELAYED = ("fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
_DYNAMIC_SCALE = (
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
)


def _no_gathers(zero: ZeroConfig) -> str:
    """Return the reason why no gather moves buckets; "" if gathers do."""
    if zero.zero_stage == 0:
        return "ZeRO stage 0 gathers no parameters"
    is_broadcast = zero.zero_stage < 3 and not zero.allgather_partitions
    return "without allgather_partitions owners broadcast" if is_broadcast else ""


def _is_fp16(sections: SharedSections) -> bool:
    return sections.precision.precision == "fp16"


def _gradients_may_overflow(sections: SharedSections) -> bool:
    return _is_fp16(sections) or sections.zero.communication_data_type == "fp16"


def _some_parameters_are_published(zero: ZeroConfig) -> bool:
    """Return True if an updated parameter lies on one process only, although others keep whole copies of it."""
    persistent = zero.param_persistence_threshold > 0 and zero.model_persistence_threshold > 0
    return zero.zero_stage in (1, 2) or (zero.zero_stage == 3 and persistent)


def _no_wider_accumulation(sections: SharedSections) -> str:
    precision = sections.precision.precision
    if precision == "fp64":
        return "gradients are not accumulated in a narrower format than the model computes in, fp64"
    return "fp32 gradients are added up in fp32 anyway" if precision == "fp32" else ""


# Settings of fp16, which have an effect too where autocast, in the library, computes in it.
FP16_ONLY: tuple[Row[SharedSections], ...] = (
    Row(
        ("loss_scale", *_DYNAMIC_SCALE),
        lambda s: "" if _is_fp16(s) else "only fp16 gradients are so small that the loss is scaled",
        {"precision": "fp16"},
    ),
    Row(
        ("max_skipped_steps_at_min_loss_scale",),
        lambda s: (
            ""
            if _gradients_may_overflow(s) or s.precision.check_grad_overflow
            else "only steps whose gradients overflow in fp16 are skipped"
        ),
        {"precision": "fp16"},
    ),
    Row(
        ("check_grad_overflow",),
        lambda s: "steps whose gradients overflow in fp16 are skipped anyway" if _gradients_may_overflow(s) else "",
        {"precision": "bf16"},
    ),
)

SHARED: tuple[Row[SharedSections], ...] = (
    *FP16_ONLY,
    Row(
        (
            *("curriculum_schedule", "curriculum_min_seqlen", "curriculum_max_seqlen", "curriculum_steps"),
            *("curriculum_seqlen_step", "curriculum_root_degree", "curriculum_seqlens", "curriculum_last_steps"),
        ),
        lambda s: "" if s.curriculum.curriculum_learning else "no rows are cut",
        {"curriculum_learning": True},
    ),
    Row(
        ("curriculum_root_degree",),
        lambda s: "" if s.curriculum.curriculum_schedule == "fixed_root" else "the length does not grow along a root",
        {"curriculum_schedule": "fixed_root"},
    ),
    Row(
        ("curriculum_steps", "curriculum_seqlen_step"),
        lambda s: "the lengths are listed" if s.curriculum.curriculum_schedule == DISCRETE else "",
        {"curriculum_schedule": "fixed_linear"},
    ),
    Row(
        ("curriculum_seqlens", "curriculum_last_steps"),
        lambda s: "" if s.curriculum.curriculum_schedule == DISCRETE else "the length grows by a formula",
        {"curriculum_schedule": DISCRETE},
    ),
    Row(
        ("wandb_exp_name", "wandb_entity", "wandb_group", "wandb_save_dir"),
        lambda s: "" if s.reports.wandb_project is not None else "nothing is written to Weights & Biases",
        {"wandb_project": "NAME"},
    ),
    Row(
        ("mlflow_run_name", "mlflow_tracking_uri"),
        lambda s: "" if s.reports.mlflow_experiment is not None else "nothing is written to MLflow",
        {"mlflow_experiment": "NAME"},
    ),
    Row(
        _STAGE_3,
        lambda s: "" if s.zero.zero_stage == 3 else f"ZeRO stage {s.zero.zero_stage} keeps parameters whole",
        {"zero_stage": 3},
    ),
    Row(
        ("allgather_bucket_size",),
        lambda s: _no_gathers(s.zero),
        {"zero_stage": 3},
    ),
    Row(
        ("prefetch_bucket_size",),
        lambda s: (
            ""
            if s.zero.overlap_comm or s.zero.prefetch_bucket_size == 0
            else "without overlap_comm no gather begins ahead of its use"
        ),
        {"overlap_comm": True},
    ),
    Row(
        ("model_persistence_threshold",),
        lambda s: (
            "" if s.zero.param_persistence_threshold else "param_persistence_threshold 0 keeps no parameter whole"
        ),
        {"param_persistence_threshold": 100_000},
    ),
    Row(
        ("param_persistence_threshold",),
        lambda s: (
            "" if s.zero.model_persistence_threshold else "model_persistence_threshold 0 keeps no parameter whole"
        ),
    ),
    Row(
        ("offload_optimizer_ratio",),
        lambda s: "offload_optimizer none keeps all of it on the device" if s.zero.offload_optimizer == "none" else "",
        {"offload_optimizer": "cpu"},
    ),
    Row(
        ("mics_shard_size", "num_distributed_optimizer_instances"),
        lambda s: "" if s.zero.zero_stage else "ZeRO stage 0 partitions nothing",
        {"zero_stage": 1},
    ),
    Row(
        ("mics_hierarchical_params_gather",),
        lambda s: "hierarchical_collectives does it for gathers too" if s.zero.hierarchical_collectives is True else "",
    ),
    Row(
        ("zero_quantized_weights_bits",),
        lambda s: "" if s.zero.zero_quantized_weights else "weights are gathered as they are",
        {"zero_quantized_weights": True},
    ),
    Row(
        ("zero_quantized_gradients_bits", "zero_error_feedback"),
        lambda s: "" if s.zero.zero_quantized_gradients else "gradients are reduced as they are",
        {"zero_quantized_gradients": True},
    ),
    Row(
        ("zero_quantized_block_size",),
        lambda s: (
            ""
            if s.zero.zero_quantized_weights
            or s.zero.zero_quantized_gradients
            or s.zero.zero_quantized_nontrainable_weights
            else "nothing is quantized"
        ),
        {"zero_quantized_gradients": True},
    ),
    Row(
        ("zero_quantized_stochastic",),
        lambda s: (
            ""
            if s.zero.zero_quantized_weights or s.zero.zero_quantized_gradients
            else "nothing that is sent is quantized"
        ),
        {"zero_quantized_gradients": True},
    ),
    Row(
        ("zero_error_feedback_beta", "zero_error_feedback_reset", "zero_error_feedback_saved"),
        lambda s: "" if s.zero.zero_error_feedback else "no errors are fed back",
        {"zero_error_feedback": True},
    ),
    Row(
        ("delayed_parameter_update",),
        lambda s: (
            "offload_optimizer none updates all of it on the device" if s.zero.offload_optimizer == "none" else ""
        ),
        {"offload_optimizer": "cpu"},
    ),
    Row(
        ("delayed_parameter_update_start",),
        lambda s: "" if s.zero.delayed_parameter_update else "no update is delayed",
        {"delayed_parameter_update": True},
    ),
    Row(
        ("offload_optimizer",),
        lambda s: "" if s.zero.offload_optimizer_ratio else "offload_optimizer_ratio 0 keeps all of it on the device",
    ),
    Row(
        (
            "offload_optimizer_nvme_ratio",
            "offload_gradients_nvme",
            "offload_buffer_count",
            "offload_pipeline_read",
            "offload_pipeline_write",
        ),
        lambda s: "" if s.zero.offload_optimizer == "nvme" else "no optimizer states are in files",
        {"offload_optimizer": "nvme"},
    ),
    Row(
        ("offload_param_buffer_count", "offload_param_max_in_cpu"),
        lambda s: "" if s.zero.offload_param == "nvme" else "no parameters are in files",
        {"offload_param": "nvme"},
    ),
    Row(
        ("nvme_path", "aio_block_size", "aio_queue_depth"),
        lambda s: "" if "nvme" in (s.zero.offload_optimizer, s.zero.offload_param) else "nothing is in files",
        {"offload_optimizer": "nvme"},
    ),
    Row(
        ("offload_pin_memory",),
        lambda s: "" if s.zero.offloads else "nothing is offloaded",
        {"offload_optimizer": "cpu"},
    ),
    Row(
        ("allgather_partitions",),
        lambda s: (
            "" if _some_parameters_are_published(s.zero) else f"ZeRO stage {s.zero.zero_stage} publishes no parameters"
        ),
        {"zero_stage": 1},
    ),
    Row(
        ("load_from_fp32_weights",),
        lambda s: (
            f"{s.precision.precision} parameters have no other master weights"
            if s.precision.precision in ("fp32", "fp64") or s.precision.bf16_master_weights
            else ""
        ),
        {"precision": "bf16"},
    ),
    Row(
        _DYNAMIC_SCALE,
        lambda s: (
            ""
            if s.precision.loss_scale is None
            else f"the loss scale is constant, loss_scale {s.precision.loss_scale:g}"
        ),
    ),
    Row(("accumulate_allreduce_grads_in_fp32",), _no_wider_accumulation, {"precision": "bf16"}),
    Row(
        ("bf16_master_weights",),
        lambda s: "" if s.precision.precision == "bf16" else f"parameters are {s.precision.precision}",
        {"precision": "bf16"},
    ),
    Row(
        ("tf32",),
        lambda s: (
            "" if s.precision.precision == "fp32" else f"there are no fp32 products, only {s.precision.precision} ones"
        ),
        {"precision": "fp32"},
    ),
    Row(
        ("number_checkpoints",),
        lambda s: (
            ""
            if s.activations.contiguous_checkpointing
            else "it is the size of the arena in which contiguous_checkpointing keeps checkpoints"
        ),
        {"contiguous_checkpointing": True},
    ),
    Row(
        ("number_checkpoints",),
        lambda s: (
            "of checkpoints in host memory the arena has room for those on their way, whatever their number"
            if s.activations.checkpoint_in_cpu is True
            else ""
        ),
        {"checkpoint_in_cpu": False},
    ),
)

# Settings that are moot with one data-parallel process.
ALONE: tuple[Row[SharedSections], ...] = (
    Row(
        (
            "reduce_scatter",
            "allgather_partitions",
            "prescale_gradients",
            "hierarchical_collectives",
            "mics_hierarchical_params_gather",
            "zero_quantized_weights",
            "zero_quantized_gradients",
        ),
        lambda s: "one data-parallel process exchanges no gradients and no parameters",
    ),
)

# Parameters of an optimizer; a run gives them by --optimizer-params.
OPTIMIZER: tuple[Row[OptimizerChoice], ...] = (
    Row(
        ("optimizer.params.dampening",),
        lambda choice: "" if choice.params.get("momentum") else "without momentum nothing is dampened",
    ),
    Row(
        ("optimizer.params.decoupled_weight_decay",),
        lambda choice: "" if choice.params.get("weight_decay") else "there is no weight decay",
    ),
)


def _cycled(params: Mapping[str, object], *names: str) -> bool:
    """Return True if OneCycle's parameters of these names are all other than 0 and false."""
    return all(params.get(name) for name in names)


# Parameters of OneCycle; a run gives them by --lr-decay-params.
CYCLE: tuple[Row[SchedulerChoice], ...] = (
    Row(
        ("scheduler.params.decay_lr_rate", "scheduler.params.decay_mom_rate"),
        lambda choice: "" if _cycled(choice.params, "decay_step_size") else "with decay_step_size 0 nothing decays",
    ),
    Row(
        ("scheduler.params.decay_step_size",),
        lambda choice: (
            ""
            if _cycled(choice.params, "decay_lr_rate") or _cycled(choice.params, "decay_mom_rate", "cycle_momentum")
            else "neither learning rate nor momentum decays"
        ),
    ),
    Row(
        ("scheduler.params.cycle_min_mom", "scheduler.params.cycle_max_mom", "scheduler.params.decay_mom_rate"),
        lambda choice: "" if _cycled(choice.params, "cycle_momentum") else "the momentum is not cycled",
    ),
)


# --- the library -----------------------------------------------------------------------------------------------------


def _rate_of_schedule(sections: LibrarySections, *names: str) -> str:
    """Return why the optimizer's learning rate has no effect, "" if it has one.

    names: parameters of schedules, each of which is the highest rate, or the first one of a rise without an end.
    """
    choice = sections.scheduler
    params = {} if choice is None else choice.params
    name = next((name for name in names if params.get(name) is not None), "")
    if choice is None or not name or sections.optimizer is None or params[name] == sections.optimizer.lr:
        return ""
    return f"{choice.type} sets the learning rate, {'from' if 'min' in name else 'up to'} {name} {params[name]:g}"


LIBRARY: tuple[Row[LibrarySections], ...] = (
    Row(
        ("recompute_granularity", "recompute_method", "recompute_num_layers", "logits_chunk_bytes"),
        lambda s: "what is recomputed is the model's choice, which calls megazero.recompute(function, *args)",
    ),
    Row(
        ("zero3_reshard_after",),
        lambda s: "there is no schedule with windows; a unit is released after every forward and backward of it",
    ),
    Row(("fp8_format", "fp8_cache_weights", *_DELAYED), lambda s: "the model's own layers choose their products"),
    Row(
        ("steps_per_print",),
        lambda s: "" if s.reports.timing_log_level or s.reports.tracks else "nothing is reported",
        {"timing_log_level": 1},
    ),
    Row(
        ("timing_log_option",),
        lambda s: "" if s.reports.timing_log_level else "no part of a step is timed",
        {"timing_log_level": 1},
    ),
    Row(
        ("update_unused_parameters",),
        lambda s: "" if s.zero.ignore_unused_parameters else "a parameter without a gradient stops the training",
        {"ignore_unused_parameters": True},
    ),
    Row(
        ("optimizer.lr",),
        lambda s: _rate_of_schedule(s, "warmup_max_lr"),
        {"scheduler.params.warmup_max_lr": "auto"},
    ),
    Row(("optimizer.lr",), lambda s: _rate_of_schedule(s, "cycle_max_lr", "lr_range_test_min_lr")),
    Row(
        ("scheduler.params.lr_warmup_init", "scheduler.params.lr_warmup_type"),
        lambda s: "" if s.scheduler is None or s.scheduler.params.get("lr_warmup_iters") else "there is no warm-up",
        {"scheduler.params.lr_warmup_iters": 100},
    ),
)


# --- a run -----------------------------------------------------------------------------------------------------------

_SEGMENTS = (
    "recompute_method",
    "recompute_num_layers",
    "partition_activations",
    "checkpoint_in_cpu",
    "contiguous_checkpointing",
    "number_checkpoints",
    "synchronize_each_layer",
    "profile_backward",
)
_WARMUP_LENGTHS = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens", "lr_warmup_fraction")
_DECAY_LENGTHS = ("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens")
_TRACKED = (
    "tensorboard_log_interval",
    "log_validation_ppl_to_tensorboard",
    "log_memory_to_tensorboard",
)
# {file: the types of tokenizer that read it}
_TOKENIZERS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        file: tuple(kind for kind, files in TOKENIZER_FILES if file in files)
        for file in ("vocab_file", "merge_file", "tokenizer_model")
    }
)


# {setting that is a parameter of some optimizers only: one of these optimizers}
_OPTIMIZER_OF: Mapping[str, str] = MappingProxyType(
    {
        "weight_decay": "adam",
        "adam_beta1": "adam",
        "adam_beta2": "adam",
        "adam_eps": "adam",
        "lion_beta1": "lion",
        "lion_beta2": "lion",
        "sgd_momentum": "sgd",
    }
)


def _is_no_parameter(setting: str, *others: str) -> Row[RunConfig]:
    def because(config: RunConfig) -> str:
        name = config.optimizer.optimizer
        own = run_settings(RUN_NAMES[name])
        settings = [setting for settings in own.values() for setting in settings]
        if setting in settings:
            return ""
        rest = [other for other in OPTIMIZERS[RUN_NAMES[name]].params if other not in own]
        taken = [*(_INFO[own].flag for own in settings), "--optimizer-params " + " ".join(f"{n}=..." for n in rest)]
        return f"--optimizer {name} takes {', '.join(taken)}"

    return Row((setting, *others), because, {"optimizer": _OPTIMIZER_OF[setting]})


def _one_slice(config: RunConfig) -> str:
    size = config.parallel.tensor_model_parallel_size
    return "with --tensor-model-parallel-size 1 there is nothing to split over" if size == 1 else ""


def _no_partitioned_checkpoints(config: RunConfig) -> str:
    if config.activations.partition_activations is not True:
        return ""
    if config.parallel.tensor_model_parallel_size > 1 and config.parallel.sequence_parallel:
        return "with --sequence-parallel checkpoints are slices already, and are not cut again"
    return _one_slice(config)


def _same_order_of_ranks(config: RunConfig) -> str:
    """Return why the order of ranks equals the default one; the place of an axis with one rank makes no difference."""
    parallel = config.parallel
    sizes = {"pp": parallel.pipeline_model_parallel_size, "dp": 2, "tp": parallel.tensor_model_parallel_size}
    given, default = (
        [axis for axis in order.split("-") if sizes[axis] > 1] for order in (parallel.rank_order, "pp-dp-tp")
    )
    if given != default:
        return ""
    degrees = " and ".join(
        f"{flag} 1"
        for flag, size in (("--tensor-model-parallel-size", "tp"), ("--pipeline-model-parallel-size", "pp"))
        if sizes[size] == 1
    )
    return f"with {degrees} it is the order pp-dp-tp"


def _kernel_is_not_there(config: RunConfig) -> str:
    kernel = config.training.attention_backend
    if config.parallel.device != "cpu" or kernel in ("auto", "unfused"):
        return ""
    if kernel == "flash3":
        return "FlashAttention 3 is for Hopper GPUs"
    if kernel == "flash":
        return "on the CPU FlashAttention has no dropout" if config.model.attention_dropout else ""
    return "on the CPU there are FlashAttention and plain products only"


def _no_graph_has_several_blocks(config: RunConfig) -> str:
    """Return why every graph has one block or a part of one."""
    choice, activations = config.training.compile, config.activations
    if choice == "off" or (choice == "auto" and config.parallel.device == "cpu"):
        return f"--compile {choice} compiles no blocks{' on CPUs' * (choice == 'auto')}"
    if choice == "auto" and (config.logging.ledger or config.logging.ledger_limit is not None):
        return "nothing is compiled under a ledger"
    if config.parallel.tensor_model_parallel_size > 1:
        return "with several tensor-parallel ranks parts of blocks are compiled"
    if config.parallel.pipeline_schedule == "zero-bubble" or activations.recompute_granularity == "selective":
        return "with the zero-bubble schedule and with selective recomputation parts of blocks are compiled"
    if activations.recompute_granularity == "full" and activations.recompute_method != "block":
        return "" if (activations.recompute_num_layers or 1) > 1 else "every recomputed segment is one block"
    return ""


def _splits_nothing(config: RunConfig) -> str:
    data = config.data
    if data.mock_data:
        return "made-up tokens have no documents to share out"
    if data.data_path:
        return ""
    if data.train_weighted_split_paths:
        return "every corpus of a group has a part of its own"
    own = data.train_data_path or data.valid_data_path or data.test_data_path
    return "a split's own corpus is used whole" if own else ""


def _maps_nothing(config: RunConfig) -> str:
    if config.data.mock_data:
        return "made-up tokens lie in no file"
    prefixes = [word for word in corpus_words(config.data) if weight_of(word) is None]
    remote = prefixes and all("://" in prefix for prefix in prefixes)
    return "tokens in an object store are always read by ranges" if remote else ""


def _caches_nothing(config: RunConfig) -> str:
    remote = not config.data.mock_data and any("://" in word for word in corpus_words(config.data))
    return "" if remote else "only the indexes of corpora in object stores (s3://...) are kept there"


def _tokenizer_reads_no(setting: str) -> Row[RunConfig]:
    kinds = _TOKENIZERS_OF[setting]

    def because(config: RunConfig) -> str:
        given = config.data.tokenizer_type
        if given in kinds:
            return ""
        readers = " or ".join(kinds)
        return f"{given} reads no such file" if given else f"--tokenizer-type {readers} reads it, and none is named"

    return Row((setting,), because, {"tokenizer_type": kinds[0]})


def _has_special_tokens_behind(config: RunConfig) -> str:
    data = config.data
    if data.tokenizer_type != "TikTokenizer" or data.tiktoken_pattern in (None, "v1", "v2"):
        return ""
    return f"--tiktoken-pattern {data.tiktoken_pattern} sets how many special tokens there are"


def _no_ledger_is_read(config: RunConfig) -> str:
    logging = config.logging
    read = logging.metrics_file or derived.tensorboard_dir(config) or logging.ledger_dir
    return "" if read else "its figures go to --metrics-file, --tensorboard-dir and --ledger-dir, and none is there"


def _begins_always_or_never(config: RunConfig) -> str:
    load, save = config.checkpoint.load, config.checkpoint.save
    if config.checkpoint.finetune:
        return "--finetune always needs a checkpoint"
    is_save = load is not None and save is not None and load.resolve() == save.resolve()
    return "a run may always begin where --load is --save" if is_save else ""


def _momentum_is_cycled(config: RunConfig) -> str:
    is_cycled = config.optimizer.lr_decay_style == "OneCycle" and sweep_for_run(config.optimizer, Diagnostics()).get(
        "cycle_momentum"
    )
    return "OneCycle moves it between cycle_min_mom and cycle_max_mom" if is_cycled else ""


RUN: tuple[Row[RunConfig], ...] = (
    Row(
        ("rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor", "use_rope_scaling"),
        lambda c: "" if c.model.position_embedding_type == "rope" else "there are no rotary positions",
        {"position_embedding_type": "rope"},
    ),
    Row(
        ("make_vocab_size_divisible_by",),
        lambda c: "" if c.model.pad_vocab_size_to is None else "--pad-vocab-size-to sets how far it is padded",
    ),
    Row(
        ("rope_scaling_factor",),
        lambda c: "" if c.model.use_rope_scaling else "no wavelengths of rotary positions are stretched",
        {"use_rope_scaling": True},
    ),
    Row(
        ("num_query_groups",),
        lambda c: "" if c.model.group_query_attention else "every attention head has keys and values of its own",
        {"group_query_attention": True},
    ),
    Row(
        ("add_qkv_bias",),
        lambda c: "" if c.model.disable_bias_linear else "all linear layers have biases",
        {"disable_bias_linear": True},
    ),
    Row(
        ("answer_loss_mask",),
        lambda c: "made-up tokens have no mask" if c.data.mock_data else "",
    ),
    Row(
        ("reset_position_ids",),
        lambda c: (
            "the model has no positions that would begin anew"
            if c.model.position_embedding_type in ("alibi", "none")
            else ""
        ),
        {"position_embedding_type": "rope"},
    ),
    Row(
        ("eval_interval", "eval_at_start", "log_validation_ppl_to_tensorboard", "eval_sample_tokens"),
        lambda c: "" if c.training.eval_iters else "--eval-iters 0 evaluates nothing",
        {"eval_iters": 100},
    ),
    Row(("attention_backend",), _kernel_is_not_there, {"device": "cuda"}),
    Row(("compile_num_layers",), _no_graph_has_several_blocks),
    Row(
        ("enable_cuda_graph",),
        lambda c: "a CPU records no launches" if c.parallel.device == "cpu" else "",
        {"device": "cuda"},
    ),
    Row(
        ("fp8_cache_weights", *_DELAYED),
        lambda c: "" if c.precision.fp8_format else "no product is of 8-bit numbers",
        {"fp8_format": "hybrid"},
    ),
    Row(
        _DELAYED[1:],
        lambda c: "" if c.precision.fp8_recipe == "delayed" else "--fp8-recipe tensorwise has no history",
        {"fp8_recipe": "delayed"},
    ),
    Row(
        ("fp8_amax_history_len",),
        lambda c: "" if c.precision.fp8_amax_compute_algo == "max" else "the most recent maximum is the last step's",
        {"fp8_amax_compute_algo": "max"},
    ),
    Row(
        ("fp8_amax_compute_algo",),
        lambda c: "a history of one step has one maximum" if c.precision.fp8_amax_history_len == 1 else "",
        {"fp8_amax_history_len": 16},
    ),
    Row(
        ("fp8_cache_weights",),
        lambda c: (
            "delayed scales need no pass over the weights, and in stage 3 no values are kept"
            if c.precision.fp8_recipe == "delayed" and c.zero.zero_stage == 3
            else ""
        ),
    ),
    Row(
        ("compile",),
        lambda c: "on CPUs no kernels are timed" if c.training.compile == "max" and c.parallel.device == "cpu" else "",
        {"device": "cuda"},
    ),
    Row(
        ("tf32",),
        lambda c: "a CPU has no TF32, its fp32 products are exact" if c.parallel.device == "cpu" else "",
        {"device": "cuda"},
    ),
    Row(
        ("offload_pin_memory",),
        lambda c: "for a CPU no memory is pinned" if c.parallel.device == "cpu" else "",
        {"device": "cuda"},
    ),
    Row(
        ("deterministic_mode",),
        lambda c: "on CPUs every run is bitwise repeatable" if c.parallel.device == "cpu" else "",
        {"device": "cuda"},
    ),
    Row(
        ("min_lr",),
        lambda c: "a constant learning rate does not fall" if c.optimizer.lr_decay_style == "constant" else "",
        {"lr_decay_style": "linear"},
    ),
    Row(
        ("min_lr",),
        lambda c: "LRRangeTest only rises" if c.optimizer.lr_decay_style == "LRRangeTest" else "",
        {"lr_decay_style": "linear"},
    ),
    Row(
        (*_DECAY_LENGTHS, *_WARMUP_LENGTHS, "lr_warmup_init", "lr_warmup_type"),
        lambda c: (
            f"--lr-decay-params are the shape of {c.optimizer.lr_decay_style}"
            if c.optimizer.lr_decay_style in RATE_SETTINGS
            else ""
        ),
        {"lr_decay_style": "linear"},
    ),
    Row(
        ("lr_decay_params",),
        lambda c: (
            ""
            if c.optimizer.lr_decay_style in RATE_SETTINGS
            else f"--lr-decay-style {c.optimizer.lr_decay_style} has settings for all of its parameters"
        ),
        {"lr_decay_style": "OneCycle"},
    ),
    Row(("adam_beta1", "lion_beta1"), _momentum_is_cycled),
    Row(
        _DECAY_LENGTHS,
        lambda c: (
            "a constant learning rate does not fall, and no warm-up is a fraction of its fall"
            if c.optimizer.lr_decay_style == "constant" and not c.optimizer.lr_warmup_fraction
            else ""
        ),
        {"lr_decay_style": "linear"},
    ),
    Row(
        ("lr_warmup_init", "lr_warmup_type"),
        lambda c: "" if any(getattr(c.optimizer, name) for name in _WARMUP_LENGTHS) else "there is no warm-up",
        {"lr_warmup_iters": 100},
    ),
    Row(
        ("decoupled_min_lr",),
        lambda c: "it is the end of --decoupled-lr" if c.optimizer.decoupled_lr is None else "",
        {"decoupled_lr": 1e-4},
    ),
    Row(
        ("decoupled_min_lr",),
        lambda c: "a constant learning rate does not fall" if c.optimizer.lr_decay_style == "constant" else "",
        {"lr_decay_style": "linear"},
    ),
    Row(
        ("decoupled_lr", "decoupled_min_lr"),
        lambda c: (
            f"{c.optimizer.lr_decay_style} has one learning rate for all parameters"
            if c.optimizer.lr_decay_style in RATE_SETTINGS
            else ""
        ),
        {"lr_decay_style": "linear"},
    ),
    *map(_is_no_parameter, _OPTIMIZER_OF),
    _is_no_parameter("weight_decay", "weight_decay_incr_style"),
    Row(
        ("start_weight_decay", "end_weight_decay"),
        lambda c: "weight decay is constant" if c.optimizer.weight_decay_incr_style == "constant" else "",
        {"weight_decay_incr_style": "linear"},
    ),
    Row(
        ("weight_decay",),
        lambda c: (
            ""
            if c.optimizer.weight_decay_incr_style == "constant"
            else "it goes from --start-weight-decay to --end-weight-decay"
        ),
        {"weight_decay_incr_style": "constant"},
    ),
    Row(
        ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"),
        lambda c: (
            ""
            if c.optimizer.lr_decay_style == "WSD"
            else f"--lr-decay-style {c.optimizer.lr_decay_style} has no fall of its own at the end"
        ),
        {"lr_decay_style": "WSD"},
    ),
    Row(
        ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler", "no_load_optim", "strict_load"),
        lambda c: "there is no checkpoint to take anything from" if c.checkpoint.load is None else "",
        {"load": "DIR"},
    ),
    Row(
        ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler", "no_load_optim"),
        lambda c: "--finetune takes parameters only, and starts everything else anew" if c.checkpoint.finetune else "",
    ),
    Row(
        ("begin_without_checkpoint",),
        lambda c: "without --load every start begins a new run" if c.checkpoint.load is None else "",
        {"load": "DIR"},
    ),
    Row(("begin_without_checkpoint",), _begins_always_or_never),
    Row(
        ("load_from_fp32_weights",),
        lambda c: (
            ""
            if c.checkpoint.load is not None and (c.checkpoint.finetune or c.checkpoint.no_load_optim)
            else "weights alone are loaded by --load with --finetune or --no-load-optim"
        ),
    ),
    Row(
        ("strict_load",),
        lambda c: (
            "a step folder that is named is never replaced by another"
            if c.checkpoint.load is not None and c.checkpoint.load.name.startswith("step_")
            else ""
        ),
    ),
    Row(
        ("save_interval", "async_save", "no_save_optim", "keep_last", "keep_every"),
        lambda c: "without --save nothing is saved" if c.checkpoint.save is None else "",
        {"save": "DIR"},
    ),
    Row(
        _SEGMENTS,
        lambda c: (
            ""
            if c.activations.recompute_granularity in ("full", "auto")
            else "only layers that are recomputed whole form segments and keep checkpoints"
        ),
        {"recompute_granularity": "full"},
    ),
    Row(("sequence_parallel", "allow_tensor_parallel_across_nodes"), _one_slice, {"tensor_model_parallel_size": 2}),
    Row(("partition_activations",), _no_partitioned_checkpoints),
    Row(("rank_order",), _same_order_of_ranks, {"tensor_model_parallel_size": 2}),
    Row(
        ("cpu_threads",),
        lambda c: (
            "--device cuda computes on the GPU, and nothing is offloaded"
            if c.parallel.device == "cuda" and not c.zero.offloads
            else ""
        ),
        {"device": "cpu"},
    ),
    Row(("override_module_apply",), lambda c: "nothing in a run calls Module.apply"),
    Row(
        ("zero_quantized_nontrainable_weights",),
        lambda c: "" if c.model.lora_rank else "without adapters a run trains every parameter",
        {"lora_rank": 8},
    ),
    Row(
        ("lora_alpha", "lora_dropout", "lora_targets", "lora_random_base"),
        lambda c: "" if c.model.lora_rank else "the model has no adapters",
        {"lora_rank": 8},
    ),
    Row(
        ("leaf_module_classes", "leaf_module_names", "leaf_module_name_suffixes"),
        lambda c: "every process of a run computes with the same layers in the same order",
    ),
    Row(
        ("synchronize_each_layer",),
        lambda c: "the CPU is never behind the program" if c.parallel.device == "cpu" else "",
        {"device": "cuda"},
    ),
    Row(("split",), _splits_nothing),
    Row(
        (
            *("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix", "fim_prefix_token"),
            *("fim_middle_token", "fim_suffix_token", "fim_pad_token", "fim_eod_token"),
        ),
        lambda c: "" if c.data.fim_data else "no sample is rearranged",
        {"fim_data": True},
    ),
    Row(
        ("fim_fragment_rate",),
        lambda c: "" if c.data.fim_split_sample else "documents are not rearranged in parts",
        {"fim_split_sample": "<file_sep>"},
    ),
    Row(("mmap_bin_files",), _maps_nothing),
    Row(("data_cache_path",), _caches_nothing),
    *map(_tokenizer_reads_no, _TOKENIZERS_OF),
    Row(
        ("tiktoken_pattern", "tiktoken_num_special_tokens"),
        lambda c: "" if c.data.tokenizer_type == "TikTokenizer" else "only TikTokenizer reads a file of ranks",
        {"tokenizer_type": "TikTokenizer"},
    ),
    Row(("tiktoken_num_special_tokens",), _has_special_tokens_behind, {"tiktoken_pattern": "v2"}),
    Row(
        ("tensorboard_queue_size",),
        lambda c: "TensorBoard is written into a folder" if derived.tensorboard_dir(c) is None else "",
        {"tensorboard_dir": "DIR"},
    ),
    Row(
        _TRACKED,
        lambda c: "" if derived.tracks_scalars(c) else "TensorBoard is written into a folder",
        {"tensorboard_dir": "DIR"},
    ),
    Row(
        ("eval_sample_tokens",),
        lambda c: (
            ""
            if c.data.tokenizer_type or not c.data.mock_data
            else "text is made of tokens by --tokenizer-type, and none is named"
        ),
        {"tokenizer_type": "ByteTokenizer"},
    ),
    Row(
        ("tensorboard",),
        lambda c: "its folder lies below --save" if derived.tensorboard_dir(c) is None else "",
        {"save": "DIR", "tensorboard_dir": "DIR"},
    ),
    Row(
        ("memory_snapshot_path",),
        lambda c: "" if c.logging.record_memory_history else "no history of memory is recorded",
        {"record_memory_history": True},
    ),
    Row(
        ("record_memory_history",),
        lambda c: (
            "only a GPU's allocator records one; on CPUs the ledger (--ledger --ledger-dir DIR) lists what lives in"
            " memory"
            if c.parallel.device == "cpu"
            else ""
        ),
        {"device": "cuda"},
    ),
    Row(
        ("profile_step_start", "profile_step_end", "profile_ranks", "use_pytorch_profiler", "record_memory_history"),
        lambda c: "" if c.logging.profile else "no step is profiled",
        {"profile": True},
    ),
    Row(
        ("profile",),
        lambda c: (
            "on CPUs only torch's profiler sees a step"
            if c.parallel.device == "cpu" and not c.logging.use_pytorch_profiler
            else ""
        ),
        {"use_pytorch_profiler": True},
    ),
    Row(
        ("log_optimizer_states_to_tensorboard", "log_timers_to_tensorboard", "log_layer_grad_norms"),
        lambda c: (
            ""
            if c.logging.metrics_file or derived.tracks_scalars(c)
            else "its figures go to trackers (as --tensorboard-dir) and --metrics-file, and none is there"
        ),
        {"tensorboard_dir": "DIR", "metrics_file": "FILE"},
    ),
    Row(
        ("timing_log_option",),
        lambda c: (
            ""
            if c.reports.timing_log_level or c.logging.log_timers_to_tensorboard
            else "no part of a step is timed, and the step's time, rank 0's, is in every line"
        ),
        {"timing_log_level": 1},
    ),
    Row(("ledger",), _no_ledger_is_read, {"metrics_file": "FILE", "ledger_dir": "DIR"}),
    Row(
        ("ledger_dir",),
        lambda c: "" if c.logging.ledger or c.logging.ledger_limit is not None else "no ledger is kept",
        {"ledger": True},
    ),
)


# --- problems and notices of moot settings ----------------------------------------------------------------------------

Spell = Callable[[str, object], str]


class _Moot(NamedTuple):
    """A given setting, the reason why it has no effect, and other settings that would give it one."""

    item: ParsedValue
    because: str
    remedy: Mapping[str, object]


def of_a_run(
    config: RunConfig, given: Sequence[ParsedValue], *, world_size: int | None = None, strict: bool = False
) -> Diagnostics:
    """Return the problems and notices of a run's moot settings; a row that reads an invalid setting finds nothing.

    world_size: processes of the job, None if unknown.  strict: True if foreign settings count as the user's own.
    """
    found = [*_moot(config, given, (*RUN, *SHARED)), *_moot_params(config, given)]
    if world_size is not None and _is_alone(config, world_size):
        seen = {moot.item.name for moot in found}
        rest = [replace(item, origin=_at_most_foreign(item.origin)) for item in given if item.name not in seen]
        found += _moot(config, rest, ALONE)
    return _diagnostics(found, _as_flag, strict=strict)


def of_the_library(sections: LibrarySections, given: Sequence[ParsedValue]) -> Diagnostics:
    """Return the problems of moot settings in a configuration of the library, on any number of processes."""
    shared = [row for row in SHARED if sections.autocast != "fp16" or row not in FP16_ONLY]
    found = [*_moot(sections, given, (*LIBRARY, *shared))]
    if sections.optimizer is not None:
        found += _moot(sections.optimizer, given, OPTIMIZER)
    if sections.scheduler is not None:
        found += _moot(sections.scheduler, given, CYCLE)
    return _diagnostics(found, _as_key, strict=False)


def on_one_process(sections: SharedSections, *, sums: bool) -> tuple[str, ...]:
    """Return notices of the library's settings that are moot because there is one data-parallel process.

    sums: True if gradients are to be summed over the processes.
    """
    values = {setting: getattr(sections.zero, setting) for row in ALONE for setting in row.settings}
    given = [ParsedValue(name, value, _as_key(name, value), Origin.FOREIGN) for name, value in values.items()]
    notices = _diagnostics(_moot(sections, given, ALONE), _as_key, strict=False).notices
    if sums:
        notices.append('gradient_allreduce_op: "sum": moot here, because the sum over one process is the mean')
    return tuple(notices)


def _moot(sections: S, given: Iterable[ParsedValue], rows: Iterable[Row[S]]) -> Iterator[_Moot]:
    """Yield the settings that differ from their defaults and have no effect, each with the table's first reason."""
    items = [*given]
    by_setting: dict[str, list[Row[S]]] = {item.name: [] for item in items}
    for row in rows if items else ():
        for setting in row.settings:
            if setting in by_setting:
                by_setting[setting].append(row)
    for item in items:
        for row in by_setting[item.name]:
            try:
                because = row.because(sections) if _asks_for_something(sections, item.name) else ""
            except Unknown:
                continue
            if because:
                yield _Moot(item, because, row.remedy)
                break


def _moot_params(config: RunConfig, given: Iterable[ParsedValue]) -> Iterator[_Moot]:
    """Yield the words of --optimizer-params and --lr-decay-params that have no effect; none while one has a problem."""
    diagnostics = Diagnostics()
    try:
        choice, sweep = choose_for_run(config.optimizer, diagnostics), sweep_for_run(config.optimizer, diagnostics)
    except Unknown:
        return
    if diagnostics.problems:
        return
    schedule = SchedulerChoice(type=config.optimizer.lr_decay_style, params=sweep) if sweep else None
    changed = changed_params(choice, schedule)
    if choice.type == "Adam":  # --optimizer adam is AdamW, so that the word which makes Adam of it is a change
        changed[f"optimizer.params.{DECOUPLED}"] = False
    for item in given:
        if item.name == "optimizer_params":
            yield from _moot(choice, _words(item, "optimizer.params", changed), OPTIMIZER)
        elif item.name == "lr_decay_params" and schedule is not None:
            yield from _moot(schedule, _words(item, "scheduler.params", changed), CYCLE)


def _words(item: ParsedValue, section: str, changed: Mapping[str, object]) -> list[ParsedValue]:
    """Return those words of a flag of parameters, `name=value`, whose values are not their defaults."""
    paths = {word: f"{section}.{word.partition('=')[0]}" for word in item.value}
    return [
        ParsedValue(path, changed[path], item.source if len(paths) == 1 else f"{word} in {item.source}", item.origin)
        for word, path in paths.items()
        if path in changed
    ]


def _asks_for_something(sections: object, setting: str) -> bool:
    """Return True if the setting's value is not its default; a name that is no setting of a run always counts."""
    info = _INFO.get(setting)
    return info is None or getattr(getattr(sections, info.section), setting) != info.default


def _is_alone(config: RunConfig, world_size: int) -> bool:
    """Return True if the job has one data-parallel process; False also if the layout is invalid."""
    try:
        return world_size == derived.model_parallel_size(config)
    except Unknown:
        return False


def _at_most_foreign(origin: Origin) -> Origin:
    return Origin.FOREIGN if origin is Origin.USER else origin


def _diagnostics(moot: Iterable[_Moot], spell: Spell, *, strict: bool) -> Diagnostics:
    found = Diagnostics()
    for item, because, remedy in moot:
        if item.origin is Origin.USER or (strict and item.origin is Origin.FOREIGN):
            ways = [*(spell(setting, value) for setting, value in remedy.items()), "or leave it out"]
            legal = ", ".join(ways) if remedy else "leave it out"
            found.problems.append(Problem(item.source, f"it has no effect here: {because}", legal))
        elif item.origin is not Origin.DEFAULT:
            found.notices.append(f"{item.source}: moot here, because {because}")
    return found


def _as_flag(setting: str, value: object) -> str:
    flag = _INFO[setting].flag
    return flag if value is True else f"{flag} {str(value).lower() if value is False else value}"


def _as_key(setting: str, value: object) -> str:
    info = _INFO.get(setting)
    return f"{info.section}.{setting}: {shown(value)}" if info else f"{setting}: {shown(value)}"
