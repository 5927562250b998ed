"""The sections of settings that a run and the library share: ZeRO, number formats, activations, the optimizer,
limits, reports."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic.dataclasses import dataclass

from megazero.config.curriculum import CurriculumConfig
from megazero.config.fields import STRICT, FieldInfo, describe, setting

# The size that means "no limit"; DeepSpeed has the same default for a limit that a configuration leaves out.
UNLIMITED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ZeroConfig:
    """The ZeRO stage, its buckets, and how long gathered parameters stay (ZeRO, section 5)."""

    zero_stage: int = setting(
        1,
        help="0: every process holds all model states; 1: optimizer states are partitioned; 2: gradients too;"
        " 3: parameters too",
        beyond="there is nothing left to partition after stage 3",
        aliases=("data-parallel-sharding-strategy",),
        ge=0,
        le=3,
    )
    reduce_bucket_size: int | None = setting(
        None,
        help="most gradient elements that one reduction moves, of one unit; never less than data-parallel size x 16"
        " elements; without it, 524288 for each data-parallel process, but at least 16777216, and at most 268435456"
        " or 131072 for each process, whichever is more",
        unit="elements",
        aliases=("zero-reduce-bucket-size", "ddp-bucket-size"),
        ge=0,
    )
    allgather_bucket_size: int | None = setting(
        None,
        help="most parameter elements that one gather moves, in place, of one unit; never less than data-parallel size"
        " x 16 elements; without it, as many as reduce_bucket_size, or where that has no value, 524288 for each"
        " data-parallel process, but at least 16777216",
        unit="elements",
        aliases=("zero-allgather-bucket-size",),
        ge=0,
    )
    mics_shard_size: int = setting(
        -1,
        help="data-parallel processes over which model states are partitioned, neighbours, best those of a node; each"
        " such group has a replica of the states, and gradients are summed over the replicas once a step (MiCS);"
        " -1: all",
        unit="processes",
        ge=-1,
    )
    num_distributed_optimizer_instances: int = setting(
        1,
        help="the same as the number of replicas, each partitioned over as many data-parallel processes",
        unit="replicas",
        ge=1,
    )
    hierarchical_collectives: bool | Literal["auto"] = setting(
        False,
        help="let gathers and sums of a shard group on several nodes take two hops, inside the nodes and across them,"
        " so that a byte crosses once for each node; auto: where that is faster, as measured at the start",
    )
    mics_hierarchical_params_gather: bool = setting(
        False, help="the same for gathers alone, with shard groups on several nodes"
    )
    zero_hpz_partition_size: int = setting(
        1,
        help="stage 3: processes of a node over which parameters are partitioned a second time, once a forward has"
        " gathered them, so that later gathers stay inside until the weights change (hpZ, ZeRO++); 1: not",
        unit="processes",
        ge=1,
    )
    zero_quantized_weights: bool = setting(False, help="stage 3: gather parameters as blocks of integers (qwZ, ZeRO++)")
    zero_quantized_nontrainable_weights: bool = setting(
        False, help="stage 3: keep frozen parameters as blocks of 8-bit integers, and gather them so"
    )
    zero_quantized_gradients: bool = setting(
        False,
        help="reduce gradients as blocks of integers, by an exchange inside the nodes and one across (qgZ, ZeRO++)",
    )
    zero_quantized_weights_bits: int = setting(8, help="bits of a gathered weight", unit="bits", ge=4, le=8)
    zero_quantized_gradients_bits: int = setting(4, help="bits of an exchanged gradient", unit="bits", ge=4, le=8)
    zero_quantized_block_size: int = setting(
        256, help="elements of a quantized block, which have one scale in fp32", unit="elements", ge=2, le=65_536
    )
    zero_quantized_stochastic: bool = setting(
        False, help="round quantized numbers up or down at random, so that errors average out"
    )
    zero_error_feedback: bool = setting(
        False, help="add what zero_quantized_gradients has rounded off to the next step's gradients (LoCo)"
    )
    zero_error_feedback_beta: float = setting(
        0.8, help="the weight of older errors in the mean that is added", ge=0, lt=1
    )
    zero_error_feedback_reset: int = setting(
        1024, help="reductions of a bucket after which its errors are forgotten", unit="reductions", ge=1
    )
    zero_error_feedback_saved: bool = setting(
        True,
        help="save the errors, a byte for each parameter on every data-parallel process, so that a run resumes bitwise"
        " at the same layout; false: they begin at zero after a restart",
    )
    overlap_comm: bool = setting(True, help="let reductions and gathers run while the model computes")
    contiguous_gradients: bool = setting(
        True,
        help="copy a gradient into its bucket as soon as autograd has made it; false: when the bucket is complete",
        aliases=("zero-contigious-gradients", "zero-contiguous-gradients"),
    )
    reduce_scatter: bool = setting(
        True,
        help="reduce gradients so that a process gets its partition only; false reduces by all-reduce",
        aliases=("zero-reduce-scatter",),
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
        True, help="let parameters be without a gradient in a step; false: they stop the run with their names"
    )
    sub_group_size: int = setting(
        1_000_000_000,
        help="most elements that the optimizer updates at once; 0: as many as a bucket has",
        unit="elements",
        ge=0,
    )
    prefetch_bucket_size: int | None = setting(
        None,
        help="stage 3: most parameter elements gathered ahead of use, or kept from forward to backward in their place;"
        " 0 gathers each unit when it is needed; without it, as many as the largest unit has, with more than 32"
        " data-parallel processes at least 262144 for each",
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
        " 0 releases what is not needed next and has no room in the prefetch window",
        unit="elements",
        aliases=("stage3-max-reuse-distance",),
        ge=0,
    )
    zero3_reshard_after: Literal["microbatch", "window"] = setting(
        "microbatch",
        help="stage 3: when a unit's parameters go again: after every forward and backward that reads them, or after a"
        " window of the schedule, in which they stay gathered as far as max_live_parameters allows",
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
    enable_sanity_checks: bool = setting(
        False,
        help="stage 3: compare before every gather that all processes gather the same, which gloo does anyway (a wait"
        " for the device and for the slowest process each time), and refuse changes in GatheredParameters without a"
        " modifier_rank (a copy of the parameters)",
    )
    offload_optimizer: Literal["none", "cpu", "nvme", "auto"] = setting(
        "none",
        help="stages 1 to 3: home of master weights, moments and reduced gradients; cpu: host memory, where the host's"
        " processors update them; nvme: files under nvme_path, from where master weights and moments come to host"
        " memory for their update, a sub-group at a time, while reduced gradients stay in host memory, unless"
        " offload_gradients_nvme moves them; auto: none, or cpu where the plan does not fit without or is faster so",
    )
    offload_optimizer_ratio: float = setting(
        1.0,
        help="the part of the optimizer's elements that offload_optimizer moves; the others stay on the device, bucket"
        " by bucket",
        aliases=("optimizer-offload-fraction",),
        ge=0,
        le=1,
    )
    offload_optimizer_nvme_ratio: float = setting(
        1.0,
        help="the part of what offload_optimizer nvme moves that lives in files; the rest lives in host memory, bucket"
        " by bucket",
        gt=0,
        le=1,
    )
    offload_gradients_nvme: bool = setting(
        False,
        help="reduced gradients too are in files, where offload_optimizer nvme moves their master weights and moments:"
        " written after each reduction, and read for later ones, for the norm and for the update",
    )
    nvme_path: Path | None = setting(
        None,
        help="the folder, best on a local disk, in which each process makes its files of what offload_optimizer nvme"
        " and offload_param nvme move; they have no names there, and their space is free again when the process ends",
    )
    offload_buffer_count: int = setting(
        0,
        help="the buffers of host memory through which states in files pass, each as large as one kind of state of a"
        " sub-group; 0: as many as one sub-group needs, and as many again for each of offload_pipeline_read and"
        " offload_pipeline_write",
        unit="buffers",
        ge=0,
    )
    offload_pipeline_read: bool = setting(True, help="read the next sub-group's states from files while one is updated")
    offload_pipeline_write: bool = setting(
        True, help="write an updated sub-group's states to files while the next is updated"
    )
    aio_block_size: int = setting(
        1 << 20,
        help="files of states are read and written in blocks of this size, each with a checksum",
        unit="bytes",
        ge=4096,
        le=1 << 30,
    )
    aio_queue_depth: int = setting(
        8,
        help="the blocks of files that a process reads and writes at the same time",
        unit="blocks",
        ge=1,
        le=1024,
    )
    delayed_parameter_update: bool = setting(
        False,
        help="let the update of what offload_optimizer moves run beside the next step: a gradient changes the weights"
        " of the step after the next; not the same training (ZeRO-Offload, section 5.2)",
    )
    delayed_parameter_update_start: int = setting(
        40,
        help="the optimizer's first steps, in which gradients change much, that delayed_parameter_update leaves alone",
        unit="steps",
        ge=0,
    )
    offload_param: Literal["none", "cpu", "nvme", "auto"] = setting(
        "none",
        help="stage 3: home of partitioned parameters; cpu: host memory, from where a partition travels to the device"
        " ahead of its gather; nvme: files under nvme_path, from where it comes to host memory before; auto: none, or"
        " cpu as with offload_optimizer",
    )
    offload_param_buffer_count: int = setting(
        5,
        help="the buffers of host memory through which partitions in files pass, each as large as that of a bucket",
        unit="buffers",
        ge=1,
    )
    offload_param_max_in_cpu: int = setting(
        0,
        help="the elements of partitions that stay in host memory on a process with offload_param nvme, whole units",
        unit="elements",
        ge=0,
    )
    offload_pin_memory: bool = setting(
        True,
        help="on GPUs, pin the host memory of what is offloaded, so that copies run beside the computation; false:"
        " the system may move it, and copies wait",
    )
    leaf_module_classes: tuple[str, ...] = setting(
        (
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ),
        help="stage 3: classes, by name or full name, of leaf modules: all parameters in one are gathered when its"
        " forward begins, so that processes may use different ones of them",
    )
    leaf_module_names: tuple[str, ...] = setting((), help="stage 3: names of leaf modules")
    leaf_module_name_suffixes: tuple[str, ...] = setting((), help="stage 3: ends of the names of leaf modules")

    @property
    def offloads(self) -> bool:
        """True if model states live in host memory or in files, or may do so by a plan."""
        return {self.offload_optimizer, self.offload_param} != {"none"}


Fp8Format = Literal["e4m3", "hybrid"]
AmaxAlgorithm = Literal["most_recent", "max"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PrecisionConfig:
    """The working precision; with fp16 and bf16, master weights and moments are fp32 unless they are set to bf16."""

    precision: Literal["fp64", "fp32", "bf16", "fp16"] = setting(
        "fp32", help="number format of parameters and computation; --fp64 --fp32 --bf16 --fp16 for short"
    )
    accumulate_allreduce_grads_in_fp32: bool = setting(
        False, help="with bf16 or fp16, add up and reduce gradients in fp32; 2 more bytes a gradient element"
    )
    bf16_master_weights: bool = setting(
        False,
        help="with bf16, the optimizer updates the bf16 parameters themselves, and its moments are bf16 too: 8 bytes a"
        " parameter instead of 16, but an update below 1/512 of a weight is lost",
    )
    fp8_format: Fp8Format | None = setting(
        None,
        help="with bf16, make the matrix products of the blocks' linear layers of 8-bit numbers; hybrid: e4m3, but e5m2"
        " for gradients of outputs; --fp8 for hybrid",
    )
    loss_scale: float | None = setting(None, help="fp16: constant loss scale; without it, the scale is dynamic", gt=0)
    initial_loss_scale: float = setting(2.0**32, help="fp16: first dynamic loss scale", gt=0)
    min_loss_scale: float = setting(
        1.0, help="fp16: the dynamic loss scale never gets smaller; 0: it has no least value", ge=0
    )
    loss_scale_window: int = setting(
        1000, help="fp16: steps without an overflow before the scale doubles", unit="steps", ge=1
    )
    hysteresis: int = setting(2, help="fp16: overflows before the scale is halved", unit="steps", ge=1)
    consecutive_hysteresis: bool = setting(
        False, help="fp16: a step without an overflow refills the hysteresis; false: only a growing scale does"
    )
    max_skipped_steps_at_min_loss_scale: int = setting(
        20,
        help="fp16, or with check_grad_overflow: after this many skipped steps in a row at the minimum scale the run"
        " saves and stops",
        unit="steps",
        ge=1,
    )
    check_for_nan_in_loss_and_grad: bool = setting(
        True,
        help="stop at a loss or gradient that is not finite, naming where it came from; the step's update is not made;"
        " false: train on with it (fp16 overflows skip their step all the same)",
    )
    tf32: bool = setting(
        False,
        help="with fp32 on GPUs, round the factors of matrix products to TF32 (10 bits of mantissa instead of 23),"
        " which is about ten times as fast; without it, products are exact",
    )
    check_grad_overflow: bool = setting(
        False,
        help="skip a step whose gradients are not finite, and train on, as fp16 does anyway; false: such a step is left"
        " to check_for_nan_in_loss_and_grad",
    )
    fp8_cache_weights: bool = setting(
        False,
        help="with fp8_format, make the 8-bit form of weights once a step, not for every product: 2 more bytes a"
        " weight; in stage 3 the scales alone are kept",
    )
    fp8_recipe: Literal["tensorwise", "delayed"] = setting(
        "tensorwise",
        help="where scales of 8-bit numbers come from; tensorwise: the tensor itself; delayed: the maxima of the steps"
        " before, and no pass over the tensor looks for its maximum first",
    )
    fp8_margin: int = setting(
        0, help="delayed scaling: scales are divided by 2 to this power", unit="powers of 2", ge=0, le=32
    )
    fp8_amax_history_len: int = setting(1, help="delayed scaling: steps whose maxima are kept", unit="steps", ge=1)
    fp8_amax_compute_algo: AmaxAlgorithm = setting(
        "most_recent", help="delayed scaling: the maximum of the last step, or the largest of all that are kept"
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActivationConfig:
    """Recomputation of activations, and the place where their checkpoints are kept (ZeRO, sections 4.2 and 6)."""

    recompute_granularity: Literal["none", "selective", "full", "auto"] = setting(
        "none",
        help="what backward computes again; selective: the attention core; full: whole layers; auto: as little as"
        " fits, by a plan of the run at its start",
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
        " auto: where the plan does not fit without",
        aliases=("distribute-saved-activations", "distribute-checkpointed-activations"),
    )
    checkpoint_in_cpu: bool | Literal["auto"] = setting(
        False,
        help="full recomputation: keep checkpoints, or this process's slices of them, in host memory;"
        " auto: where the plan does not fit without",
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LimitConfig:
    """Limits on the time that processes wait for each other, at the start and in collectives."""

    distributed_timeout_minutes: float = setting(
        10.0, help="a collective that waits longer than this ends the run", unit="minutes", gt=0
    )
    distributed_join_timeout_minutes: float | None = setting(
        None,
        help="processes wait this long for each other at the start; without it, as --distributed-timeout-minutes, and"
        " at least 10",
        unit="minutes",
        gt=0,
    )
    distributed_timeout_seconds_after_init: float | None = setting(
        None,
        help="a collective that waits longer than this ends the run, in place of --distributed-timeout-minutes",
        unit="seconds",
        gt=0,
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """The update rule and the learning rate; weight decay is not applied to biases and layer norms."""

    optimizer: Literal[
        "adam",
        "sgd",
        "adagrad",
        "adadelta",
        "adamax",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "asgd",
        "lamb",
        "adafactor",
        "lion",
        "adamw8bit",
        "adam8bit",
        "lion8bit",
    ] = setting(
        "adam",
        help="update rule, torch's of this name; adam is AdamW, whose weight decay is decoupled; lamb:"
        " Adam's direction, in a step as long as a parameter is large; adafactor: with averages of rows and columns in"
        " place of moments; lion: steps along signs; adamw8bit, adam8bit, lion8bit: with moments in 8 bits, by"
        " bitsandbytes (an extra of this name)",
    )
    optimizer_params: tuple[str, ...] = setting(
        (),
        help="other parameters of the optimizer by torch's names, such as nesterov=true alpha=0.95;"
        " decoupled_weight_decay=false makes plain Adam of adam",
    )
    lr: float = setting(help="learning rate after warm-up", gt=0)
    min_lr: float = setting(0.0, help="learning rate at the end of the decay", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD", "LRRangeTest", "OneCycle"] = (
        setting(
            "linear",
            help="how the learning rate goes from lr to min_lr; WSD: it stays at lr, and falls at the end; LRRangeTest:"
            " it rises from lr on, to look for a good one; OneCycle: from min_lr to lr and back, and then lower",
        )
    )
    lr_decay_iters: int | None = setting(
        None,
        help="step at which min_lr is reached; or give lr_decay_samples or lr_decay_tokens; without it, the run's last",
        unit="steps",
        ge=1,
    )
    lr_warmup_iters: int = setting(0, help="steps in which the learning rate rises to lr", unit="steps", ge=0)
    lr_warmup_fraction: float | None = setting(
        None,
        help="the same as a part of the decay's length",
        unit="fraction",
        aliases=("warmup",),
        ge=0,
        lt=1,
    )
    lr_warmup_init: float = setting(0.0, help="learning rate that the warm-up begins with", ge=0)
    lr_warmup_type: Literal["linear", "log"] = setting(
        "linear", help="how the learning rate rises: in a straight line, or with the logarithm of the step"
    )
    weight_decay: float = setting(
        0.01, help="weight decay, times the learning rate each step; of the optimizers that have one", ge=0
    )
    adam_beta1: float = setting(
        0.9, help="decay of the first moment, of adam and its kin; so are the next two", ge=0, lt=1
    )
    adam_beta2: float = setting(0.999, help="decay of the second moment", ge=0, lt=1)
    adam_eps: float = setting(1e-8, help="added to the root of the second moment", gt=0)
    lion_beta1: float = setting(
        0.95, help="weight of lion's average of gradients, against the last one, in its step", ge=0, lt=1
    )
    lion_beta2: float = setting(0.98, help="decay of lion's average of gradients", ge=0, lt=1)
    sgd_momentum: float = setting(0.9, help="momentum of sgd", ge=0)
    param_groups: tuple[str, ...] = setting(
        (),
        help="learning rate after warm-up, and weight decay, of the parameters whose names a pattern matches, the first"
        ' one that does, such as "*.bias weight_decay=0" "embedding.* lr=1e-4"; a rate follows the schedule of lr',
    )
    clip_grad: float = setting(1.0, help="largest global gradient norm; 0 clips nothing", ge=0)
    override_opt_param_scheduler: bool = setting(
        False,
        help="on resuming take the learning-rate schedule from here, whatever the checkpoint has",
        aliases=("override-lr-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False,
        help="on resuming take the learning-rate schedule from the checkpoint, whatever is given here",
        aliases=("use-checkpoint-lr-scheduler",),
    )
    lr_decay_params: tuple[str, ...] = setting(
        (),
        help="other parameters of the styles LRRangeTest and OneCycle by DeepSpeed's names, such as"
        " cycle_first_step_size=1000",
    )
    lr_decay_samples: int | None = setting(
        None,
        help="samples of all steps before min_lr is reached; the rates then depend on samples",
        unit="samples",
        ge=1,
    )
    lr_decay_tokens: int | None = setting(
        None, help="the same in tokens, of which a sample has seq_length", unit="tokens", ge=1
    )
    lr_warmup_samples: int = setting(0, help="samples in which the learning rate rises to lr", unit="samples", ge=0)
    lr_warmup_tokens: int = setting(0, help="the same in tokens", unit="tokens", ge=0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "exponential", help="WSD: how the learning rate falls at the end"
    )
    lr_wsd_decay_iters: int | None = setting(
        None, help="WSD: last steps of the decay's length, in which the learning rate falls", unit="steps", ge=1
    )
    lr_wsd_decay_samples: int | None = setting(None, help="WSD: the same in samples", unit="samples", ge=1)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = setting(
        "constant", help="how weight decay goes from start_weight_decay to end_weight_decay over the run"
    )
    start_weight_decay: float | None = setting(None, help="weight decay of the first step, if it increases", ge=0)
    end_weight_decay: float | None = setting(None, help="weight decay at the end of the run, if it increases", ge=0)
    decoupled_lr: float | None = setting(
        None, help="learning rate after warm-up of the word embedding and the head; without it, lr", gt=0
    )
    decoupled_min_lr: float | None = setting(
        None, help="their learning rate at the end of the decay, with decoupled_lr; without it, min_lr", ge=0
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReportConfig:
    """Settings of what is reported about the steps, beside the losses of a run."""

    timing_log_level: int = setting(
        0,
        help="parts of a step that are timed: 0: the step; 1: also parts that it has once, such as forward and"
        " backward, the reduction of gradients, the optimizer; 2: also parts of those, such as every pass, message,"
        " gather and update",
        beyond="there are three levels",
        ge=0,
        le=2,
    )
    timing_log_option: Literal["max", "minmax", "all"] = setting(
        "minmax", help="which ranks' times are shown of a part: the slowest's; also the fastest's; or all of them"
    )
    wandb_project: str | None = setting(
        None,
        help="Weights & Biases: the project that the figures go to; without it, nothing is written there",
        aliases=("wandb-project-name",),
    )
    wandb_exp_name: str | None = setting(
        None, help="Weights & Biases: the name of the run; without it, one that is made up there"
    )
    wandb_entity: str | None = setting(
        None,
        help="Weights & Biases: the user or team that the project belongs to; without it, the user's default",
        aliases=("wandb-entity-name",),
    )
    wandb_group: str | None = setting(None, help="Weights & Biases: a name for runs that belong together")
    wandb_save_dir: Path | None = setting(
        None, help="Weights & Biases: folder whose wandb/ gets its files; without it, the folder for checkpoints"
    )
    mlflow_experiment: str | None = setting(
        None, help="MLflow: the experiment that the figures go to; without it, nothing is written there"
    )
    mlflow_run_name: str | None = setting(
        None, help="MLflow: the name of the run; without it, one that is made up there"
    )
    mlflow_tracking_uri: str | None = setting(
        None,
        help="MLflow: the store or server; without it, the database mlflow/mlflow.db below the folder for checkpoints",
    )

    @property
    def tracks(self) -> bool:
        """True if figures go to a tracker of experiments."""
        return self.wandb_project is not None or self.mlflow_experiment is not None


# {section that both doors have: its settings}
SETTINGS: Mapping[type, tuple[FieldInfo, ...]] = MappingProxyType(
    {
        cls: describe("", cls)
        for cls in (ZeroConfig, PrecisionConfig, ActivationConfig, LimitConfig, ReportConfig, CurriculumConfig)
    }
)
