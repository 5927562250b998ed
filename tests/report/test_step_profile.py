"""Tests profiles of steps by torch's profiler: which steps and ranks a run records, and where the traces are."""

import json
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import make_run
from support.each import each
from support.small_runs import train_run

from megazero.report import memory_history
from megazero.report.memory_history import MemoryHistory, snapshot_of
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


@each(
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


# --- the history of memory --------------------------------------------------------------------------------------------


def test_each_of_several_ranks_has_a_file() -> None:
    path = Path("runs/memory.pickle")
    assert snapshot_of(path, 3, 1) == path
    assert snapshot_of(path, 3, 2) == Path("runs/memory_rank0003.pickle")
    assert snapshot_of(Path("memory"), 12, 2) == Path("memory_rank0012")


def test_a_cpu_has_no_history_and_is_told_where_its_memory_is(tmp_path: Path) -> None:
    settings = {"profile": True, "profile_step_start": 0, "use_pytorch_profiler": True, "train_iters": 1}
    told = train_run(0, 1, {**settings, "record_memory_history": True, "save": str(tmp_path / "save")})
    assert "--record-memory-history: moot here, because only a GPU's allocator records one" in told.text
    assert "--ledger --ledger-dir DIR" in told.text and "snapshot of memory" not in told.text


def test_the_history_ends_with_the_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is recorded from its making on, and written once, though the allocator here is none of a GPU."""
    calls: list[str] = []
    monkeypatch.setattr(
        memory_history, "_record", lambda **options: calls.append("stop" if "enabled" in options else "record")
    )
    monkeypatch.setattr(memory_history, "_write", lambda path: (calls.append("write"), Path(path).write_text("")))
    path = tmp_path / "deep" / "snapshot.pickle"
    trace = tmp_path / "trace.json"
    profile = StepProfile(CPU, first=2, last=2, trace=trace, history=MemoryHistory(path))
    for iteration in (1, 2, 3):
        profile.begin_step(iteration)
        calls.append(profile.end_step(iteration).rpartition("\n")[2])
    assert calls == ["record", "", "write", "stop", f"snapshot of memory: {path}", ""]
    assert path.exists() and trace.exists()


def test_a_snapshot_that_cannot_be_written_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(memory_history, "_record", lambda **options: calls.append(options))
    monkeypatch.setattr(memory_history, "_write", lambda path: Path(path).write_text(""))
    (tmp_path / "file").write_text("")
    assert MemoryHistory(tmp_path / "file" / "snapshot.pickle").close() == ""
    assert capsys.readouterr().err.startswith(f"no snapshot of memory {tmp_path / 'file' / 'snapshot.pickle'}: ")
    assert calls[-1] == {"enabled": None}


@pytest.mark.cuda
def test_a_snapshot_has_what_was_allocated(tmp_path: Path) -> None:
    history = MemoryHistory(tmp_path / "snapshot.pickle")
    kept = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    history.close()
    # Read as a list of operations, since a pickle that is loaded may run any program.
    operations = [*pickletools.genops((tmp_path / "snapshot.pickle").read_bytes())]
    assert {"device_traces", "alloc"} <= {value for code, value, _ in operations if "UNICODE" in code.name}
    assert kept.nbytes in [value for code, value, _ in operations if "INT" in code.name]
