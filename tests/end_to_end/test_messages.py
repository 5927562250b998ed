"""Tests the message that a user gets for each wrong invocation and for each damaged file.

Every row goes through pretrain_gpt.py. It must end with an exit code, without a traceback and before anything is
written, and its message must name what was given, the rule, and what would be legal.

`python tests/end_to_end/test_messages.py` prints all invocations with their messages as Markdown.
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # pytest finds the tests' support code by itself
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import pytest
import torch
from support import broken_files
from support.launch import SMALL_RUN, command_line, run_here, run_torchrun, set_launcher

Flags = Mapping[str, str | None]


class Row(NamedTuple):
    """One wrong invocation.

    flags: the changes to the smallest good run; None removes a flag, {folder} is a new folder. told: the parts of its
    message, in this order. prepare: a function that puts files into the folder. ranks: the size of the job; several
    processes cannot be joined here, so a row that is not refused before that fails. trains: the error is found only
    while training.
    """

    flags: Flags
    told: tuple[str, ...]
    prepare: Callable[[Path], None] | None = None
    ranks: int = 4
    trains: bool = False


CORPUS: Flags = {"--mock-data": None, "--data-path": "{folder}/text", "--split": "1"}
LOAD: Flags = {"--load": "{folder}/saved", "--save": "{folder}/saved"}
FILE: Flags = {"--config": "{folder}/run.yaml"}
TOKENIZER: Flags = {
    "--vocab-size": None,
    "--tokenizer-type": "GPT2BPETokenizer",
    "--vocab-file": "{folder}/vocab.json",
    "--merge-file": "{folder}/merges.txt",
}

ROWS: dict[str, Row] = {
    # --- model, layout and batch
    "heads do not divide the width": Row(
        {"--num-attention-heads": "7"},
        ("--hidden-size 32 --num-attention-heads 7", "divides hidden_size", "--num-attention-heads 8"),
    ),
    "heads do not divide over processes": Row(
        {"--tensor-model-parallel-size": "4", "--num-attention-heads": "2"},
        ("--tensor-model-parallel-size 4", "divides num_attention_heads", "legal: --tensor-model-parallel-size 2"),
    ),
    "the feed-forward layer does not divide": Row(
        {"--tensor-model-parallel-size": "2", "--ffn-hidden-size": "33"},
        ("feed-forward width 33", "divides its width", "--ffn-hidden-size 32, --ffn-hidden-size 34"),
    ),
    "groups do not divide the heads": Row(
        {"--group-query-attention": "", "--num-query-groups": "3"},
        ("--num-query-groups 3 --num-attention-heads 4", "divides num_attention_heads", "--num-query-groups 2"),
    ),
    "an odd width is to be rotated": Row(
        {"--position-embedding-type": "rope", "--kv-channels": "7"},
        ("7 of a head's 7 elements rotated", "is even", "--rotary-percent 0.857143", "--kv-channels WIDTH"),
    ),
    "a trigger of the end that is there": Row(
        {"--trigger-path": "{folder}/triggers"},
        ("--trigger-path {folder}/triggers, with the file exit", "no run starts", "rm {folder}/triggers/exit"),
        prepare=broken_files.exit_trigger,
    ),
    "a kill switch that is there": Row(
        {"--kill-switch-path": "{folder}"},
        ("--kill-switch-path {folder}", "while this file is there no run starts", "rm {folder}"),
    ),
    "two activations": Row({"--swiglu": "", "--squared-relu": ""}, ("--swiglu --squared-relu", "one activation")),
    "a bias of attention for a kernel that takes none": Row(
        {"--position-embedding-type": "alibi", "--attention-backend": "flash", "--device": "cuda"},
        ("--position-embedding-type alibi --attention-backend flash", "takes no mask", "--attention-backend auto"),
    ),
    "processes do not divide": Row(
        {"--tensor-model-parallel-size": "4"},
        ("6 processes with --tensor-model-parallel-size 4", "divides the number of processes", "4 processes, 8"),
        ranks=6,
    ),
    "the batch does not divide": Row(
        {"--global-batch-size": "12"},
        ("--global-batch-size 12", "2 x 4 divides", "--global-batch-size 8, --global-batch-size 16"),
    ),
    "the sequence is too long": Row(
        {"--max-position-embeddings": "8"}, ("--seq-length 16", "at most max_position_embeddings", "--seq-length 8")
    ),
    "stage 4": Row({"--zero-stage": "4"}, ("--zero-stage 4", "nothing left to partition", "legal: --zero-stage 3")),
    "a schedule without a pipeline": Row(
        {"--pipeline-schedule": "zero-bubble"},
        ("--pipeline-schedule zero-bubble with --pipeline-model-parallel-size 1", "at least 2 pipeline stages"),
    ),
    "a split that leaves layers out": Row(
        {"--pipeline-model-parallel-size": "2", "--pipeline-split": "1,2"},
        ("--pipeline-split 1,2 (2 chunks, 3 layers)", "add up to 2 layers", "legal: --pipeline-split 1,1"),
    ),
    "micro-batches that don't fill the turns": Row(
        {
            "--pipeline-model-parallel-size": "2",
            "--num-layers": "4",
            "--num-layers-per-virtual-pipeline-stage": "1",
            "--global-batch-size": "12",
        },
        ("3 micro-batches", "multiple of the pipeline size", "--global-batch-size 8, --global-batch-size 16"),
    ),
    "tokens that don't split": Row(
        {
            "--tensor-model-parallel-size": "4",
            "--sequence-parallel": "",
            "--micro-batch-size": "1",
            "--seq-length": "15",
        },
        ("--sequence-parallel with", "split evenly", "--micro-batch-size 4", "--seq-length 16"),
    ),
    # --- activations
    "checkpoints without recomputation": Row(
        {"--partition-activations": "", "--number-checkpoints": "2", "--contiguous-checkpointing": ""},
        (
            "2 configuration errors",
            "--number-checkpoints 2",
            "recomputed whole",
            "legal: --recompute-granularity full, or leave it out",
            "--contiguous-checkpointing",
        ),
    ),
    "segments of selective recomputation": Row(
        {"--recompute-activations": "", "--recompute-method": "block", "--strict": ""},
        ("--recompute-method block", "recomputed whole", "legal: --recompute-granularity full"),
    ),
    "more recomputed layers than there are": Row(
        {"--checkpoint-activations": "", "--checkpoint-num-layers": "3"},
        ("--recompute-num-layers 3 --num-layers 2", "at most num_layers", "legal: --recompute-num-layers 2"),
    ),
    "a number of checkpoints without an arena": Row(
        {"--recompute-granularity": "full", "--number-checkpoints": "2"},
        ("--number-checkpoints 2", "size of the arena", "legal: --contiguous-checkpointing, or leave it out"),
    ),
    "other modules than the attention core": Row(
        {"--recompute-activations": "", "--recompute-modules": "core_attn mlp"},
        ("--recompute-modules core_attn mlp", "the attention core", "legal: --recompute-modules core_attn"),
    ),
    "two kinds of recomputation": Row(
        {"--recompute-activations": "", "--recompute-granularity": "full"},
        ("--recompute-granularity full and --recompute-activations", "both set", "one of the two"),
    ),
    "neither on, off nor auto": Row(
        {"--checkpoint-activations": "", "--checkpoint-in-cpu": "maybe"},
        ("--checkpoint-in-cpu maybe", "one of true, false, auto", "legal: "),
    ),
    # --- flags and files of settings
    "misspelled flags": Row(
        {"--tensor-parallel-size": "2", "--num-layer": "2"},
        ("2 configuration errors", "no setting of this name", "--tensor-model-parallel-size", "--num-layers"),
    ),
    "more values than the flag takes": Row(
        {"--seq-length": "16 32"}, ("--seq-length 16 32", "one value, not 2", "a whole number")
    ),
    "a flag without its value": Row({"--seq-length": ""}, ("--seq-length", "needs a value", "a whole number")),
    "missing flags": Row(
        {"--hidden-size": None, "--lr": None}, ("--hidden-size is missing", "--preset", "--lr is missing", "--lr N")
    ),
    "values that are no numbers": Row(
        {"--num-layers": "two", "--lr": "fast"}, ("--num-layers two", "whole number", "--lr fast", "greater than 0")
    ),
    "values out of range": Row(
        {"--hidden-dropout": "1.5", "--seed": "-1", "--lr": "0"},
        ("3 configuration errors", "--hidden-dropout 1.5", "less than 1", "--seed -1", "at least 0", "--lr 0"),
    ),
    "flags without a meaning here": Row(
        {"--decoder-first-pipeline-num-layers": "1", "--glu-activation": "geglu"},
        (
            "--decoder-first-pipeline-num-layers",
            "--pipeline-split",
            "--glu-activation geglu",
            "--swiglu in place of --glu-activation",
        ),
    ),
    "two precisions": Row({"--bf16": "", "--fp16": ""}, ("--bf16 and --fp16", "both set --precision", "one of the")),
    "no such precision": Row({"--precision": "fp8"}, ("--precision fp8", "is one of", "fp64, fp32, bf16, fp16")),
    "a loss scale without fp16": Row(
        {"--bf16": "", "--loss-scale": "1024", "--strict": ""},
        ("--loss-scale 1024", "only fp16", "legal: --precision fp16, or leave it out"),
    ),
    "a minimum above the learning rate": Row(
        {"--min-lr": "1"}, ("--lr 0.001 --min-lr 1", "min_lr is at most lr", "--min-lr 0.001")
    ),
    "warm-up beyond the decay": Row(
        {"--lr-decay-style": "cosine", "--lr-warmup-iters": "9"},
        ("--lr-warmup-iters 9", "at step 4", "--lr-warmup-iters 3, --lr-decay-iters 10"),
    ),
    "a run without length": Row({"--train-iters": None}, ("neither --train-iters", "has a length", "--train-iters N")),
    "an unknown preset": Row({"--preset": "gpt2-125m"}, ("--preset gpt2-125m", "no preset", "gpt2-124m, gpt2-355m")),
    "an unknown ZeRO configuration": Row({"--zero-config": "C6"}, ("--zero-config C6", "of this name", "C1, C2, C3")),
    "no such file of settings": Row(FILE, ("{folder}/run.yaml", "can't be read: No such file", "a YAML file")),
    "a file that is not YAML": Row(
        FILE, ("{folder}/run.yaml", "not valid YAML", "line 3", "num_layers: 12"), broken_files.unreadable_settings
    ),
    "wrong settings in a file": Row(
        FILE,
        ("2 configuration errors", "hidden_sise", "no setting of this name", "--hidden-size", "seed", "whole number"),
        broken_files.wrong_settings,
    ),
    # --- the machine
    "a backend for another device": Row(
        {"--device": "cpu", "--distributed-backend": "nccl"},
        ("--distributed-backend nccl --device cpu", "gloo moves CPU memory", "--distributed-backend gloo"),
    ),
    "processes started without torchrun": Row(
        {}, ("no MASTER_ADDR", "4 processes find each other", "start with torchrun")
    ),
    # --- places for output
    "a file where a folder goes": Row(
        {"--save": "{folder}/file"}, ("--save {folder}/file", "a file is there", "file-folder"), broken_files.a_file
    ),
    "reports below a file": Row(
        {"--tensorboard-dir": "{folder}/file/board", "--metrics-file": "{folder}/file/steps"},
        (
            "2 configuration errors",
            "--tensorboard-dir {folder}/file/board",
            "{folder}/file is a file",
            "--tensorboard-dir with another path",
            "--metrics-file {folder}/file/steps",
        ),
        broken_files.a_file,
    ),
    "a report that may not be written": Row(
        {"--tensorboard-dir": "/proc/board", "--save": None, "--metrics-file": None},
        ("--tensorboard-dir /proc/board: No such file", "files can be written", "another path"),
        ranks=1,
    ),
    "a metrics file of something else": Row(
        {"--metrics-file": "{folder}/notes.jsonl", "--save": None},
        ("notes.jsonl, line 1", "only steps and evaluations", "a new file"),
        broken_files.notes,
        ranks=1,
    ),
    # --- corpora
    "no corpus": Row({"--mock-data": None}, ("neither --data-path nor", "has a corpus", "--data-path PREFIX")),
    "a missing corpus": Row(
        {**CORPUS, "--data-path": "{folder}/texts"},
        ("data error: {folder}/texts.idx and {folder}/texts.bin", "must be a file", "legal: {folder}/text"),
        broken_files.corpus,
    ),
    "a corpus named by its file": Row(
        {**CORPUS, "--data-path": "{folder}/text.bin"},
        ("{folder}/text.bin.idx", "PREFIX.bin and PREFIX.idx", "the prefix without its ending: {folder}/text"),
        broken_files.corpus,
    ),
    "an index without tokens": Row(
        CORPUS, ("{folder}/text.bin", "must be a file", "megazero preprocess"), broken_files.index_alone
    ),
    "a truncated .bin": Row(
        CORPUS,
        ("text.bin: the file has 3700 bytes", "lists: 4000 bytes", "an undamaged copy"),
        broken_files.truncated_tokens,
    ),
    "a truncated .idx": Row(
        CORPUS, ("text.idx: the file has 802 bytes", "842 bytes", "an undamaged copy"), broken_files.truncated_index
    ),
    "an .idx of another kind": Row(
        CORPUS, ("text.idx: the file starts with b'PK", "MMIDIDX", "an undamaged copy"), broken_files.other_index
    ),
    "a corrupt .idx": Row(
        CORPUS,
        ("text.idx: sequence 1 starts at byte 102", "where the one before it ends", "an undamaged copy"),
        broken_files.shuffled_index,
    ),
    "a damaged description of a corpus": Row(
        {**CORPUS, "--vocab-size": None},
        ("{folder}/text.json", "is a JSON object", "preprocess again"),
        broken_files.damaged_sidecar,
    ),
    "an unknown vocabulary": Row(
        {**CORPUS, "--vocab-size": None},
        ("--data-path {folder}/text", "size of the vocabulary", "--vocab-size N"),
        broken_files.corpus,
    ),
    "a vocabulary that is too small": Row(
        CORPUS,
        ("{folder}/text: made with a vocabulary of 257", "holds the corpus's", "--vocab-size 257"),
        broken_files.corpus_of_bytes,
    ),
    "the wrong tokenizer": Row(
        {**CORPUS, **TOKENIZER},
        ("{folder}/text: made with ByteTokenizer", "not GPT2BPETokenizer", "the files the corpus was made with"),
        broken_files.corpus_of_bytes_and_another_tokenizer,
    ),
    "a tokenizer without its file": Row(
        {**CORPUS, "--tokenizer-type": "SentencePieceTokenizer"},
        ("SentencePieceTokenizer without --tokenizer-model", "read from a file", "--tokenizer-model FILE"),
        broken_files.corpus,
    ),
    "a mixture without weights": Row(
        {**CORPUS, "--data-path": "0.5 {folder}/text {folder}/text"},
        ("--data-path 0.5 {folder}/text", "pairs of a positive weight", "--data-path 0.7 PREFIX 0.3 PREFIX"),
        broken_files.corpus,
    ),
    "a token outside the vocabulary": Row(
        {**CORPUS, "--train-iters": "20"},
        ("{folder}/text: document 3, position 25: token 700", "below the vocabulary size 100", "a corpus preproc"),
        broken_files.foreign_token,
        ranks=1,
        trains=True,
    ),
    # --- checkpoints
    "a damaged manifest": Row(
        LOAD, ("step_0000002/manifest.json", "damaged: the content does not match"), broken_files.damaged_manifest
    ),
    "a truncated file of weights": Row(
        LOAD, ("rank_00000.safetensors: ", "truncated or altered", "bytes"), broken_files.truncated_weights
    ),
    "damaged weights": Row(
        LOAD,
        ("exp_avg_sq of final_norm.bias", "damaged: bytes", "do not match the hash"),
        broken_files.flipped_weight,
        ranks=1,
    ),
    "`latest` names nothing": Row(
        {**LOAD, "--strict-load": ""},
        (
            "saved/latest names 'step_0000009'",
            "must name a complete",
            "--strict-load with --load",
            "saved/step_0000002",
        ),
        broken_files.latest_names_nothing,
    ),
    "no such step": Row(
        {**LOAD, "--load": "{folder}/saved/step_0000007"},
        ("saved/step_0000007", "no such folder", "complete checkpoints here: step_0000002"),
        broken_files.checkpoint,
    ),
    "a forgotten --load": Row(
        {"--save": "{folder}/saved"},
        (
            "--save {folder}/saved holds checkpoints of run ",
            " UTC on ",
            "the newest step_0000002; without --load, this start is a new run",
            "only a run's own checkpoints are ever replaced",
            "--load {folder}/saved to go on with it",
        ),
        broken_files.checkpoint,
    ),
    "a mistyped --load": Row(
        {"--load": "{folder}/savde"},
        (
            "--load {folder}/savde",
            "there is no such folder",
            "--load {folder}/saved, --begin-without-checkpoint to start a new run",
        ),
        broken_files.checkpoint,
    ),
    "a mistyped --load to finetune from": Row(
        {"--load": "{folder}/savde", "--finetune": ""},
        ("--load {folder}/savde --finetune", "there is no such folder", "legal: --load {folder}/saved\n"),
        broken_files.checkpoint,
    ),
    "another run's folder": Row(
        {"--load": "{folder}/again/saved", "--save": "{folder}/saved"},
        (
            "--save {folder}/saved holds checkpoints of run ",
            "the newest step_0000002; --load {folder}/again/saved goes on with run ",
            "--load {folder}/saved to go on with it, another folder as --save to keep both",
        ),
        broken_files.two_runs,
    ),
    "finetuning into another run's folder": Row(
        {**LOAD, "--finetune": ""},
        ("--finetune begins a new run from {folder}/saved/step_0000002", "--load {folder}/saved without --finetune"),
        broken_files.checkpoint,
    ),
    "a run that may begin anyway": Row(
        {**LOAD, "--begin-without-checkpoint": ""},
        ("--begin-without-checkpoint", "a run may always begin where --load is --save", "leave it out"),
    ),
    "a checkpoint of another model": Row(
        {**LOAD, "--hidden-size": "16", "--num-layers": "3"},
        ("--num-layers 3; ", "saved with 2", "--num-layers 2", "--hidden-size 16; ", "saved with 32"),
        broken_files.checkpoint,
    ),
    "a longer sequence than the checkpoint's": Row(
        {**LOAD, "--seq-length": "24"},
        ("--seq-length 24; ", "saved with 16", "fit a model of the same shape", "--seq-length 16"),
        broken_files.checkpoint,
    ),
    "another seed": Row(
        {**LOAD, "--seed": "5"}, ("--seed 5; ", "the samples it began with", "--finetune"), broken_files.checkpoint
    ),
    "another learning rate": Row(
        {**LOAD, "--lr": "2e-3"},
        ("--lr 0.002; ", "saved with 0.001", "keeps its learning-rate schedule", "--override-opt-param-scheduler"),
        broken_files.checkpoint,
        ranks=1,
    ),
    # --- several at once
    "wrong flags, values and combinations": Row(
        {"--num-layer": "2", "--zero-stage": "4", "--lr": "fast", "--num-attention-heads": "7", "--min-lr": "-1"},
        ("--num-layer\n", "--lr fast", "--min-lr -1", "--zero-stage 4", "--hidden-size 32 --num-attention-heads 7"),
    ),
    "wrong combinations and a damaged corpus": Row(
        {**CORPUS, "--num-attention-heads": "7", "--save": None, "--finetune": ""},
        ("3 errors", "--num-attention-heads 7", "--finetune without --load", "text.bin: the file has 3700"),
        broken_files.truncated_tokens,
    ),
}

if not torch.cuda.is_available():
    ROWS["no GPU"] = Row({"--device": "cuda"}, ("--device cuda", "sees no GPU", "--device cpu"))


class Told(NamedTuple):
    """The outcome of an invocation."""

    code: int
    message: str
    written: list[str]  # names of files that were not there before, or have changed


def tell(row: Row, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """Prepare the row's files, run its invocation, and return the outcome."""
    if row.prepare is not None:
        row.prepare(folder)
    set_launcher(monkeypatch, world_size=row.ranks)
    before = contents(folder)
    message = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(message):
        code = run_here(arguments(row, folder), monkeypatch)
    after = contents(folder)
    written = [str(path.relative_to(folder)) for path in after if path not in before or after[path] != before[path]]
    return Told(code, message.getvalue(), written)


def arguments(row: Row, folder: Path) -> list[str]:
    """Return the words of the row's command line, with every place that a run might write to inside the folder."""
    places = {"--save": "{folder}/run", "--metrics-file": "{folder}/steps", "--tensorboard-dir": "{folder}/board"}
    words = command_line({**SMALL_RUN, **places, **row.flags})
    return [word.replace("{folder}", str(folder)) for word in words]


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Return every path below a folder, with the bytes of files."""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def is_told(row: Row, message: str, folder: Path) -> bool:
    """Return True if the message holds the row's parts in their order."""
    position = 0
    for part in row.told:
        position = message.find(part.replace("{folder}", str(folder)), position)
        if position < 0:
            return False
    return True


@pytest.mark.parametrize("name", ROWS)
def test_a_message_names_value_rule_and_legal_value(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[name]
    told = tell(row, tmp_path, monkeypatch)
    assert is_told(row, told.message, tmp_path), told.message
    assert told.code == 2
    assert "Traceback" not in told.message and "error" in told.message.splitlines()[0]
    if row.trains:
        assert not [path for path in told.written if path.startswith("run/step_")], "a checkpoint"
    else:
        assert told.written == []


def test_the_run_that_all_rows_spoil_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in ({}, CORPUS, LOAD):
        folder = tmp_path / str(len(flags))
        folder.mkdir()
        told = tell(Row(flags, (), good_files, ranks=1), folder, monkeypatch)
        assert (told.code, told.message) == (0, "")
        assert "steps" in told.written


def good_files(folder: Path) -> None:
    broken_files.corpus(folder)
    broken_files.checkpoint(folder)


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["wrong flags, values and combinations", "a token outside the vocabulary"])
def test_a_job_says_it_once(name: str, tmp_path: Path) -> None:
    """A job prints its message once, whether all ranks find the error, or one does and the others notice its exit."""
    row = ROWS[name]
    if row.prepare is not None:
        row.prepare(tmp_path)
    finished = run_torchrun([*arguments(row, tmp_path), "--device", "cpu"], ranks=2, folder=tmp_path)
    assert finished.code == 1  # torchrun's exit code for any failure
    assert is_told(row, finished.stderr, tmp_path), finished.stderr
    for part in row.told:
        assert finished.stderr.count(part.replace("{folder}", str(tmp_path))) == 1, finished.stderr
    # torchrun prints the traceback of its own error; megazero's ranks print none.
    assert 'pretrain_gpt.py", line' not in finished.stderr
    assert "Traceback" not in finished.stdout


def print_table() -> None:
    """Print all invocations with their messages, as Markdown."""
    print(f"Every invocation changes this one:\n\n    pretrain_gpt.py {' '.join(command_line(SMALL_RUN))}\n")
    for name, row in ROWS.items():
        with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as monkeypatch:
            told = tell(row, Path(place), monkeypatch)
        left_out = [f"(no {flag})" for flag, value in row.flags.items() if value is None]
        job = "1 process:" if row.ranks == 1 else f"{row.ranks} processes:"
        words = " ".join([job, *command_line(row.flags), *left_out]).replace("{folder}", "runs")
        print(f"### {name[0].upper()}{name[1:]}\n\n    {words}\n\nexit code {told.code}\n")
        print(f"```text\n{told.message.replace(place, 'runs')}```\n")


if __name__ == "__main__":
    print_table()
