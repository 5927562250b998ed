"""Tests of what `megazero pretrain` answers without training: --print-config, --check, --version, --help."""

import subprocess
from pathlib import Path

import pytest
from support import broken_files
from support.launch import SMALL_RUN, command_line, run_here, set_launcher
from support.source_tree import ROOT
from support.warm_python import TOOLS, warm_python

import megazero
from megazero.command_line.parse import parse

Capture = pytest.CaptureFixture[str]
SMALL = command_line(SMALL_RUN)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a program that is started by hand, without a launcher."""
    set_launcher(monkeypatch)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)


def test_the_printed_configuration_is_the_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The file that is printed gives the same configuration as the flags, and names the source of each value."""
    deepspeed = tmp_path / "ds.json"
    deepspeed.write_text('{"zero_optimization": {"stage": 2}}')
    words = [*SMALL, "--seed", "1", "--seed", "2", "--deepspeed_config", str(deepspeed)]
    assert run_here([*words, "--print-config"], monkeypatch) == 0
    printed, complaints = capsys.readouterr()
    assert complaints == ""
    (tmp_path / "run.yaml").write_text(printed)
    assert parse(["--config", str(tmp_path / "run.yaml")]).config == parse(words).config
    assert f"zero_stage: 2  # {deepspeed}: zero_optimization.stage: 2\n" in printed
    assert "\nseed: 2  # --seed 2\n" in printed and "\neval_interval: 1000\n" in printed
    assert "# --seed 2: given last, so it counts in place of --seed 1\n" in printed
    assert "# layout: pipeline 1 x data 1 x tensor 1 = 1 process; ZeRO stage 2; fp32\n" in printed


def test_a_configuration_with_findings_is_printed_with_them(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert run_here([*SMALL, "--lr", "none", "--hidden-size", "30", "--print-config"], monkeypatch) == 2
    printed, complaints = capsys.readouterr()
    assert "\n# lr: has no valid value\n" in printed and "\nhidden_size: 30  # --hidden-size 30\n" in printed
    assert complaints.startswith("2 configuration errors:\n--lr none\n")
    assert run_here([*SMALL, "--hidden-size", "30", "--print-config"], monkeypatch) == 2
    assert "\nlr: 0.001" in capsys.readouterr().out


def test_a_check_says_what_the_run_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    broken_files.corpus(tmp_path)
    corpus = {"--mock-data": None, "--data-path": f"{tmp_path / 'text'}", "--split": "80,10,10", "--eval-iters": "0"}
    words = command_line({**SMALL_RUN, **corpus, "--save": f"{tmp_path / 'saved'}"})
    assert run_here([*words, "--processes", "4", "--global-batch-size", "8", "--check"], monkeypatch) == 0
    printed, complaints = capsys.readouterr()
    lines = printed.splitlines()
    assert complaints == "" and lines[-1] == "ok" and not (tmp_path / "saved").exists()
    assert lines[0] == "layout: pipeline 1 x data 4 x tensor 1 = 4 processes; ZeRO stage 1; fp32"
    assert lines[1].startswith("a step: 8 samples = ")
    assert "parameters" in lines[3] and "tokens for training, read" in lines[4]
    assert lines[5] == f"start: from initial weights; saves to {tmp_path / 'saved'}"

    assert run_here([*words, "--processes", "3", "--global-batch-size", "8", "--check"], monkeypatch) == 2
    assert "8" in capsys.readouterr().err
    (tmp_path / "text.bin").unlink()
    assert run_here([*words, "--check"], monkeypatch) == 2
    assert "ok" not in capsys.readouterr().out.split()


def test_a_check_counts_the_steps_that_do_not_train(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    words = ["--train-iters", "9", "--skip-train-iteration-range", "2-4", "6", "--check"]
    assert run_here([*SMALL, *words], monkeypatch) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("length: ")]
    assert line.startswith("length: 9 steps, ") and line.endswith("; 4 steps of them without training")


def test_a_check_finds_patterns_that_match_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    words = [*SMALL, "--check", "--param-groups", "*.bias weight_decay=0.1"]
    assert run_here(words, monkeypatch) == 0
    assert run_here([*words, "norm lr=1e-4"], monkeypatch) == 2
    told = capsys.readouterr().err
    assert "--param-groups: norm\n" in told and "layers.0.input_norm.weight" in told


def test_a_check_compares_the_checkpoint_that_would_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """One that misses a file is passed over, as a start does; a schedule that has changed is refused."""
    files = ["--save", f"{tmp_path}", "--load", f"{tmp_path}"]
    assert run_here([*SMALL, "--train-iters", "2", "--save-interval", "1", *files], monkeypatch) == 0
    capsys.readouterr()
    assert run_here([*SMALL, *files, "--check"], monkeypatch) == 0
    assert f"start: from {tmp_path / 'step_0000002'}; saves to" in capsys.readouterr().out
    (tmp_path / "step_0000002" / "rank_00000.safetensors").unlink()
    assert run_here([*SMALL, *files, "--check"], monkeypatch) == 0
    told = capsys.readouterr().out
    assert f"start: from {tmp_path / 'step_0000001'}; saves to" in told
    assert f"{tmp_path / 'step_0000001'} is complete and taken instead" in told
    assert run_here([*SMALL, *files, "--lr", "0.5", "--check"], monkeypatch) == 2
    assert "--lr 0.5; the checkpoint was saved with " in capsys.readouterr().err
    assert run_here([*SMALL, *files, "--hidden-size", "64", "--check"], monkeypatch) == 2
    assert "--hidden-size" in capsys.readouterr().err


def test_only_one_rank_answers(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for question in ("--help", "--version", "--check", "--print-config"):
        for rank, told in ((1, False), (0, True)):
            set_launcher(monkeypatch, rank=rank, world_size=2)
            assert run_here([*SMALL, question], monkeypatch) == 0
            assert bool(capsys.readouterr().out) is told, question


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert run_here(["--version"], monkeypatch) == 0
    assert capsys.readouterr().out == f"{megazero.__version__}\n"


def test_bash_completes_commands_flags_and_values() -> None:
    script = subprocess.run(
        [warm_python(TOOLS), "-m", "megazero", "completion", "bash"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = {
        "megazero pretr": ["pretrain"],
        "megazero verify-": ["verify-layout", "verify-module"],
        "megazero pretrain --hidden-s": ["--hidden-size"],
        "megazero pretrain --zero-stage ": ["0", "1", "2", "3"],
        "pretrain_gpt.py --precision b": ["bf16"],
        "megazero pretrain --help zer": ["zero"],
        "megazero pretrain --data-path x": [],
    }
    for line in lines:
        words = " ".join(f"'{word}'" for word in line.split(" "))
        script += f"\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _megazero {line.split()[0]}"
        script += '\necho "${COMPREPLY[*]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert [told.split() for told in done.stdout.splitlines()] == [*lines.values()]


def test_a_refusal_names_sources_and_comes_with_the_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A line about an accepted flag is not held back by a problem; a rule's flags that nobody gave are explained."""
    (tmp_path / "run.yaml").write_text("num_attention_heads: 7\n")
    words = [word for word in command_line({**SMALL_RUN, "--num-attention-heads": None}) if word]
    flags = [*words, "--config", str(tmp_path / "run.yaml"), "--use-flash-attn"]
    for more in ([], ["--check"], ["--print-config"], ["--swiglu"]):
        assert run_here([*flags, *more], monkeypatch) == 2
        printed, complaints = capsys.readouterr()
        assert "--use-flash-attn: accepted, without effect" in printed
        source = f"--num-attention-heads comes from {tmp_path / 'run.yaml'}: num_attention_heads: 7\n"
        assert f"--hidden-size 32 --num-attention-heads 7; {source}" in complaints
