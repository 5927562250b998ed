"""Lists flags of Megatron-LM and Megatron-DeepSpeed that are no settings of megazero, so that launch scripts work.

There are five tables of flags, and a sixth of legal alternatives.  A *shorthand* sets a setting to a value.  An
*accepted* flag would change nothing in megazero, and causes a one-line notice.  A *fixed* flag is accepted with the
values that describe what megazero does in any case, and refused with any other; a *following* flag too, whose one value
follows from the settings.  A *refused* flag requests an effect that megazero doesn't have: it is an error, because a
run that ignores it would not be the requested one.  Names are written without the two dashes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config import derived
from megazero.config.run import RunConfig


@dataclass(frozen=True)
class Shorthand:
    """A flag that sets `field` to `value`; another value beside it is an error, unless it is in `gives_way_to`.

    beside: the flag without which it means nothing of the kind; "" for none.
    """

    field: str
    value: str
    gives_way_to: tuple[str, ...] = ()
    beside: str = ""


SHORTHANDS: Mapping[str, Shorthand] = MappingProxyType(
    {
        "fp64": Shorthand("precision", "fp64"),
        "fp32": Shorthand("precision", "fp32"),
        "bf16": Shorthand("precision", "bf16"),
        "fp16": Shorthand("precision", "fp16"),
        "fp8": Shorthand("fp8_format", "hybrid", gives_way_to=("e4m3",)),
        "fp8-hybrid": Shorthand("fp8_format", "hybrid"),
        "fp8-e4m3": Shorthand("fp8_format", "e4m3"),
        "use-distributed-optimizer": Shorthand("zero_stage", "1", gives_way_to=("2", "3")),
        "use-torch-fsdp2": Shorthand("zero_stage", "3"),
        "overlap-grad-reduce": Shorthand("overlap_comm", "true"),
        "recompute-activations": Shorthand("recompute_granularity", "selective"),
        "checkpoint-activations": Shorthand("recompute_granularity", "full"),
        "enable-zbh1-pipeline": Shorthand("pipeline_schedule", "zero-bubble"),
        "no-pipeline-parallel": Shorthand("pipeline_model_parallel_size", "1"),
        "use-tp-pp-dp-mapping": Shorthand("rank_order", "dp-pp-tp"),
        "optimizer-cpu-offload": Shorthand("offload_optimizer", "cpu"),
        "cpu-offload-optimizer": Shorthand("offload_optimizer", "cpu"),
        "no-pin-cpu-grads": Shorthand("offload_pin_memory", "false"),
        "no-pin-cpu-params": Shorthand("offload_pin_memory", "false"),
        "cpu-optimizer": Shorthand("offload_optimizer", "cpu"),
        "grad-reduce-in-bf16": Shorthand("accumulate_allreduce_grads_in_fp32", "false"),
        "use-rotary-position-embeddings": Shorthand("position_embedding_type", "rope"),
        "data-efficiency-curriculum-learning": Shorthand("curriculum_learning", "true"),
        "no-position-embedding": Shorthand("position_embedding_type", "none", gives_way_to=("rope", "alibi")),
    }
)

# {spelling of a setting: what it also sets, unless a flag or a file sets that}
IMPLIED: Mapping[str, Shorthand] = MappingProxyType(
    {
        "activations-checkpoint-method": Shorthand("recompute_granularity", "full"),
        "num-key-value-heads": Shorthand("group_query_attention", "true"),
        # Megatron-LM's recipe where none is given.
        "fp8-amax-history-len": Shorthand("fp8_recipe", "delayed"),
        "fp8-amax-compute-algo": Shorthand("fp8_recipe", "delayed"),
        "fp8-margin": Shorthand("fp8_recipe", "delayed"),
        # BigCode's Megatron-LM, whose flag --tokenizer-file is, rearranges samples wherever it is given a rate.
        "fim-rate": Shorthand("fim_data", "true", beside="tokenizer-file"),
        "fim-split-sample": Shorthand("fim_fragment_rate", "0.5", beside="tokenizer-file"),
    }
)

# Settings of megazero that published launch scripts give by these flags even where they have no effect, neither in
# Megatron-LM or Megatron-DeepSpeed nor here; a flag that would stop those programs then is not among them.
_PUBLISHED = (
    "accumulate-allreduce-grads-in-fp32 async-save adam-beta1 adam-beta2 adam-eps attention-backend checkpoint-in-cpu"
    " checkpoint-num-layers contigious-checkpointing data-cache-path deterministic-mode eval-interval hysteresis"
    " initial-loss-scale log-memory-to-tensorboard log-optimizer-states-to-tensorboard log-timers-to-tensorboard"
    " log-validation-ppl-to-tensorboard loss-scale loss-scale-window lr-decay-iters lr-decay-samples lr-decay-tokens"
    " lr-warmup-init merge-file min-loss-scale min-lr no-load-optim"
    " no-mmap-bin-files no-save-optim override-lr-scheduler override-opt-param-scheduler partition-activations"
    " profile-backward profile-ranks profile-step-end profile-step-start use-pytorch-profiler"
    " recompute-method recompute-num-layers save-interval sequence-parallel sgd-momentum split"
    " synchronize-each-layer tensorboard-log-interval tensorboard-queue-size timing-log-option tokenizer-model"
    " use-checkpoint-lr-scheduler use-checkpoint-opt-param-scheduler vocab-file weight-decay record-memory-history"
    " memory-snapshot-path wandb-exp-name wandb-entity wandb-save-dir num-query-groups rotary-base rotary-percent"
    " rotary-position-embeddings-theta rotary-seq-len-interpolation-factor tiktoken-pattern"
    " make-vocab-size-divisible-by fim-rate fim-spm-rate fim-split-sample fim-fragment-rate fim-no-prefix"
    " fim-prefix-token fim-middle-token fim-suffix-token fim-pad-token fim-eod-token"
)
PUBLISHED: frozenset[str] = frozenset(_PUBLISHED.split())


# {name of a setting: {other name of one of its values: megazero's}}
OTHER_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "position_embedding_type": MappingProxyType({"rotary": "rope", "absolute": "learned_absolute"}),
        "lr_wsd_decay_style": MappingProxyType({"1-sqrt": "minus_sqrt"}),
        "normalization": MappingProxyType({"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}),
        "data_parallel_sharding_strategy": MappingProxyType(
            {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}
        ),
    }
)

# {flag with a value: the shorthand that the two are}
NAMED: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("glu-activation", "swiglu"): "swiglu",
        ("attention-head-type", "multiquery"): "group-query-attention",
        ("main-grads-dtype", "bf16"): "grad-reduce-in-bf16",
    }
)

# {other name of a type of tokenizer: megazero's}
TOKENIZERS: Mapping[str, str] = MappingProxyType(
    {
        "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
        "Llama2Tokenizer": "SentencePieceTokenizer",
        "PretrainedFromHF": "HuggingFaceTokenizer",
        "TokenizerFromFile": "HuggingFaceTokenizer",
        "TokenizerFromFileWithFIM": "HuggingFaceTokenizer",
    }
)
# A type of tokenizer whose file --vocab-file names, although megazero's type has --tokenizer-model for it.
FROM_VOCAB_FILE = "TokenizerFromFile"
# A type of tokenizer that makes no text of ids; Megatron-LM's has one id more than --vocab-size, which ends documents.
NO_TOKENIZER = "NullTokenizer"


@dataclass(frozen=True)
class Fixed:
    """A flag of which megazero supports certain `values` only; `rule` describes what megazero does."""

    values: tuple[str, ...]
    rule: str


_WHOLE_SEQUENCES = "attention sees whole sequences; what --sequence-parallel splits is made whole before it"
_CHUNKS = "the number of chunks follows from their size; give --num-layers-per-virtual-pipeline-stage"
_STATES = "optimizer states and master weights have one format, fp32 or wider"
_NO_EXPERTS = "there are no experts: every token goes through the one feed-forward layer of its block"

FIXED: Mapping[str, Fixed] = MappingProxyType(
    {
        "data-impl": Fixed(("mmap", "infer"), "corpora are .bin/.idx pairs"),
        "dataloader-type": Fixed(("single",), "sample k of the run is a function of the seed and k, in one order"),
        "recompute-modules": Fixed(("core_attn",), "selective recomputation is that of the attention core"),
        "context-parallel-size": Fixed(("1",), _WHOLE_SEQUENCES),
        "ds-sequence-parallel-size": Fixed(("1",), _WHOLE_SEQUENCES),
        "num-experts": Fixed(("1",), _NO_EXPERTS),
        "expert-model-parallel-size": Fixed(("1",), _NO_EXPERTS),
        "expert-tensor-parallel-size": Fixed(("1",), _NO_EXPERTS),
        "encoder-tensor-model-parallel-size": Fixed(("0",), "a GPT has no encoder"),
        "main-grads-dtype": Fixed(("fp32",), "the sums of gradients are fp32, or have the format of --precision"),
        "main-params-dtype": Fixed(("fp32",), _STATES),
        "exp-avg-dtype": Fixed(("fp32",), _STATES),
        "exp-avg-sq-dtype": Fixed(("fp32",), _STATES),
        "attention-head-type": Fixed(
            ("multihead", "multiquery"),
            "attention heads have keys and values of their own, or share them in groups or all together",
        ),
        "DDP-impl": Fixed(("local", "torch"), "the engine reduces gradients itself, in every ZeRO stage"),
        "vocab-extra-ids": Fixed(("0",), "the vocabulary is the tokenizer's; --vocab-size makes room for more"),
    }
)


@dataclass(frozen=True)
class Following:
    """A flag whose one legal value follows from the settings; `rule` describes what megazero does.

    value: a function that returns the legal value.  instead: a function that returns the flags that would make a given
    value legal.
    """

    value: Callable[[RunConfig], int]
    rule: str
    instead: Callable[[RunConfig, int], str]


def _chunk_length(config: RunConfig, chunks: int) -> str:
    layers, stages = config.model.num_layers, config.parallel.pipeline_model_parallel_size
    if chunks < 1 or layers % (stages * chunks):
        return f"a number of chunks by which {layers} layers / {stages} pipeline stages can be divided"
    return f"--num-layers-per-virtual-pipeline-stage {layers // (stages * chunks)}"


_VIRTUAL = Following(derived.num_virtual_chunks, _CHUNKS, _chunk_length)

FOLLOWING: Mapping[str, Following] = MappingProxyType(
    {
        "virtual-pipeline-model-parallel-size": _VIRTUAL,
        "num-virtual-stages-per-pipeline-rank": _VIRTUAL,
    }
)


def _rows(rows: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """Return {name: text} from rows of (text, names separated by blanks)."""
    return MappingProxyType({name: text for text, names in rows for name in names.split()})


ACCEPTED: Mapping[str, str] = _rows(
    (
        (
            "it chooses a kernel, which torch does here",
            "no-masked-softmax-fusion no-bias-gelu-fusion no-bias-dropout-fusion no-bias-swiglu-fusion"
            " no-gradient-accumulation-fusion no-async-tensor-model-parallel-allreduce no-persist-layer-norm"
            " use-flash-attn use-flash-attn-v2 use-flash-attn-triton transformer-impl"
            " no-rope-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl attention-softmax-in-fp32",
        ),
        ("there is one model implementation", "use-mcore-models use-legacy-models"),
        (
            "where --offload-optimizer has the host update, it does so by torch's kernels, beside what travels",
            "cpu-torch-adam use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d",
        ),
        ("the ZeRO engine is built in; --zero-stage or --deepspeed-config chooses the stage", "deepspeed"),
        (
            "the ZeRO engine is built in; --zero-stage or --data-parallel-sharding-strategy chooses the stage",
            "use-megatron-fsdp use-custom-fsdp",
        ),
        (
            "gathered parameters lie in buffers of constant size that are used again and again",
            "fsdp-double-buffer fsdp-manual-registration fsdp-db-use-persist-buf-on-alloc-fail",
        ),
        ("every bucket is already cut into equal slices for all ranks", "round-robin-gradients"),
        (
            "there is one implementation of recomputation; --recompute-granularity chooses what it is of",
            "deepspeed-activation-checkpointing",
        ),
        (
            "layers are shared out by what embedding and head cost, or as --pipeline-split sets",
            "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split",
        ),
        (
            "activations travel between pipeline stages as the schedule has it",
            "overlap-p2p-communication no-overlap-p2p-communication overlap-p2p-communication-warmup-flush"
            " no-scatter-gather-tensors-in-pipeline batch-p2p-communication use-ring-exchange-p2p",
        ),
        ("every schedule computes the same", "enable-zbh1-exact-semantics"),
        (
            "the schedule fixes what a pipeline stage keeps, and until when",
            "deallocate-pipeline-outputs",
        ),
        (
            "the layers fix which collectives of tensor parallelism run beside matrix products",
            "tp-comm-overlap tp-comm-overlap-cfg tp-comm-bootstrap-backend disable-tp-comm-overlap-ag"
            " disable-tp-comm-overlap-rs disable-tp-comm-overlap-bulk-dgrad disable-tp-comm-overlap-bulk-wgrad"
            " tp-comm-overlap-rs-dgrad tp-comm-split-ag tp-comm-split-rs tp-comm-atomic-ag",
        ),
        (
            "the schedule sets when weight gradients are made; --pipeline-schedule zero-bubble puts them off",
            "defer-embedding-wgrad-compute wgrad-deferral-limit delay-wgrad-compute",
        ),
        (
            "publishing parameters overlaps wherever --overlap-comm allows it",
            "overlap-param-gather overlap-param-gather-with-optimizer-step",
        ),
        (
            "a bucket is reduced and gathered as soon as it can be, on every pipeline stage by itself",
            "align-grad-reduce no-align-grad-reduce align-param-gather no-align-param-gather",
        ),
        (
            "buckets are padded to equal slices; --reduce-bucket-size sets how large they are",
            "ddp-pad-buckets-for-high-nccl-busbw",
        ),
        (
            "the average is the same; --prescale-gradients sets when gradients are divided",
            "ddp-average-in-collective",
        ),
        (
            "which process groups there are follows from the layout; NCCL is tuned by its own environment variables",
            "use-sharp use-nccl-ub high-priority-stream-groups nccl-communicator-config-path enable-gloo-process-groups"
            " disable-gloo-process-groups",
        ),
        (
            "memory is given back as Python and torch do it",
            "manual-gc manual-gc-interval no-manual-gc-eval empty-unused-memory-level",
        ),
        (
            "initial weights are a function of the seed and the parameter, wherever they are made; a checkpoint"
            " replaces them",
            "use-cpu-initialization no-initialization init-model-with-meta-device",
        ),
        (
            "a timer makes no rank wait for another",
            "barrier-with-level-1-timing no-barrier-with-level-1-timing",
        ),
        ("the console and --metrics-file show how far a run has come", "log-progress"),
        (
            "random numbers are a function of the seed and the sample's number, so there is no state to save or load",
            "no-save-rng no-load-rng",
        ),
        ("8-bit products find their scales anew every time, or with --fp8-recipe delayed once a step", "fp8-interval"),
        (
            "a --load without a checkpoint is an error, unless it is --save or --begin-without-checkpoint is given",
            "exit-on-missing-checkpoint",
        ),
        ("the data loader never makes attention masks", "no-create-attention-mask-in-dataloader"),
        ("no index of samples is built: their order is a function of the seed", "num-dataset-builder-threads"),
        ("it lets other flags choose the formats of gradients and states", "use-precision-aware-optimizer"),
        ("SIGTERM, SIGINT, SIGHUP and SIGUSR1 always save and exit", "exit-signal-handler exit-signal"),
        ("throughput is always reported", "log-throughput"),
        (
            "batch size, loss scale, learning rate and world size are always logged",
            "log-batch-size-to-tensorboard log-loss-scale-to-tensorboard log-learning-rate-to-tensorboard"
            " log-world-size-to-tensorboard no-log-loss-scale-to-tensorboard no-log-learning-rate-to-tensorboard",
        ),
        ("torchrun gives a process its local rank", "local-rank"),
        ("every process writes its own part of a checkpoint", "ckpt-fully-parallel-save use-dist-ckpt"),
        (
            "a rank reads of a checkpoint what is its own, and anything missing is an error",
            "ckpt-fully-parallel-load ckpt-assume-constant-structure dist-ckpt-strictness",
        ),
        ("a global batch that the processes cannot share out is an error", "decrease-batch-size-if-needed"),
        ("scripts/constraints.txt fixes the kernels' versions", "abort-on-unmet-fused-kernel-constraints"),
        (
            "scores are divided by the root of a head's width only; by the layer's number they would be divided and"
            " multiplied again",
            "apply-query-key-layer-scaling no-query-key-layer-scaling",
        ),
        ("GELU is the one with tanh", "openai-gelu"),
        ("a norm's weight begins at 1 and does not decay, so it learns the same counted from 1", "apply-layernorm-1p"),
        (
            "gradients of a global batch are always averaged over its tokens that count",
            "calculate-per-token-loss",
        ),
        (
            "8-bit weights are made of gathered ones, which are in --precision: the same numbers, more bytes sent",
            "fp8-param-gather",
        ),
        (
            "it shapes experts, and there are none",
            "moe-expert-parallel-size moe-loss-coeff moe-train-capacity-factor moe-eval-capacity-factor"
            " moe-min-capacity moe-token-dropping disable-moe-token-dropping disable-moe-top2-2nd-expert-sampling"
            " mlp-type topk expert-interval enable-expert-tensor-parallelism create-moe-param-group use-tutel"
            " moe-router-topk moe-router-load-balancing-type moe-router-dtype moe-router-score-function"
            " moe-router-pre-softmax moe-router-enable-expert-bias moe-router-bias-update-rate moe-aux-loss-coeff"
            " moe-z-loss-coeff moe-grouped-gemm moe-use-legacy-grouped-gemm moe-token-dispatcher-type"
            " moe-permute-fusion moe-ffn-hidden-size moe-layer-freq moe-expert-capacity-factor"
            " moe-pad-expert-input-to-capacity moe-token-drop-policy moe-shared-expert-intermediate-size"
            " moe-shared-expert-overlap moe-per-layer-logging moe-input-jitter-eps",
        ),
        (
            "tensor-parallel copies of a parameter are updated alike, so they stay the same",
            "sync-tp-duplicated-parameters",
        ),
        ("every checkpoint fits every layout; --load DIR is enough", "universal-checkpoint"),
        (
            "checkpoints have one format, which fits every layout; megazero convert exports them",
            "ckpt-format dist-ckpt-format",
        ),
        (
            "this figure is not computed, and training is the same without it",
            "codecarbon-dir",
        ),
        ("the console has one level of messages", "log-level log-level-replica logging-level"),
        ("lines with figures have their time, and one rank writes them", "structured-logs"),
        (
            "the console is not copied to files; a launcher does that: torchrun's --log-dir, sbatch's --output",
            "structured-logs-dir",
        ),
        ("training and evaluation read ahead alike, as --num-workers sets", "valid-num-workers"),
        (
            "layers are shared out by what embedding and head cost, or as --pipeline-split sets",
            "pp-partition-method",
        ),
    )
)

_MODEL = (
    "the model has what --normalization, --swiglu, --squared-relu and --position-embedding-type choose, and no more"
)
_SPLIT = "layers are shared out by what embedding and head cost, or as --pipeline-split sets"
_RESUMED = "a finished run, started again with --load, only evaluates"

REFUSED: Mapping[str, str] = _rows(
    (
        (
            _MODEL,
            "apply-residual-connection-post-layernorm mup mup-input-mult mup-attn-mult mup-output-mult",
        ),
        ("of gated activations there is SwiGLU alone, by this flag or by --swiglu", "glu-activation"),
        ("rotary positions turn pairs of elements that are half of the rotated width apart", "rotary-interleaved"),
        (
            "of activations only the checkpoints of full recomputation go to host memory; give --checkpoint-in-cpu",
            "cpu-offloading cpu-offloading-num-layers fine-grained-activation-offloading offload-modules",
        ),
        ("every pipeline stage recomputes alike; give --recompute-num-layers", "custom-recompute-layers-per-stage"),
        (
            _SPLIT,
            "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers"
            " pipeline-model-parallel-layout standalone-embedding-stage",
        ),
        (
            "the interleaved schedule takes micro-batches in turns of --pipeline-model-parallel-size",
            "microbatch-group-size-per-virtual-pipeline-stage",
        ),
        (
            "a GPT has no encoder; --pipeline-split shares out its layers",
            "pipeline-model-parallel-split-rank encoder-pipeline-model-parallel-size",
        ),
        ("settings are given anew; a saved run's resolved file can be given as --config", "use-checkpoint-args"),
        ("--finetune starts at step 0 with the parameters alone", "reset-iteration no-load-lr-state"),
        ("passes of compiled blocks are recorded as CUDA graphs by --enable-cuda-graph", "cuda-graph-impl"),
        (
            "one backend carries all collectives; give --distributed-backend",
            "pipeline-model-parallel-comm-backend",
        ),
        (_RESUMED, "skip-train no-train"),
        (
            "a model is trained on its corpus alone, without a teacher",
            "kd mos kd-alpha-ce kd-beta-ce kd-temp load-teacher num-layers-teacher num-experts-teacher"
            " hidden-size-teacher num-attention-heads-teacher",
        ),
        ("optimizer states have the master weights' format", "use-bnb-optimizer"),
        ("special tokens have the names that Megatron-LM's defaults give them", "tiktoken-special-tokens"),
        ("the micro-batches of a step follow from the sizes of the batch", "gas"),
        ("every layer computes all tokens of a row", "random-ltd"),
        (
            "sample k of the run is a function of the seed and k, in an order that no file holds",
            "train-doc-idx-path train-sample-idx-path train-shuffle-idx-path",
        ),
        ("every sample has --seq-length tokens", "variable-seq-lengths"),
        (
            _WHOLE_SEQUENCES,
            "cp-comm-type hierarchical-context-parallel-sizes ds-sequence-parallel-fpdt"
            " ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading",
        ),
        ("residuals have the number format of --precision", "fp32-residual-connection"),
        ("all copies of the model start with the same weights, from --seed", "data-parallel-random-init"),
        ("processes and model are set up at the start, by the program itself", "lazy-mpu-init"),
        ("every checkpoint is kept; give --save-interval", "non-persistent-save-interval"),
        ("parameters to start from are given by --load with --finetune", "pretrained-checkpoint"),
        (
            "of a linear layer all three products are of 8-bit numbers, or by its sizes none; give --fp8-format",
            "no-fp8-wgrad",
        ),
        (
            "the linear layers of all blocks have one number format",
            "first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16",
        ),
        (
            "of 8-bit numbers are the products of the blocks' linear layers only",
            "fp8-dot-product-attention fp8-multi-head-attention",
        ),
    )
)

_LAYERS_OF_CHUNKS = "--pipeline-split N,N,..."

# {flag: settings of megazero with the same meaning}, a legal alternative to a refused flag, or to a fixed flag's value.
INSTEAD: Mapping[str, str] = _rows(
    (
        (
            _LAYERS_OF_CHUNKS,
            "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout"
            " standalone-embedding-stage",
        ),
        ("--distributed-backend NAME", "pipeline-model-parallel-comm-backend"),
        ("--swiglu", "glu-activation"),
        ("--group-query-attention --num-query-groups N", "attention-head-type"),
        ("--accumulate-allreduce-grads-in-fp32 false", "main-grads-dtype"),
        ("--config DIR/config.yaml", "use-checkpoint-args"),
        ("--load DIR --finetune", "reset-iteration no-load-lr-state"),
        ("--global-batch-size SAMPLES", "gas"),
        ("--seed N", "train-doc-idx-path train-sample-idx-path train-shuffle-idx-path"),
        ("--recompute-num-layers N", "custom-recompute-layers-per-stage"),
        (
            "--recompute-granularity full --checkpoint-in-cpu",
            "cpu-offloading cpu-offloading-num-layers fine-grained-activation-offloading offload-modules",
        ),
        ("--save-interval N", "non-persistent-save-interval"),
        ("--load DIR --finetune", "pretrained-checkpoint"),
    )
)

# The same tables for the flags of the field's preprocessing tools (megazero preprocess).
PREPROCESSING_ACCEPTED: Mapping[str, str] = _rows(
    (
        ("documents always come in the input's order", "keep-sequential-samples"),
        ("it is about splitting sentences, which is not done here", "keep-newlines lang"),
    )
)
PREPROCESSING_FIXED: Mapping[str, Fixed] = MappingProxyType(
    {"dataset-impl": Fixed(("mmap",), "corpora are .bin/.idx pairs read by mmap")}
)
PREPROCESSING_REFUSED: Mapping[str, str] = _rows(
    (("a document is one sequence, sentences are not separated", "split-sentences"),)
)
