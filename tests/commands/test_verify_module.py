"""Tests of `megazero verify-module`: a module that agrees, one that does not, and words that are refused."""

from pathlib import Path

import pytest
from support.launch import set_launcher

from megazero import __main__ as program
from megazero.console import run_program

Capture = pytest.CaptureFixture[str]


def run(*words: str) -> int:
    """Run the command in this process; return its exit status."""
    return run_program(lambda: program.main(["verify-module", *words]))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a program that is started by hand, without a launcher."""
    set_launcher(monkeypatch)


CASE = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))

class Counts(nn.Linear):
    calls = 0
    def forward(self, x):
        Counts.calls += 1
        return super().forward(x) * Counts.calls

def make_counting():
    return Counts(4, 1)

def loss(model, batch):
    return model(batch).square().mean()

def batches():
    return torch.randn(3, 2, 4)
"""


def test_a_module_of_a_user(capsys: Capture, tmp_path: Path) -> None:
    """One that agrees, one whose two trainings share state, a file that is not there, and numbers out of range."""
    file, config = tmp_path / "module_of_a_user.py", tmp_path / "config.json"
    file.write_text(CASE)
    config.write_text('{"optimizer": {"type": "SGD", "lr": 0.1}, "gradient_clipping": 1.0}')
    words = ["--config", str(config), "--zero-stage", "3", "--verify-steps", "2"]
    assert run(f"{file}:make_model", *words) == 0
    told = capsys.readouterr().out
    assert "ZeRO stage 3" in told and "4 parameters in 2 steps" in told and "computes what one process" in told
    assert run(f"{file}:make_counting") == 1
    assert "FIRST DIFFERENCE: step 1" in capsys.readouterr().out
    assert run("none.py:make", "--zero-stage", "4") == 2
    assert "--zero-stage 4" in capsys.readouterr().err
    assert run("none.py:make") == 2
    assert "there is no file none.py" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    assert "FILE.py has three functions" in capsys.readouterr().out
