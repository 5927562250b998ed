"""Tests profiles of steps by torch's profiler: which steps and ranks a run records, and where the traces are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import make_run
from support.small_runs import train_run

from megazero.report.step_profile import StepProfile
from megazero.rules import run as rules

CPU = torch.device("cpu")


def traces(folder: Path) -> list[str]:
    return [path.name for path in (folder / "save" / "profile").glob("*")]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"profile_step_start": 1, "profile_step_end": 2}, ["rank0000_steps2-2.pt.trace.json"]),
        ({"profile_step_start": 2, "profile_step_end": 9}, ["rank0000_steps3-9.pt.trace.json"]),
        ({"profile_step_start": 7, "profile_step_end": 9}, []),
        ({"profile_step_start": 0, "profile_step_end": 1, "profile": False}, []),
    ],
    ids=str,
)
def test_a_run_writes_the_trace_of_its_steps(settings: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    """A run that ends first writes what there is."""
    save = {"save": str(tmp_path / "save"), "train_iters": 3}
    told = train_run(0, 1, {"profile": True, "use_pytorch_profiler": True, **save, **settings})
    assert traces(tmp_path) == expected
    assert [line.rpartition("/")[2] for line in told.text.splitlines() if line.startswith("profiled")] == expected
    is_missed = settings.get("profile", True) and not expected
    assert ("--profile: the profile begins with step 8, and this run takes steps 1 to 3" in told.text) is is_missed
    for name in expected:
        events = json.loads((tmp_path / "save" / "profile" / name).read_text())["traceEvents"]
        assert sum(event.get("name") == "aten::_fused_adamw_" for event in events) > 0


def test_a_cpu_has_nothing_for_cudas_profiler(tmp_path: Path) -> None:
    told = train_run(0, 1, {"profile": True, "profile_step_start": 0, "train_iters": 1, "save": str(tmp_path / "save")})
    assert "on CPUs only torch's profiler sees a step" in told.text and traces(tmp_path) == []


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"profile_step_start": 5, "profile_step_end": 5}, "--profile-step-start 5 --profile-step-end 5"),
        ({"profile_ranks": ["0", "2"]}, "--profile-ranks 2"),
        ({"profile_ranks": ["all"]}, "--profile-ranks all"),
        ({"tensorboard_dir": None}, "--use-pytorch-profiler"),
    ],
    ids=str,
)
def test_profiles_that_are_refused(settings: dict[str, Any], given: str) -> None:
    settings = {"profile": True, "use_pytorch_profiler": True, "tensorboard_dir": Path("board"), **settings}
    assert [problem.given for problem in rules.check(make_run(**settings), 2)] == [given]


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile").write_text("")
    profile = StepProfile(CPU, first=1, last=1, trace=tmp_path / "profile" / "trace.json")
    profile.begin_step(1)
    assert profile.end_step(1) == profile.close() == ""
    assert capsys.readouterr().err.startswith(f"no profile {tmp_path / 'profile' / 'trace.json'}: ")
