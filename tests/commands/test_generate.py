"""Tests of the text generation program on checkpoints of tensor-parallel runs, in one process and under torchrun."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from support.checkpoints import run_config, save_checkpoint
from support.launch import PATIENCE_SECONDS, load_program, set_launcher
from support.models import small_config
from support.sidecars import byte_sidecar, write_sidecar
from support.warm_python import warm_python

from megazero.checkpoint.reader import open_checkpoint
from megazero.config.run import DataConfig
from megazero.errors import CheckpointError, ConfigError, DataError, TopologyError, UserError

TOOL = Path(__file__).parents[2] / "tools" / "generate_text.py"
BYTES = DataConfig(tokenizer_type="ByteTokenizer")
FAST = ["--device", "cpu", "--max-new-tokens", "6"]
Main = Callable[[list[str]], None]


@pytest.fixture(scope="module")
def main() -> Main:
    found: Main = load_program(TOOL).main
    return found


def save(folder: Path, *, data: DataConfig = BYTES, vocab_size: int = 257, tp: int = 2) -> str:
    config = run_config(small_config(init_method_std=0.3), data=data)
    save_checkpoint(folder, config, vocab_size=vocab_size, tp=tp)
    return str(folder)


def output(main: Main, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main([*arguments, *FAST])
    return capsys.readouterr().out


def test_it_continues_the_prompt_whatever_the_layout(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [
        output(main, capsys, "--load", save(tmp_path / str(tp), tp=tp), "--prompt", "def f(", "--greedy")
        for tp in (1, 2, 3)
    ]
    assert texts[0].startswith("def f(") and len(texts[0]) > len("def f(\n")
    assert texts[1:] == texts[:1] * 2
    assert not dist.is_initialized()


def test_several_samples_repeat_by_seed(tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path)
    once, again, other = (
        output(main, capsys, "--load", folder, "--num-samples", "2", "--top-k", "50", "--seed", seed)
        for seed in ("1", "1", "2")
    )
    assert once == again != other
    assert once.startswith("--- sample 1 of 2\n") and "--- sample 2 of 2\n" in once


def test_prompts_of_flags_and_of_a_file_are_continued_together(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "run")
    prompts = ["def f(", "\u00e4", "a longer one, of ", ""]
    alone = [output(main, capsys, "--load", folder, "--prompt", prompt, "--greedy") for prompt in prompts]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts[2:]))
    together = ["--load", folder, "--greedy", "--batch-size", "3", "--prompts-file", str(tmp_path / "more.jsonl")]
    together += ["--prompt", prompts[0], "--prompt", prompts[1]]
    text = output(main, capsys, *together)
    assert text == "".join(f"--- prompt {number} of 4\n{each}" for number, each in enumerate(alone, start=1))

    (tmp_path / "texts").mkdir()
    for name in ("out.txt", "out.jsonl"):
        assert output(main, capsys, *together, "--output", str(tmp_path / "texts" / name)) == ""
    assert (tmp_path / "texts" / "out.txt").read_text("utf-8") == text
    lines = [json.loads(line) for line in (tmp_path / "texts" / "out.jsonl").read_text("utf-8").splitlines()]
    assert [f"{line['prompt']}{line['text']}\n" for line in lines] == alone
    assert {(line["sample"], line["tokens"], line["end"]) for line in lines} == {(1, 6, "length")}
    for name, rule in (("out.txt", "must not exist"), ("out.txt/below.txt", "must be writable")):
        with pytest.raises(ConfigError, match=rf"{name}\n.*{rule}"):
            main([*together, "--output", str(tmp_path / "texts" / name)])


def test_a_stop_text_ends_a_continuation(tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    """The stop text is of two letters, and a token is a byte."""
    folder = save(tmp_path / "run")
    given = ["--load", folder, "--prompt", "Q", "--top-k", "90", "--seed", "7", "--max-new-tokens", "40"]
    main([*given, "--device", "cpu"])
    whole = capsys.readouterr().out[1:-1]
    stop = next(
        whole[place : place + 2]
        for place in range(3, len(whole) - 2)
        if whole[place : place + 2].isprintable() and "\ufffd" not in whole[place : place + 2]
    )
    main([*given, "--device", "cpu", "--stop", "nowhere", "--stop", stop, "--output", str(tmp_path / "a.jsonl")])
    (line,) = (tmp_path / "a.jsonl").read_text("utf-8").splitlines()
    found = json.loads(line)
    assert (found["text"], found["end"]) == (whole[: whole.index(stop)], "stop")
    assert found["tokens"] < 40


def test_the_memory_of_keys_and_values_is_told_beside_the_text(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--load", save(tmp_path), "--prompt", "abc", "--num-samples", "3", "--batch-size", "2", *FAST])
    told = capsys.readouterr().err
    # Of 2 texts at the same time, of 3 tokens and 6 new ones.
    assert "(2 x 3 layers x 2 texts x 9 tokens x 12 heads x 5 elements x 8 bytes)" in told
    assert f"{2 * 3 * 2 * 9 * 12 * 5 * 8 / 1024:.1f} KiB" in told


def test_flags_name_the_tokenizer_that_the_run_does_not(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, data=DataConfig(data_path=("corpus",)))
    with pytest.raises(ConfigError, match="names no tokenizer"):
        main(["--load", folder])
    assert output(main, capsys, "--load", folder, "--tokenizer-type", "ByteTokenizer", "--prompt", "x").startswith("x")


def test_the_corpus_names_the_tokenizer_that_neither_run_nor_flags_do(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sidecar(tmp_path / "b", byte_sidecar(documents=1, tokens=2, text_bytes=2))
    data = DataConfig(data_path=("0.5", str(tmp_path / "a"), "0.5", str(tmp_path / "b")))
    assert output(main, capsys, "--load", save(tmp_path, data=data), "--prompt", "x").startswith("x")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--max-new-tokens", "0", "--num-samples", "-1"], ConfigError, r"--max-new-tokens 0(.|\n)*--num-samples -1"),
        (["--temperature", "-2"], ConfigError, "--temperature -2"),
        (["--step", "8"], CheckpointError, "step 8"),
        (["--seed", "-1"], ConfigError, "--seed -1"),
        (["--seed", "18446744073709551616"], ConfigError, "--seed 18446744073709551616"),
        (["--prompt", "a\udcff"], ConfigError, "--prompt"),
        (["--prompt", "a", "--stop", "\udcff", "--stop", ""], ConfigError, r"--stop(.|\n)*--stop ''"),
        (["--prompts-file", "nowhere.txt"], DataError, "nowhere.txt"),
        (["--batch-size", "0"], ConfigError, "--batch-size 0"),
        (["--tokenizer-type", "SentencePieceTokenizer"], DataError, "--tokenizer-model"),
    ],
)
def test_bad_flags(tmp_path: Path, main: Main, arguments: list[str], kind: type[UserError], message: str) -> None:
    with pytest.raises(kind, match=message):
        main(["--load", save(tmp_path), *arguments])


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path, main: Main) -> None:
    with pytest.raises(CheckpointError, match="tokenizer of 257 ids for a model of 100"):
        main(["--load", save(tmp_path, vocab_size=100)])


def test_the_program_prints_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOL), *["--load", str(tmp_path / "nothing")]])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOL), run_name="__main__")
    assert ended.value.code == 2
    assert "no such folder" in capsys.readouterr().err


TENSOR, STAGES = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (1, [TENSOR, "2"], f"on 1 process\n.*\n.*legal: 2 processes; {TENSOR} 1 {STAGES} 1$"),
        (4, [], f"on 4 processes\n.*\n.*legal: 1 process; {TENSOR} 1 {STAGES} 4; .*; {TENSOR} 4 {STAGES} 1$"),
        (6, [STAGES, "6"], f"{STAGES} 6\n.*\n.*legal: {STAGES} 1 to 5$"),
        (5, [TENSOR, "5"], f"{TENSOR} 5\n.*\n.*legal: {TENSOR} 4, {TENSOR} 6$"),
    ],
)
def test_layouts_are_refused_before_ranks_meet(
    tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch, world: int, sizes: list[str], message: str
) -> None:
    set_launcher(monkeypatch, world_size=world)
    with pytest.raises(TopologyError, match=message):
        main(["--load", save(tmp_path), *sizes])


def test_tensor_parallelism_across_nodes_is_refused(
    tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_launcher(monkeypatch, world_size=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    folder = save(tmp_path)
    with pytest.raises(TopologyError, match=f"{TENSOR} 4 {STAGES} 1 on 2 nodes of 2 ranks\n"):
        main(["--load", folder, TENSOR, "4"])
    # Both pass the check and fail only later, for lack of the other ranks.
    for layout in ([TENSOR, "4", "--allow-tensor-parallel-across-nodes"], [TENSOR, "2", STAGES, "2"]):
        with pytest.raises(TopologyError, match="no MASTER_ADDR"):
            main(["--load", folder, *layout, *FAST])


def torchrun(folder: Path, *arguments: str, ranks: int, python: str | None = None) -> subprocess.CompletedProcess[str]:
    launcher = [python or warm_python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launcher, str(TOOL), "--load", str(folder), *arguments, *FAST],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.mark.gloo
def test_four_processes_write_what_one_writes(tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, tp=3)
    chosen = [
        "--prompt",
        "def f(",
        "--prompt",
        "a",
        "--stop",
        "e",
        "--num-samples",
        "2",
        "--top-k",
        "50",
        "--seed",
        "4",
    ]
    expected = output(main, capsys, "--load", str(tmp_path), *chosen)
    ended = torchrun(tmp_path, *chosen, TENSOR, "2", STAGES, "2", ranks=4)
    assert (ended.returncode, ended.stdout) == (0, expected), ended.stderr


@pytest.mark.gloo
def test_flags_that_cannot_be_read_are_told_once(tmp_path: Path) -> None:
    ended = torchrun(tmp_path, "--top-k", "x", "--nonsense", ranks=2, python=sys.executable)
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.count("--top-k x\n    rule:  --top-k is a whole number\n") == 1
    assert ended.stderr.count("--help lists") == 1 and "exitcode  : 2" in ended.stderr


def test_help_is_shown_by_one_rank(
    main: Main, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        set_launcher(monkeypatch, rank=rank, world_size=2)
        with pytest.raises(SystemExit):
            main(["--help"])
        assert ("--max-new-tokens N" in capsys.readouterr().out) == (rank == 0)


@pytest.mark.gloo
def test_what_one_process_finds_damaged_is_told_once(tmp_path: Path) -> None:
    """Damage to the final norm, which only the last pipeline stage reads, is reported once."""
    save(tmp_path, tp=1)
    checkpoint = open_checkpoint(tmp_path)
    (file,) = checkpoint.manifest.files
    (box,) = [box for _, box in checkpoint.boxes() if box.parameter == "final_norm.weight"]
    with (checkpoint.folder / file.name).open("r+b") as stream:
        stream.seek(box.begin)
        stream.write(b"\x01")
    ended = torchrun(tmp_path, STAGES, "2", ranks=2)
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.count("weight of final_norm.weight") == 1 and "damaged: bytes" in ended.stderr
    # The launcher prints a traceback of its own; only a traceback of a process would name the program.
    assert f'File "{TOOL}"' not in ended.stderr and "exitcode  : 2" in ended.stderr
