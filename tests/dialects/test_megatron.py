"""Tests the tables of flags that other frameworks' launch scripts use."""

import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from support.configs import SMALL
from support.each import each

from megazero.command_line.names import ALL_NAMES, spellings
from megazero.command_line.parse import parse
from megazero.config.run import FIELDS
from megazero.dialects.corpus_files import FILES
from megazero.dialects.megatron import ACCEPTED, FIXED, FOLLOWING, INSTEAD, REFUSED, SHORTHANDS
from megazero.errors import ConfigError

# Flags of published launch scripts (Megatron-LM, Megatron-DeepSpeed, BLOOM): each must be in some table.
PUBLISHED = """
num-layers hidden-size num-attention-heads seq-length max-position-embeddings ffn-hidden-size kv-channels
init-method-std make-vocab-size-divisible-by hidden-dropout attention-dropout untie-embeddings-and-output-weights
disable-bias-linear normalization swiglu squared-relu position-embedding-type use-rotary-position-embeddings
rotary-percent apply-layernorm-1p openai-gelu layernorm-epsilon norm-epsilon apply-query-key-layer-scaling
no-query-key-layer-scaling attention-softmax-in-fp32 micro-batch-size global-batch-size rampup-batch-size
step-batch-size-schedule train-iters train-samples train-tokens exit-interval exit-duration-in-mins seed num-workers
lr min-lr lr-decay-style lr-decay-iters lr-decay-samples lr-decay-tokens lr-warmup-fraction lr-warmup-iters
lr-warmup-samples lr-warmup-tokens weight-decay start-weight-decay end-weight-decay weight-decay-incr-style optimizer
adam-beta1 adam-beta2 adam-eps clip-grad override-opt-param-scheduler use-checkpoint-opt-param-scheduler fp16 bf16
loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis accumulate-allreduce-grads-in-fp32
tensor-model-parallel-size pipeline-model-parallel-size sequence-parallel num-layers-per-virtual-pipeline-stage
no-pipeline-parallel use-distributed-optimizer overlap-grad-reduce overlap-param-gather distributed-backend
distributed-timeout-minutes zero-stage deepspeed deepspeed-config cpu-optimizer ds-sequence-parallel-size
distributed-timeout-seconds-after-init
use-megatron-fsdp data-parallel-sharding-strategy recompute-activations recompute-granularity recompute-method
recompute-num-layers recompute-modules checkpoint-activations deepspeed-activation-checkpointing partition-activations
checkpoint-in-cpu checkpoint-num-layers distribute-saved-activations distribute-checkpointed-activations
contigious-checkpointing synchronize-each-layer profile-backward activations-checkpoint-num-layers
cpu-offloading-num-layers data-path split vocab-file merge-file tokenizer-type tokenizer-model vocab-size data-impl
data-cache-path mock-data train-data-path valid-data-path test-data-path dataloader-type reset-position-ids
reset-attention-mask eod-mask-loss no-mmap-bin-files no-create-attention-mask-in-dataloader save load save-interval
no-load-optim no-load-rng no-save-optim no-save-rng finetune use-checkpoint-args ckpt-format async-save
exit-on-missing-checkpoint
universal-checkpoint reset-iteration no-load-lr-state eval-iters eval-interval log-interval tensorboard-dir
tensorboard-queue-size log-timers-to-tensorboard log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard
log-memory-to-tensorboard log-optimizer-states-to-tensorboard log-params-norm log-num-zeros-in-grad log-throughput
timing-log-level timing-log-option wandb-project wandb-exp-name wandb-save-dir no-masked-softmax-fusion
no-bias-gelu-fusion no-bias-dropout-fusion no-gradient-accumulation-fusion no-async-tensor-model-parallel-allreduce
use-flash-attn use-flash-attn-v2 transformer-impl attention-backend use-mcore-models pp-partition-method
train-weighted-split-paths-path valid-weighted-split-paths-path test-weighted-split-paths-path
fim-data fim-rate fim-spm-rate fim-split-sample fim-fragment-rate fim-no-prefix fim-prefix-token fim-middle-token
fim-suffix-token fim-pad-token fim-eod-token
train-weighted-split-paths valid-weighted-split-paths test-weighted-split-paths data-args-path
per-split-data-args-path tokenizer-name-or-path embed-layernorm
pad-vocab-size-to kill-switch-path valid-num-workers abort-on-unmet-fused-kernel-constraints batch-size warmup
model-parallel-size activations-checkpoint-method no-position-embedding ckpt-fully-parallel-save use-dist-ckpt
dist-ckpt-format use-custom-fsdp enable-cuda-graph cuda-graph-impl rotary-position-embeddings-theta
num-key-value-heads num-query-groups profile local-rank num-virtual-stages-per-pipeline-rank use-tp-pp-dp-mapping
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split
account-for-loss-in-pipeline-split pipeline-model-parallel-layout no-overlap-p2p-communication
microbatch-group-size-per-virtual-pipeline-stage standalone-embedding-stage deterministic-mode
"""

# Flags about the workings of another implementation, with values as scripts give them: none changes a result here.
INNER = """
--tp-comm-overlap --tp-comm-overlap-cfg buffers.yaml --tp-comm-bootstrap-backend nccl --disable-tp-comm-overlap-ag
--disable-tp-comm-overlap-rs --disable-tp-comm-overlap-bulk-dgrad --disable-tp-comm-overlap-bulk-wgrad
--tp-comm-overlap-rs-dgrad --tp-comm-split-ag --tp-comm-split-rs --tp-comm-atomic-ag --defer-embedding-wgrad-compute
--wgrad-deferral-limit 22 --delay-wgrad-compute --deallocate-pipeline-outputs --batch-p2p-communication
--use-ring-exchange-p2p --align-grad-reduce --no-align-grad-reduce --align-param-gather --no-align-param-gather
--overlap-param-gather-with-optimizer-step --ddp-average-in-collective --ddp-pad-buckets-for-high-nccl-busbw
--use-sharp --high-priority-stream-groups dp tp --nccl-communicator-config-path nccl.yaml
--enable-gloo-process-groups --disable-gloo-process-groups --manual-gc --manual-gc-interval 100 --no-manual-gc-eval
--empty-unused-memory-level 2 --use-cpu-initialization --no-initialization --init-model-with-meta-device
--cross-entropy-fusion-impl te
--barrier-with-level-1-timing --no-barrier-with-level-1-timing --log-progress --log-loss-scale-to-tensorboard
--log-learning-rate-to-tensorboard --expert-tensor-parallel-size 1
--encoder-tensor-model-parallel-size 0 --use-precision-aware-optimizer --main-grads-dtype fp32
--main-params-dtype fp32 --exp-avg-dtype fp32 --exp-avg-sq-dtype fp32 --num-dataset-builder-threads 4
--no-log-loss-scale-to-tensorboard --no-log-learning-rate-to-tensorboard
"""
HF = "--tokenizer-type HuggingFaceTokenizer"
GOOD = [
    word
    for name, value in SMALL.items()
    for word in (f"--{name.replace('_', '-')}", "true" if value is True else str(value))
]


def test_every_published_flag_is_known() -> None:
    settings = {name for info in FIELDS for name in (info.flag.removeprefix("--"), *info.aliases)}
    known = settings | set(SHORTHANDS) | set(FILES) | {*ACCEPTED, *FIXED, *FOLLOWING, *REFUSED} | {"deepspeed-config"}
    known |= {spelling.removeprefix("--") for info in FIELDS for spelling in spellings(info)}
    assert [flag for flag in PUBLISHED.split() if flag not in known] == []


def test_shorthands_set_real_settings() -> None:
    names = {info.name for info in FIELDS}
    assert [short.field for short in SHORTHANDS.values() if short.field not in names] == []


def test_what_counted_as_a_refusal_before_stage_3() -> None:
    """DeepSpeed's configuration file is read, and flags of other engines set the ZeRO stage that does the same."""
    assert "deepspeed-config" not in REFUSED
    assert SHORTHANDS["use-torch-fsdp2"].value == "3" and "--zero-stage" in ACCEPTED["use-megatron-fsdp"]
    assert SHORTHANDS["use-distributed-optimizer"].gives_way_to == ("2", "3")


def test_every_flag_of_pipelines_and_sequences_has_its_answer() -> None:
    settings = {info.flag.removeprefix("--") for info in FIELDS}
    now_real = "sequence-parallel num-layers-per-virtual-pipeline-stage pipeline-model-parallel-size"
    assert set(now_real.split()) <= settings and not set(now_real.split()) & {*REFUSED, *FIXED, *ACCEPTED}
    assert SHORTHANDS["no-pipeline-parallel"].value == "1"
    assert SHORTHANDS["use-tp-pp-dp-mapping"].value == "dp-pp-tp"
    for name in ("virtual-pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank"):
        assert "--num-layers-per-virtual-pipeline-stage" in FOLLOWING[name].rule
    for name in ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"):
        assert "--pipeline-split" in REFUSED[name]
    answers = [*REFUSED.values(), *ACCEPTED.values(), *(row.rule for row in (*FIXED.values(), *FOLLOWING.values()))]
    assert [answer for answer in answers if "not there yet" in answer] == []


def test_a_refusal_gives_a_reason_and_names_only_flags_that_exist() -> None:
    flags = {info.flag for info in FIELDS} | {"--config"}
    for name, reason in REFUSED.items():
        assert reason, name
        named = {word.strip(",;.") for word in reason.split() if word.startswith("--")}
        assert named <= flags, name


def test_every_flag_of_recomputation_has_its_answer() -> None:
    """Every flag about recomputation sets something, is accepted as true anyway, or is refused."""
    settings = {name for info in FIELDS for name in (info.flag.removeprefix("--"), *info.aliases)}
    known = """recompute-granularity recompute-method recompute-num-layers checkpoint-num-layers partition-activations
    activations-checkpoint-method checkpoint-in-cpu distribute-saved-activations"""
    assert set(known.split()) <= settings
    assert {name for name, short in SHORTHANDS.items() if short.field == "recompute_granularity"} == {
        "recompute-activations",
        "checkpoint-activations",
    }
    assert "recompute-modules" in FIXED and "deepspeed-activation-checkpointing" in ACCEPTED
    assert "--checkpoint-in-cpu" in REFUSED["cpu-offloading-num-layers"]


def test_flags_of_inner_workings_earn_a_notice_each() -> None:
    alone, parsed = parse(GOOD), parse([*GOOD, *INNER.split()])
    assert parsed.config == alone.config
    told = [notice.split(":")[0].split()[0] for notice in parsed.notices]
    assert told == [word for word in INNER.split() if word.startswith("--")]
    (notice,) = parse([*GOOD, "--wgrad-deferral-limit", "22"]).notices
    assert "--pipeline-schedule zero-bubble" in notice


@each(
    ("words", "told"),
    [
        ("--expert-tensor-parallel-size 2", "legal: --expert-tensor-parallel-size 1"),
        ("--encoder-tensor-model-parallel-size 1", "legal: --encoder-tensor-model-parallel-size 0"),
        ("--pipeline-model-parallel-comm-backend ucc", "give --distributed-backend"),
        ("--skip-train", "a finished run, started again with --load, only evaluates"),
        ("--variable-seq-lengths", "every sample has --seq-length tokens"),
        ("--cp-comm-type p2p", "attention sees whole sequences"),
        ("--hierarchical-context-parallel-sizes 2 4", "attention sees whole sequences"),
        ("--fp32-residual-connection", "number format of --precision"),
        ("--data-parallel-random-init", "start with the same weights"),
        ("--lazy-mpu-init", "set up at the start"),
        ("--non-persistent-save-interval 10", "give --save-interval"),
        ("--pretrained-checkpoint dir", "--load with --finetune"),
        ("--attention-head-type grouped", "--group-query-attention --num-query-groups N"),
        ("--main-grads-dtype fp16", "--accumulate-allreduce-grads-in-fp32 false"),
        ("--exp-avg-dtype bf16", "have one format"),
        ("--random-ltd", "every layer computes all tokens of a row"),
        ("--train-doc-idx-path order.npy", "a function of the seed"),
    ],
)
def test_effects_that_are_not_there_are_refused(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse([*GOOD, *words.split()])
    (problem,) = error.value.problems
    assert problem.given == words and problem.rule.startswith("refused: ") and told in str(problem)


@each("words", ["--main-grads-dtype bf16", "--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32 false"])
def test_gradients_in_bf16(words: str) -> None:
    narrow = ["--bf16", "--use-precision-aware-optimizer", *words.split()]
    assert not parse([*GOOD, *narrow]).config.precision.accumulate_allreduce_grads_in_fp32
    if "fp32" in words:
        return
    with pytest.raises(ConfigError, match="accumulate"):
        parse([*GOOD, *narrow, "--accumulate-allreduce-grads-in-fp32"])


def test_gpt2s_files_alone_name_its_tokenizer() -> None:
    files = ["--vocab-file", "vocab.json", "--merge-file", "merges.txt"]
    parsed = parse([*GOOD, *files])
    assert parsed.config.data.tokenizer_type == "GPT2BPETokenizer"
    told = "--vocab-file vocab.json --merge-file merges.txt: taken as --tokenizer-type GPT2BPETokenizer"
    assert told in parsed.notices
    for others in (files[:2], [*files, "--tokenizer-type", "NullTokenizer"]):
        assert parse([*GOOD, *others]).config.data.tokenizer_type is None
    bytewise = parse([*GOOD, *files, "--tokenizer-type", "ByteTokenizer"])
    assert bytewise.config.data.tokenizer_type == "ByteTokenizer"


def test_what_is_legal_instead_is_a_setting() -> None:
    """Every row answers a flag that is refused, and names only flags that exist."""
    flags = {info.flag for info in FIELDS} | {"--config"}
    assert set(INSTEAD) <= {*FIXED, *REFUSED}
    for name, legal in INSTEAD.items():
        assert {word for word in legal.split() if word.startswith("--")} <= flags, name
    for name in ("decoder-first-pipeline-num-layers", "pipeline-model-parallel-layout"):
        assert INSTEAD[name].startswith("--pipeline-split")


@each(
    ("words", "format"),
    [
        ("--fp8-format hybrid", "hybrid"),
        ("--fp8-format e4m3", "e4m3"),
        ("--fp8", "hybrid"),
        ("--fp8 --fp8-format e4m3", "e4m3"),
        ("--fp8-hybrid", "hybrid"),
        ("--fp8-e4m3", "e4m3"),
        ("--fp8-format hybrid --fp8-recipe tensorwise --fp8-margin 0 --fp8-interval 1", "hybrid"),
        ("--fp8-format hybrid --fp8-amax-history-len 1 --fp8-amax-compute-algo most_recent", "hybrid"),
        ("--fp8 --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-margin 1", "hybrid"),
        ("--fp8 false", None),
    ],
)
def test_flags_of_8bit_products(words: str, format: str | None) -> None:
    config = parse([*GOOD, "--bf16", *words.split()]).config
    assert (config.precision.fp8_format, config.precision.precision) == (format, "bf16")


@each(
    ("words", "told"),
    [
        ("--no-fp8-wgrad", "all three products are of 8-bit numbers"),
        ("--first-last-layers-bf16", "the linear layers of all blocks have one number format"),
        ("--num-layers-at-start-in-bf16 2", "the linear layers of all blocks have one number format"),
        ("--num-layers-at-end-in-bf16 2", "the linear layers of all blocks have one number format"),
        ("--fp8-dot-product-attention", "of the blocks' linear layers only"),
        ("--fp8-multi-head-attention", "of the blocks' linear layers only"),
    ],
)
def test_8bit_effects_that_are_not_there_are_refused(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse([*GOOD, "--bf16", "--fp8-format", "hybrid", *words.split()])
    (problem,) = error.value.problems
    assert problem.given == words and problem.rule.startswith("refused: ") and told in str(problem)


def test_other_recipes_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensorwise, delayed"):
        parse([*GOOD, "--bf16", "--fp8", "--fp8-recipe", "mxfp8"])


def test_two_formats_of_8bit_products_clash() -> None:
    with pytest.raises(ConfigError, match="both set --fp8-format"):
        parse([*GOOD, "--bf16", "--fp8-hybrid", "--fp8-e4m3"])


class PublishedFlag(NamedTuple):
    """A row of published_flags.txt: the last flag in `words` is the one that the row is about."""

    fate: str
    scripts: int
    words: tuple[str, ...]

    @property
    def flag(self) -> str:
        return [word for word in self.words if word.startswith("--")][-1]


def published_flags() -> list[PublishedFlag]:
    lines = Path(__file__).with_name("published_flags.txt").read_text(encoding="utf-8").splitlines()
    rows = [shlex.split(line) for line in lines if not line.startswith("#")]
    return [PublishedFlag(fate, int(scripts), tuple(words)) for fate, scripts, *words in rows]


def fate_of(row: PublishedFlag) -> str:
    """Return what becomes of the row's flag beside the settings of a small run, with what else is wrong."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if name != "mock_data"]
    words += (
        []
        if any(part in word for part in ("data-path", "split-paths", "args-path") for word in row.words)
        else ["--mock-data"]
    )
    try:
        parsed = parse([*(word for word in words if word.partition("=")[0] not in row.words), *row.words])
    except ConfigError as error:
        problems = error.problems
        is_refused = len(problems) == 1 and problems[0].given.startswith(row.flag)
        return "refused" if is_refused and problems[0].rule.startswith("refused: ") else str(error)
    is_moot = any(note.startswith(row.flag) and ("effect" in note or "moot" in note) for note in parsed.notices)
    return "moot" if is_moot else "setting"


def test_a_published_flag_sets_something_or_is_moot_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("groups.txt", '"A: 1 0:1 text"'), ("words.txt", "1 a 2 b"), ("splits.json", '{"train": "a"}')):
        Path(name).write_text(text)
    expected = {row: "refused" if row.fate == "model" else row.fate for row in published_flags()}
    wrong = {row: found for row in expected if (found := fate_of(row)) != expected[row]}
    assert wrong == {}


def test_few_published_flags_of_a_gpt2_are_refused() -> None:
    counted = [row for row in published_flags() if row.fate != "model"]
    uses = sum(row.scripts for row in counted)
    assert sum(row.scripts for row in counted if row.fate != "refused") >= 0.95 * uses
    assert uses > 2500 and {row.flag.removeprefix("--").replace("_", "-") for row in counted} <= {*ALL_NAMES}


@each(
    ("words", "legal"),
    [
        (
            "--virtual-pipeline-model-parallel-size 2 --num-layers 24 --pipeline-model-parallel-size 4",
            "--num-layers-per-virtual-pipeline-stage 3",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 3 --num-layers 16 --pipeline-model-parallel-size 4",
            "a number of chunks by which 16 layers / 4 pipeline stages can be divided",
        ),
        ("--num-experts 8", "--num-experts 1"),
        ("--use-checkpoint-args", "--config DIR/config.yaml in place of --use-checkpoint-args"),
    ],
)
def test_a_refusal_does_the_arithmetic(words: str, legal: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse([*GOOD, *words.split()])
    (problem,) = error.value.problems
    assert problem.legal == legal


@each(
    ("words", "same"),
    [
        ("--activations-checkpoint-method uniform", "--recompute-granularity full --recompute-method uniform"),
        (
            "--activations-checkpoint-method block --checkpoint-activations",
            "--recompute-granularity full --recompute-method block",
        ),
        ("--zero-reduce-bucket-size 5e6 --zero-reduce-scatter false", "--reduce-bucket-size 5e6 --no-reduce-scatter"),
        ("--zero-contigious-gradients false --ddp-bucket-size 7", "--no-contiguous-gradients --reduce-bucket-size 7"),
        ("--bf16 --grad-reduce-in-bf16", "--bf16"),
        ("--normalization layernorm --num_experts 1 --moe-min-capacity 4", ""),
        ("--normalization rmsnorm", "--normalization RMSNorm"),
        (
            "--position-embedding-type rotary --rotary-position-embeddings-theta 5e5",
            "--position-embedding-type rope --rotary-base 5e5",
        ),
        ("--position-embedding-type absolute", ""),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 1 --lr-wsd-decay-style 1-sqrt",
            "--lr-decay-style WSD --lr-wsd-decay-iters 1 --lr-wsd-decay-style minus_sqrt",
        ),
        ("--no-position-embedding --use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--no-position-embedding --position-embedding-type alibi", "--position-embedding-type alibi"),
        ("--no-position-embedding", "--position-embedding-type none"),
        ("--num-key-value-heads 2", "--group-query-attention --num-query-groups 2"),
        ("--attention-head-type multiquery", "--group-query-attention --num-query-groups 1"),
        ("--attention-head-type multihead --structured-logs --structured-logs-dir logs", ""),
        (
            "--wandb-project-name code --wandb-entity-name us",
            "--wandb-project code --wandb-entity us",
        ),
        # BigCode's flags: a rate alone rearranges samples there, and fragments have a rate of their own.
        (f"{HF} --tokenizer-file FILE --fim-rate 0.4", f"{HF} --tokenizer-model FILE --fim-data --fim-rate 0.4"),
        (f"{HF} --tokenizer-file FILE --fim-rate 0.4 --fim-data false", f"{HF} --tokenizer-model FILE --fim-rate 0.4"),
        (
            f"{HF} --tokenizer-file FILE --fim-rate 0.4 --fim-split-sample <file>",
            f"{HF} --tokenizer-model FILE --fim-data --fim-rate 0.4 --fim-split-sample <file> --fim-fragment-rate 0.5",
        ),
        (
            f"{HF} --tokenizer-file FILE --fim-rate 0.4 --fim-split-sample <file> --fragment-fim-rate 0.1",
            f"{HF} --tokenizer-model FILE --fim-data --fim-rate 0.4 --fim-split-sample <file> --fim-fragment-rate 0.1",
        ),
        (f"{HF} --tokenizer-file FILE", f"{HF} --tokenizer-model FILE"),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer",
            "--zero-stage 3",
        ),
        ("--data-parallel-sharding-strategy optim_grads", "--zero-stage 2"),
        ("--data-parallel-sharding-strategy optim", "--zero-stage 1"),
        ("--data-parallel-sharding-strategy no_shard --use-custom-fsdp", "--zero-stage 0"),
        ("--use-torch-fsdp2", "--zero-stage 3"),
        ("--iterations-to-skip 3 5-6", "--skip-train-iteration-range 3 5-6"),
    ],
)
def test_old_spellings_mean_what_they_meant(words: str, same: str) -> None:
    assert parse([*GOOD, *words.split()]).config == parse([*GOOD, *same.split()]).config


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("GPTSentencePieceTokenizer --tokenizer-model FILE", "SentencePieceTokenizer"),
        ("Llama2Tokenizer --tokenizer-model FILE", "SentencePieceTokenizer"),
        ("PretrainedFromHF --tokenizer-name-or-path FILE", "HuggingFaceTokenizer"),
        ("TokenizerFromFile --vocab-file FILE", "HuggingFaceTokenizer"),
        ("TokenizerFromFile --tokenizer-file FILE", "HuggingFaceTokenizer"),
        ("TokenizerFromFileWithFIM --tokenizer-file FILE", "HuggingFaceTokenizer"),
        ("HuggingFaceTokenizer --tokenizer-model FILE", "HuggingFaceTokenizer"),
    ],
)
def test_other_names_of_tokenizers(words: str, kind: str, tmp_path: Path) -> None:
    parsed = parse([*GOOD, "--tokenizer-type", *words.split()])
    assert parsed.config.data.tokenizer_type == kind and parsed.config.data.tokenizer_model == Path("FILE")
    assert parsed.config.data.vocab_file is None
    other = words.split()[0]
    expected = () if other == kind else (f"--tokenizer-type {other}: taken as --tokenizer-type {kind}",)
    assert parsed.notices == expected
    (tmp_path / "run.yaml").write_text(f"tokenizer_type: {other}\ndata_path: [a]\nmock_data: false\n")
    told = parse([*GOOD[:-2], "--config", str(tmp_path / "run.yaml")]).config.data
    assert told.tokenizer_type == kind


def test_no_tokenizer_is_none() -> None:
    parsed = parse([*GOOD, "--tokenizer-type", "NullTokenizer"])
    assert parsed.config == parse(GOOD).config
    assert parsed.notices[0].startswith("--tokenizer-type NullTokenizer: accepted, without effect: without a tokenizer")
