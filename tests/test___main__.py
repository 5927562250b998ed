"""Tests of `python -m megazero`: its commands, what is refused before processes meet, and verify-layout itself."""

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from support.launch import PATIENCE_SECONDS, SMALL_RUN, command_line, set_launcher
from support.warm_python import warm_python

from megazero import __main__ as program
from megazero.console import run_program
from megazero.verify import program as work

Capture = pytest.CaptureFixture[str]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the program in this process, in the environment as it is; return its exit code."""
    return run_program(lambda: program.main(words))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a program that is started by hand, without a launcher."""
    set_launcher(monkeypatch)


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert run(monkeypatch, "--help") == 0
    assert "verify-layout" in capsys.readouterr().out
    assert run(monkeypatch) == 2
    assert run(monkeypatch, "verify-layout", "--help") == 0
    told = capsys.readouterr().out
    assert "--verify-steps N" in told and "--num-layers" in told and "bounds: losses and norms 1e-09" in told


def test_an_unknown_command_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert run(monkeypatch, "verify-layuot") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "    legal: verify-layout"


def test_everything_wrong_is_told_before_ranks_meet(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    set_launcher(monkeypatch, world_size=3)
    flags = command_line({**SMALL_RUN, "--tensor-model-parallel-size": "2", "--lr": "none", "--verify-steps": "0"})
    assert run(monkeypatch, "verify-layout", *flags) == 2
    told = capsys.readouterr().err
    assert told.startswith("3 configuration errors:")
    assert "--verify-steps 0" in told and "--lr none" in told and "3 processes with" in told
    assert not dist.is_initialized()


def test_flags_that_do_not_count_are_checked(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    flags = command_line({**SMALL_RUN, "--bf16": "", "--loss-scale": "8", "--strict": ""})
    assert run(monkeypatch, "verify-layout", *flags) == 2
    told, complaints = capsys.readouterr()
    assert "only fp16 gradients are so small" in complaints
    assert "float64" not in told, "nothing is computed"


def test_one_process_alone(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    flags = command_line({**SMALL_RUN, "--recompute-granularity": "full", "--bf16": "", "--load": "nowhere"})
    assert run(monkeypatch, "verify-layout", *flags, "--verify-steps", "1") == 0
    told, complaints = capsys.readouterr()
    overridden = "--hidden-dropout 0.1 --attention-dropout 0.1 --precision bf16 --load nowhere"
    assert told.splitlines()[0] == f"verify-layout computes in float64, in place of {overridden}"
    assert told.splitlines()[-1] == "the layout computes what one process computes"
    assert complaints == ""


def test_a_difference_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    verify = work.verify

    def of_another_loss(config, mesh, buffers, inputs, **options):
        report = verify(config, mesh, buffers, inputs, **options)
        (step,) = report.steps
        return replace(report, steps=(replace(step, loss=replace(step.loss, here=7.0)),))

    monkeypatch.setattr(work, "verify", of_another_loss)
    assert run(monkeypatch, "verify-layout", *command_line(SMALL_RUN), "--verify-steps", "1") == 1
    assert "FIRST DIFFERENCE: step 1, loss: 7.0, " in capsys.readouterr().out


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("layout", "described"),
    [
        (
            {"--pipeline-model-parallel-size": "2", "--zero-stage": "2"},
            "pipeline 2 x data 1 x tensor 1 = 2 ranks, ZeRO stage 2, 1f1b schedule",
        ),
        (
            {
                "--zero-stage": "3",
                "--zero-hpz-partition-size": "2",
                "--zero-quantized-weights": "",
                "--zero-quantized-gradients": "",
            },
            "pipeline 1 x data 2 x tensor 1 = 2 ranks, ZeRO stage 3",
        ),
    ],
    ids=["pipeline", "wires that round"],
)
def test_a_layout_is_verified_under_torchrun(tmp_path: Path, layout: dict[str, str], described: str) -> None:
    flags = command_line({**SMALL_RUN, **layout, "--fp16": "", "--verify-steps": "2"})
    launcher = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*launcher, "-m", "megazero", "verify-layout", *flags],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, complaints = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, complaints
    lines = told.splitlines()
    assert f"layout: {described}" in lines
    assert lines[-1] == "the layout computes what one process computes"
    assert sum(line == lines[-1] for line in lines) == 1, "one rank speaks"
