"""Tests that on a signal all ranks stop after the same step, save and exit 0, so that the run can be resumed.

Ranks are forked from a process that has imported torch, and run the whole program; one job is torchrun's.
"""

import os
import signal
import time
from pathlib import Path

import pytest
from support.forked_job import ForkedJob, is_running
from support.launch import SMALL_RUN, command_line, read_steps, run_here, set_launcher
from support.launch import torchrun as start

from megazero.checkpoint.folders import LATEST
from megazero.checkpoint.reader import Checkpoint, open_checkpoint

ENDLESS = {**SMALL_RUN, "--train-iters": "1000000", "--log-interval": "1000000", "--hidden-dropout": "0.1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}
CTRL_C = b"\x03"


def flags(folder: Path, **more: str) -> list[str]:
    """Return the words of an endless run in `folder`; `more` holds further flags by name, without dashes."""
    paths = {"--save": f"{folder / 'saved'}", "--load": f"{folder / 'saved'}", "--metrics-file": f"{folder / 'steps'}"}
    return command_line({**ENDLESS, **paths, **{f"--{name.replace('_', '-')}": value for name, value in more.items()}})


def trains(folder: Path) -> bool:
    """Return True if the run in `folder` has made some steps."""
    return len(read_steps(folder / "steps")) >= 3


def complete_checkpoint(folder: Path) -> Checkpoint:
    """Return the newest checkpoint, after checks that it holds the last step of the metrics file and nothing wrong."""
    last = max(read_steps(folder / "steps"))
    assert (folder / "saved" / LATEST).read_text().strip() == f"step_{last:07d}"
    checkpoint = open_checkpoint(folder / "saved")
    assert checkpoint.step == checkpoint.progress["iteration"] == last
    assert [problem for problems in checkpoint.verify() for problem in problems] == []
    assert [path for path in (folder / "saved").iterdir() if path.name.startswith(".")] == []
    return checkpoint


def said(output: str, *texts: str) -> None:
    """Assert that the run's output holds each text once, and no traceback."""
    for text in texts:
        assert output.count(text) == 1, output
    assert "Traceback" not in output


@pytest.mark.gloo
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    layout = {"zero_stage": "2", "bf16": ""}
    with ForkedJob(flags(tmp_path, **layout), ranks=2, folder=tmp_path) as job:
        job.wait_until(lambda: trains(tmp_path))
        os.kill(job.pids[1], signal.SIGHUP)
        assert job.wait() == [0, 0], job.output()
    said(job.output(), "asked to stop after iteration")
    stopped = complete_checkpoint(tmp_path).step

    end = stopped + 4
    with ForkedJob(flags(tmp_path, **layout, exit_interval=str(end)), ranks=2, folder=tmp_path) as job:
        assert job.wait() == [0, 0], job.output()
    said(job.output(), f"resumed at iteration {stopped}, {8 * stopped} samples consumed")
    said(job.output(), f"exit interval {end} reached at iteration {end}")
    assert complete_checkpoint(tmp_path).step == end

    through = tmp_path / "through"
    through.mkdir()
    with ForkedJob(flags(through, **layout, exit_interval=str(end)), ranks=2, folder=through) as job:
        assert job.wait() == [0, 0], job.output()
    steps, expected = read_steps(tmp_path / "steps"), read_steps(through / "steps")
    assert list(steps) == list(expected) == list(range(1, end + 1))
    for name in ("loss", "grad_norm", "consumed_samples"):
        assert [step[name] for step in steps.values()] == [step[name] for step in expected.values()], name


@pytest.mark.gloo
def test_ctrl_c_is_answered_at_once_by_a_run_that_hangs(tmp_path: Path) -> None:
    """Rank 0 waits in a collective for a stopped peer: it announces the first Ctrl-C, and a second one ends it."""
    with ForkedJob(flags(tmp_path), ranks=2, folder=tmp_path, terminal=True) as job:
        job.wait_until(lambda: trains(tmp_path))
        os.kill(job.pids[1], signal.SIGSTOP)
        os.write(job.screen, CTRL_C)
        job.read_screen("SIGINT: the run finishes this step, saves to ")
        time.sleep(1.1)  # what comes sooner may be the same Ctrl-C, forwarded by a launcher
        os.write(job.screen, CTRL_C)
        told = job.read_screen("SIGINT again: ended at once; the work since the last save is lost")
        os.kill(job.pids[1], signal.SIGKILL)
        assert job.wait() == [128 + signal.SIGINT, -signal.SIGKILL]
    said(told, "a second one ends the program at once")


@pytest.mark.gloo
def test_a_run_saves_when_its_terminal_is_gone(tmp_path: Path) -> None:
    """A closed terminal sends SIGHUP, and everything that is printed afterwards fails."""
    with ForkedJob(flags(tmp_path, log_interval="1"), ranks=1, folder=tmp_path, terminal=True) as job:
        job.wait_until(lambda: trains(tmp_path))
        job.hang_up()
        assert job.wait() == [0]
    complete_checkpoint(tmp_path)


@pytest.mark.gloo
def test_ranks_save_when_torchrun_has_been_killed(tmp_path: Path) -> None:
    with ForkedJob(flags(tmp_path), ranks=2, folder=tmp_path, variables=TORCHRUN) as job:
        job.wait_until(lambda: trains(tmp_path))
        job.launcher.kill()
        job.wait_until(lambda: not any(map(is_running, job.pids)))
    said(job.output(), "(torchrun has ended)")
    complete_checkpoint(tmp_path)


@pytest.mark.gloo
def test_workers_save_when_torchrun_is_asked_to_end(tmp_path: Path) -> None:
    """torchrun forwards the signal; its own exit status is 1 if a rank runs when it arrives."""
    with start(flags(tmp_path, tensor_model_parallel_size="2"), ranks=2, folder=tmp_path) as program:
        program.wait_until(lambda: trains(tmp_path))
        workers = program.workers()
        os.kill(program.pid, signal.SIGTERM)
        finished = program.wait()
    assert len(workers) == 2
    assert finished.code in (0, 1), finished
    said(finished.stdout, "asked to stop after iteration")
    assert finished.stderr.count("SIGTERM: the run finishes this step, saves to") == 1, finished
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
