"""The configuration of a run: its sections of settings in one object.

A builder takes the section that it needs; only the programs, the rules and the derived figures take the whole.
"""

from dataclasses import field
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from megazero.config.curriculum import CurriculumConfig
from megazero.config.engine_sections import (
    ActivationConfig,
    LimitConfig,
    OptimizerConfig,
    PrecisionConfig,
    ReportConfig,
    ZeroConfig,
)
from megazero.config.fields import STRICT, FieldInfo, describe, setting
from megazero.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingConfig:
    """Batch sizes, length of the run and evaluation; in a step each data-parallel process runs its micro-batches."""

    micro_batch_size: int = setting(
        help="samples of one forward pass on one data-parallel process",
        unit="samples",
        aliases=("batch-size",),
        ge=1,
    )
    global_batch_size: int | None = setting(
        None, help="samples of one step; without it, micro_batch_size x data-parallel size", unit="samples", ge=1
    )
    train_iters: int | None = setting(
        None, help="length of the run; or give train_samples or train_tokens", unit="steps", ge=1
    )
    train_samples: int | None = setting(None, help="length of the run; or give train_iters", unit="samples", ge=1)
    seed: int = setting(1234, help="fixes initial weights, order of the samples and dropout", ge=0, lt=2**32)
    eval_iters: int = setting(100, help="global batches of one evaluation; 0 evaluates nothing", unit="steps", ge=0)
    eval_interval: int = setting(1000, help="steps between evaluations", unit="steps", ge=1)
    eval_at_start: bool = setting(False, help="evaluate before the first step as well")
    exit_interval: int | None = setting(
        None, help="save and exit at the next step that this divides", unit="steps", ge=1
    )
    exit_duration_in_mins: float | None = setting(
        None, help="save and exit once the run has taken this long", unit="minutes", gt=0
    )
    kill_switch_path: Path | None = setting(
        None,
        help="save and exit once there is a file of this name, which rank 0 looks for at every step; while it is there"
        " no run starts",
    )
    trigger_path: Path | None = setting(
        None,
        help="folder that rank 0 looks into at every step: a file named save there makes the run save, and is removed"
        " then; a file named exit makes it save and exit, and while it is there no run starts",
    )
    compile: Literal["auto", "on", "max", "off"] = setting(
        "auto",
        help="compile transformer blocks with torch.compile, which takes some seconds before the first step; auto is on"
        " for GPUs, off on CPUs and where a ledger is kept; max times several kernels for every piece on the GPU and"
        " takes the fastest, which takes minutes more and is unproven: no GPU has shown what it gains",
    )
    attention_backend: Literal["auto", "flash", "flash3", "fused", "efficient", "unfused"] = setting(
        "auto",
        help="kernel that computes attention: FlashAttention, its version 3 for Hopper GPUs (flash3, from the package"
        " flash_attn_interface, and unproven: no GPU has shown what it gains), cuDNN's (fused), the memory-efficient"
        " one, or plain products; auto is the fastest of torch's own on the GPU, measured at the start, and torch's"
        " choice on CPUs",
    )
    exit_status_when_stopped: int | None = setting(
        None,
        help="exit status of a run that has saved and stopped before its last step: by a signal, at exit_interval or"
        " after exit_duration_in_mins, kill_switch_path or trigger_path; without it 0, as of a run that has finished",
        beyond="0 to 3 stand for finished runs and of errors, those above 125 of signals",
        ge=4,
        le=125,
    )
    deterministic_mode: bool = setting(
        False,
        help="compute the same bits in every run of the same layout on GPUs, so that resuming is bitwise there too;"
        " slower; on CPUs every run does",
    )
    compile_num_layers: int = setting(
        1,
        help="consecutive transformer blocks that are compiled as one graph, for fewer calls of the host; ZeRO stage 3"
        " then holds the parameters of as many blocks at a time. Unproven: no GPU has shown what it gains",
        unit="layers",
        ge=1,
    )
    enable_cuda_graph: bool = setting(
        False,
        help="record what forward and backward of every compiled block launch on the GPU, in the first step, and repeat"
        " each by one call of the host; takes the memory of the blocks' gradients and of the temporaries of one block's"
        " backward besides. Unproven: no GPU has shown what it gains",
    )
    train_tokens: int | None = setting(
        None,
        help="length of the run; beside train_iters or train_samples, the run ends at whichever comes first",
        unit="tokens",
        ge=1,
    )
    rampup_batch_size: tuple[str, ...] = setting(
        (),
        help="START INCREMENT SAMPLES: the global batch grows from START to global_batch_size by INCREMENT, over so"
        " many samples",
        unit="samples",
    )
    step_batch_size_schedule: tuple[str, ...] = setting(
        (),
        help='global batch sizes, each with the number of tokens from which on it applies: "0:768 250B:1536"; instead'
        " of global_batch_size, or beside the last of them",
        unit="samples",
    )
    skip_train_iteration_range: tuple[str, ...] = setting(
        (),
        help="spans A-B of steps, or single steps, counted from 1, that do not train: their samples are used up unread,"
        " and the learning rate stands still",
        unit="steps",
        aliases=("iterations-to-skip",),
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParallelConfig:
    """Degrees of parallelism; the data-parallel degree is the world size divided by the other two."""

    tensor_model_parallel_size: int = setting(
        1, help="processes that share every layer", unit="processes", aliases=("model-parallel-size",), ge=1
    )
    pipeline_model_parallel_size: int = setting(
        1,
        help="pipeline stages: processes that have consecutive layers each",
        unit="processes",
        aliases=("pipe-parallel-size",),
        ge=1,
    )
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None,
        help="layers of a chunk, on average, which gives a pipeline stage several chunks, taken in turns (the"
        " interleaved schedule); without it, one chunk a pipeline stage",
        unit="layers",
        ge=1,
    )
    pipeline_schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zero-bubble"] = setting(
        "auto",
        help="order of forwards and backwards; auto is interleaved where a pipeline stage has several chunks, else"
        " 1f1b",
    )
    pipeline_split: str | None = setting(
        None,
        help="layers of every chunk, in the order of the model, such as 5,6,5,2; without it, as evenly as the"
        " embedding's and the vocabulary head's own costs allow",
    )
    sequence_parallel: bool = setting(
        False,
        help="split what lies between tensor-parallel regions over the processes of the group, by tokens: norms,"
        " dropout, residuals and checkpoints",
    )
    rank_order: Literal["pp-dp-tp", "dp-pp-tp", "pp-tp-dp", "tp-pp-dp", "dp-tp-pp", "tp-dp-pp"] = setting(
        "pp-dp-tp",
        help="how ranks are dealt out to pipeline stages, data-parallel copies and tensor-parallel slices: ranks along"
        " the axis named last are neighbours",
    )
    allow_tensor_parallel_across_nodes: bool = setting(
        False, help="let a tensor-parallel group lie on several nodes, over the slower links between them"
    )
    distributed_backend: Literal["auto", "nccl", "gloo"] = setting(
        "auto", help="what carries the collectives; auto is nccl on GPUs, gloo on CPUs, and so is nccl"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", help="where tensors live; auto is one GPU a process if the machine has GPUs, else the CPU"
    )
    cpu_threads: int | None = setting(
        None,
        help="threads that a process computes with on the CPU; without it, OMP_NUM_THREADS (torchrun's own 1"
        " for several processes doesn't count), else cores of the node / processes on it, at least 1; a process alone"
        " on its node: as torch chooses",
        unit="threads",
        ge=1,
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """The corpus and its tokenizer; the k-th sample depends on the corpus, the seed and k alone."""

    data_path: tuple[str, ...] = setting(
        (), help="prefix of a .bin/.idx pair, or a mixture: WEIGHT PREFIX WEIGHT PREFIX ..."
    )
    split: str | None = setting(
        None,
        help="shares of training, validation and test documents of --data-path, at least a document each; 969,30,1"
        " where it is left out",
        unit="any common unit",
    )
    train_data_path: tuple[str, ...] = setting(
        (), help="a corpus for training alone, used whole, instead of --data-path; takes what --data-path takes"
    )
    valid_data_path: tuple[str, ...] = setting((), help="the same for evaluation, beside --train-data-path")
    test_data_path: tuple[str, ...] = setting(
        (), help="the same for the evaluation on test data, beside --train-data-path"
    )
    train_weighted_split_paths: tuple[str, ...] = setting(
        (),
        help='a group of parts of corpora for training, instead of --data-path: "NAME: WEIGHT START:END PREFIX, WEIGHT'
        ' START:END PREFIX", START and END being shares of a corpus from 0 to 1',
    )
    valid_weighted_split_paths: tuple[str, ...] = setting(
        (),
        help="groups of parts of corpora in the same form; each is evaluated by itself and reported by its name",
    )
    test_weighted_split_paths: tuple[str, ...] = setting(
        (), help="the same for the evaluation on test data, beside --train-weighted-split-paths"
    )
    data_skip_samples: tuple[str, ...] = setting(
        (), help="spans A-B of training samples that are passed over, A and B included, counted from 0"
    )
    mmap_bin_files: bool = setting(True, help="map token files into memory; off: read them by system calls")
    data_cache_path: Path | None = setting(
        None, help="folder for the indexes of corpora in object stores (s3://...); without it the user's cache folder"
    )
    mock_data: bool = setting(False, help="train on made-up tokens instead of a corpus; for timings")
    tokenizer_type: (
        Literal["GPT2BPETokenizer", "SentencePieceTokenizer", "ByteTokenizer", "HuggingFaceTokenizer", "TikTokenizer"]
        | None
    ) = setting(None, help="tokenizer that made the corpus; without it, that of the corpus's own description")
    tokenizer_model: Path | None = setting(
        None,
        help="SentencePieceTokenizer: model file; HuggingFaceTokenizer: tokenizer.json, or a folder that has one;"
        " TikTokenizer: file of ranks",
        aliases=("tokenizer-name-or-path", "tokenizer-file"),
    )
    vocab_file: Path | None = setting(None, help="GPT2BPETokenizer: vocab.json")
    merge_file: Path | None = setting(None, help="GPT2BPETokenizer: merges.txt")
    tiktoken_pattern: Literal["v1", "v2", "gpt2", "cl100k", "o200k", "llama3"] | None = setting(
        None,
        help="TikTokenizer: rule by which text is cut into words, and the special tokens: v1 and v2 (without it) of"
        " Megatron's JSON lists, the others of .tiktoken files; Mistral's tekken.json has its own",
    )
    tiktoken_num_special_tokens: int = setting(
        1000, help="TikTokenizer: special tokens in front of the ranks of a JSON list", unit="tokens", ge=7
    )
    fim_data: bool = setting(
        False,
        help="rearrange samples so that the model learns to fill in the middle of a text: documents become prefix,"
        " suffix, middle with tokens in front of each; by the run's tokenizer, which must have these tokens",
    )
    fim_rate: float = setting(0.5, help="share of documents in samples that are rearranged", ge=0, le=1)
    fim_spm_rate: float = setting(
        0.5, help="share of these in the order suffix, prefix, middle, the others prefix, suffix, middle", ge=0, le=1
    )
    fim_split_sample: str | None = setting(
        None, help="token between parts of a document, such as files of a repository, which are rearranged one by one"
    )
    fim_fragment_rate: float | None = setting(
        None,
        help="share of such parts that are rearranged, in documents that are; without it, fim_rate",
        aliases=("fragment-fim-rate",),
        ge=0,
        le=1,
    )
    fim_no_prefix: str | None = setting(None, help="leave text as it is that begins with this")
    fim_prefix_token: str = setting("<fim_prefix>", help="token in front of a prefix")
    fim_middle_token: str = setting("<fim_middle>", help="token in front of a middle")
    fim_suffix_token: str = setting("<fim_suffix>", help="token in front of a suffix")
    fim_pad_token: str = setting("<fim_pad>", help="token that fills what has become shorter")
    fim_eod_token: str | None = setting(
        None, help="token at which samples are cut into documents; without it, the tokenizer's end of a document"
    )
    num_workers: int = setting(
        2, help="steps whose batches are read ahead in the background; 0 reads them when needed", unit="steps", ge=0
    )
    eod_mask_loss: bool = setting(False, help="leave positions that hold the end-of-document token out of the loss")
    answer_loss_mask: Literal["auto", "on", "off"] = setting(
        "auto",
        help="count only the tokens in the loss that corpora's masks mark as answers: of corpora that were preprocessed"
        " as dialogues (auto), of all corpora, which then need a mask (on), or of none (off)",
    )
    reset_position_ids: bool = setting(
        False, help="count positions from 0 in every document of a sample, not from the sample's first token"
    )
    reset_attention_mask: bool = setting(
        False,
        help="attend within documents only; costs a mask of micro_batch_size x seq_length^2 elements of --precision for"
        " every micro-batch in flight, and the kernels that take none (--attention-backend flash)",
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Checkpoints, which fit every layout; they are folders below `save`, whose file `latest` names the newest."""

    save: Path | None = setting(None, help="folder for checkpoints; without it, nothing is saved")
    load: Path | None = setting(
        None,
        help="folder to resume from, a run's or one of its checkpoints; a missing or empty one is an error, unless it"
        " is that of --save",
    )
    save_interval: int | None = setting(
        None, help="steps between checkpoints; without it, only at the end of the run", unit="steps", ge=1
    )
    async_save: bool = setting(
        False,
        help="save in a thread beside training: a copy of the state in host memory, which takes as much as this rank"
        " saves; a save that fails ends the run at the next step",
    )
    no_save_optim: bool = setting(False, help="save parameters only; such a checkpoint can't be resumed bitwise")
    no_load_optim: bool = setting(False, help="take no optimizer state, start it anew")
    finetune: bool = setting(
        False,
        help="take parameters only and start a new run at step 0: no optimizer state, no position in the data; needs a"
        " checkpoint",
    )
    lora_random_base: bool = setting(
        False, help="train adapters beside initial weights, which nothing has trained, where no checkpoint is loaded"
    )
    begin_without_checkpoint: bool = setting(
        False, help="start a new run from initial weights where --load is missing or holds no checkpoint"
    )
    keep_last: int | None = setting(
        None,
        help="newest checkpoints of the run that stay when one has been saved; without it, all, or with keep_every one",
        unit="checkpoints",
        ge=1,
    )
    keep_every: int | None = setting(
        None,
        help="checkpoints of steps that this divides stay for good, and others go as keep_last sets",
        unit="steps",
        aliases=("save-retain-interval",),
        ge=1,
    )
    strict_load: bool = setting(
        False,
        help="end with an error if the newest checkpoint under load is damaged; without it, it is set aside and the"
        " next sound one is taken",
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoggingConfig:
    """Reports on the console, in TensorBoard, and in a file of one JSON object a step."""

    log_interval: int = setting(100, help="steps between lines on the console", unit="steps", ge=1)
    metrics_file: Path | None = setting(
        None, help="file that gets one JSON object a step, and one an evaluation, at full precision"
    )
    tensorboard_dir: Path | None = setting(
        None, help="folder for TensorBoard; without it and --tensorboard, none is written"
    )
    tensorboard_queue_size: int = setting(
        1000, help="TensorBoard: points kept before they are written", unit="points", ge=1
    )
    tensorboard_log_interval: int = setting(1, help="TensorBoard: steps between points", unit="steps", ge=1)
    log_timers_to_tensorboard: bool = setting(
        False,
        help="TensorBoard and metrics file: seconds spent in each part of a step, as timing_log_level sets; every"
        " log_interval steps",
    )
    log_validation_ppl_to_tensorboard: bool = setting(False, help="TensorBoard: perplexity beside the validation loss")
    ledger: bool = setting(
        False, help="keep the ledger: live memory by category and traffic by axis, of every step; slows the step down"
    )
    ledger_limit: float | None = setting(
        None,
        help="stop the run as soon as more than this is alive on a process's device, as the ledger counts it,"
        " which this keeps",
        unit="MiB",
        gt=0,
    )
    ledger_dir: Path | None = setting(
        None, help="folder for the ledger's pictures, one page a process: of the second step, then every log_interval"
    )
    pipeline_trace_dir: Path | None = setting(
        None,
        help="folder for traces of steps, when each pipeline stage computed what, as pictures (.svg) and figures"
        " (.json): of the second step, every log_interval-th and the last",
    )
    log_memory_to_tensorboard: bool = setting(False, help="TensorBoard: bytes of each kind of model state, and peak")
    eval_sample_tokens: int = setting(
        0,
        help="tokens of a text to generate at every evaluation of validation, by the tokenizer, for console and"
        " TensorBoard; each takes a forward pass",
        unit="tokens",
        ge=0,
    )
    tensorboard: bool = setting(
        False, help="write for TensorBoard into tensorboard/ below --save; --tensorboard-dir names another folder"
    )
    log_params_norm: bool = setting(
        False,
        help="report the norm of all trained parameters, each counted once; every log_interval steps",
    )
    log_num_zeros_in_grad: bool = setting(
        False, help="report how many elements of the gradient are zero; every log_interval steps"
    )
    log_layer_grad_norms: bool = setting(
        False,
        help="trackers and metrics file: the norm of the gradient in every layer, before clipping; every log_interval"
        " steps",
    )
    log_optimizer_states_to_tensorboard: bool = setting(
        False,
        help="TensorBoard and metrics file: l1 and l2 norms and largest elements of the optimizer's variance, its"
        " square root, its momentum, and the master weights; every log_interval steps",
    )
    profile: bool = setting(
        False,
        help="profile the steps after profile_step_start up to profile_step_end: CUDA's profiler is on then, as nsys"
        " --capture-range=cudaProfilerApi expects it, or torch's with use_pytorch_profiler",
    )
    profile_step_start: int = setting(10, help="steps of the run before the first that is profiled", unit="steps", ge=0)
    profile_step_end: int = setting(12, help="the last step that is profiled", unit="steps", ge=1)
    profile_ranks: tuple[str, ...] = setting(("0",), help="ranks that are profiled")
    record_memory_history: bool = setting(
        False,
        help="on GPUs, record what allocates memory on the ranks that are profiled, from before the model is made to"
        " the end of the profile, and write it for torch's viewer of memory",
    )
    memory_snapshot_path: Path = setting(
        Path("snapshot.pickle"), help="file for that; if several ranks are profiled, with the rank before its suffix"
    )
    use_pytorch_profiler: bool = setting(
        False,
        help="profile with torch's profiler, which writes a trace for each rank into profile/ below --tensorboard-dir,"
        " or --save without one",
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """The settings of one run.  model, training and optimizer must be given, since some of theirs have no default."""

    model: ModelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    reports: ReportConfig = field(default_factory=ReportConfig)


# The sections in the order of `--help` and of the YAML file.
SECTIONS: tuple[tuple[str, type], ...] = (
    ("model", ModelConfig),
    ("training", TrainingConfig),
    ("optimizer", OptimizerConfig),
    ("precision", PrecisionConfig),
    ("parallel", ParallelConfig),
    ("limits", LimitConfig),
    ("zero", ZeroConfig),
    ("activations", ActivationConfig),
    ("data", DataConfig),
    ("curriculum", CurriculumConfig),
    ("checkpoint", CheckpointConfig),
    ("logging", LoggingConfig),
    ("reports", ReportConfig),
)


# Every setting of every section; names are unique over all sections, so a flag names no section.
FIELDS: tuple[FieldInfo, ...] = tuple(info for section, cls in SECTIONS for info in describe(section, cls))
