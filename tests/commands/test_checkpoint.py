"""Tests of the checkpoint tool as a user runs it: given arguments, it prints lines and returns an exit code."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.launch import load_program
from support.saved_runs import ONE, OTHER, save_for
from support.sharded_state import Layout, make_state, write_checkpoint
from support.warm_python import warm_python

from megazero.checkpoint.journal import Journal
from megazero.errors import CheckpointError

TOOL = Path(__file__).parents[2] / "tools" / "checkpoint.py"


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], int]:
    found: Callable[[list[str]], int] = load_program(TOOL).main
    return found


def test_inspect(tmp_path: Path, main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, make_state(), Layout(2, 2))
    assert main(["inspect", str(tmp_path)]) == 0
    short = capsys.readouterr().out
    assert "step        20\n" in short and "in 4 files" in short and '"iteration": 20' in short
    assert "exp_avg_sq       302 elements     1.2 KiB  F32" in short
    assert main(["inspect", "--tensors", str(tmp_path)]) == 0
    assert "qkv.weight  weight  F32  [3, 6, 2, 5]" in capsys.readouterr().out


def test_verify(tmp_path: Path, main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path, make_state(), Layout(2))
    assert main(["verify", str(folder)]) == 0
    assert "sound" in capsys.readouterr().out
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(CheckpointError) as caught:
        main(["verify", str(folder)])
    assert len(caught.value.problems) == 2


def test_diff(tmp_path: Path, main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    state = make_state()
    write_checkpoint(tmp_path / "a", state, Layout(2, 2))
    write_checkpoint(tmp_path / "b", state, Layout(1, 3))
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "equal: 21 tensors, progress and configuration\n"
    state["wte.weight", "exp_avg"][3] += 1
    write_checkpoint(tmp_path / "b", state, Layout(), step=30)
    assert main(["diff", "--step", "20", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert "step: 20 against 30\n" in out
    assert "wte.weight, exp_avg: 5 elements differ, max |a - b| = 1" in out


def test_run_and_journal(tmp_path: Path, main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    save_for(tmp_path, 3, ONE)
    Journal(tmp_path, print).write("start", world_size=2, layout="tensor 2")
    assert main(["inspect", str(tmp_path)]) == 0
    assert f"\n{ONE}\nstep        3\n" in capsys.readouterr().out
    assert main(["journal", str(tmp_path)]) == 0
    told, entry = capsys.readouterr().out.splitlines()
    assert told == str(ONE) and entry.endswith("  start   world_size 2 | layout tensor 2")
    with pytest.raises(CheckpointError, match=r"this folder has no journal\.jsonl"):
        main(["journal", str(tmp_path / "step_0000003")])


def test_two_runs_that_are_equal_are_equal(tmp_path: Path, main: Callable[[list[str]], int]) -> None:
    for name, run in (("a", ONE), ("b", OTHER), ("c", None)):
        save_for(tmp_path / name, 3, run)
    assert [main(["diff", str(tmp_path / "a"), str(tmp_path / name)]) for name in "bc"] == [0, 0]


def test_an_error_is_printed_without_a_traceback(tmp_path: Path) -> None:
    command = [warm_python(), str(TOOL), "inspect", str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=TOOL.parents[1])
    assert done.returncode == 2
    assert done.stderr == f"checkpoint error: {tmp_path / 'absent'}\n    rule:  there is no such folder\n"
