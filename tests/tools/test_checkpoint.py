"""Tests of the checkpoint tool as a user runs it: given arguments, it prints lines and returns an exit code."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.launch import load_program
from support.sharded_state import Layout, make_state, write_checkpoint

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


def test_an_error_is_printed_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "inspect", str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=TOOL.parents[1])
    assert done.returncode == 2
    assert done.stderr == f"checkpoint error: {tmp_path / 'absent'}\n    rule:  there is no such folder\n"
