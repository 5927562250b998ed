"""Tests that on a signal all ranks stop after the same step, save and exit 0, so that the run can be resumed.

Signals go to real processes under torchrun. torchrun itself turns a SIGTERM into its own exit code 1; its workers save
nevertheless.
"""

import os
import signal
from pathlib import Path

import pytest
from support.launch import SMALL_RUN, Finished, Program, command_line, read_steps, run_here, run_torchrun, set_launcher
from support.launch import torchrun as start

from megazero.checkpoint.folders import LATEST
from megazero.checkpoint.reader import Checkpoint, open_checkpoint

ENDLESS = {**SMALL_RUN, "--train-iters": "1000000", "--log-interval": "1000000", "--hidden-dropout": "0.1"}


def flags(folder: Path, **more: str) -> list[str]:
    """Return the words of an endless run in `folder`; `more` holds further flags by name, without dashes."""
    paths = {"--save": f"{folder / 'saved'}", "--load": f"{folder / 'saved'}", "--metrics-file": f"{folder / 'steps'}"}
    return command_line({**ENDLESS, **paths, **{f"--{name.replace('_', '-')}": value for name, value in more.items()}})


def wait_for_steps(program: Program, folder: Path) -> None:
    program.wait_until(lambda: len(read_steps(folder / "steps")) >= 3)


def complete_checkpoint(folder: Path) -> Checkpoint:
    """Return the newest checkpoint, after checks that it holds the last step of the metrics file and nothing wrong."""
    last = max(read_steps(folder / "steps"))
    assert (folder / "saved" / LATEST).read_text().strip() == f"step_{last:07d}"
    checkpoint = open_checkpoint(folder / "saved")
    assert checkpoint.step == checkpoint.progress["iteration"] == last
    assert [problem for problems in checkpoint.verify() for problem in problems] == []
    assert [path for path in (folder / "saved").iterdir() if path.name.startswith(".")] == []
    return checkpoint


def said(finished: Finished, text: str) -> None:
    """Assert that the run's output holds `text` once, and no traceback."""
    assert finished.stdout.count(text) == 1, finished
    assert "Traceback" not in finished.stdout


@pytest.mark.gloo
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    layout = {"zero_stage": "2", "bf16": ""}
    with start(flags(tmp_path, **layout), ranks=2, folder=tmp_path) as program:
        wait_for_steps(program, tmp_path)
        os.kill(program.workers()[1], signal.SIGUSR1)
        finished = program.wait()
    assert finished.code == 0, finished
    said(finished, "asked to stop after iteration")
    assert "Traceback" not in finished.stderr
    stopped = complete_checkpoint(tmp_path).step

    end = stopped + 4
    resumed = run_torchrun(flags(tmp_path, **layout, exit_interval=str(end)), ranks=2, folder=tmp_path)
    assert resumed.code == 0, resumed
    said(resumed, f"resumed at iteration {stopped}, {8 * stopped} samples consumed")
    said(resumed, f"exit interval {end} reached at iteration {end}")
    assert complete_checkpoint(tmp_path).step == end

    through = tmp_path / "through"
    through.mkdir()
    run_torchrun(flags(through, **layout, exit_interval=str(end)), ranks=2, folder=through)
    steps, expected = read_steps(tmp_path / "steps"), read_steps(through / "steps")
    assert list(steps) == list(expected) == list(range(1, end + 1))
    for name in ("loss", "grad_norm", "consumed_samples"):
        assert [step[name] for step in steps.values()] == [step[name] for step in expected.values()], name


@pytest.mark.gloo
def test_workers_save_when_torchrun_is_asked_to_end(tmp_path: Path) -> None:
    with start(flags(tmp_path, tensor_model_parallel_size="2"), ranks=2, folder=tmp_path) as program:
        wait_for_steps(program, tmp_path)
        workers = program.workers()
        os.kill(program.pid, signal.SIGTERM)
        finished = program.wait()
    assert len(workers) == 2
    assert finished.code in (0, 1), finished
    said(finished, "asked to stop after iteration")
    complete_checkpoint(tmp_path)


def test_exit_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_launcher(monkeypatch)
    for end in (3, 6):
        assert run_here(flags(tmp_path, exit_interval="3"), monkeypatch) == 0
        assert f"exit interval 3 reached at iteration {end}\n" in capsys.readouterr().out
        assert complete_checkpoint(tmp_path).step == end


def test_exit_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_launcher(monkeypatch)
    assert run_here(flags(tmp_path, exit_duration_in_mins="0.001"), monkeypatch) == 0
    assert "asked to stop after iteration" in capsys.readouterr().out
    complete_checkpoint(tmp_path)


def test_without_a_folder_a_run_stops_and_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_launcher(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert run_here(command_line({**ENDLESS, "--exit-interval": "2"}), monkeypatch) == 0
    assert "exit interval 2 reached at iteration 2\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
