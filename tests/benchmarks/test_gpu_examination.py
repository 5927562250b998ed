"""Tests of the examination of a GPU machine, on a CPU at toy sizes: phases that pass, fail or hang, and the record."""

import json
import subprocess
import sys
from pathlib import Path

import gpu_examination
import gpu_phases
import pytest
from gpu_examination import (
    NEEDS_GPU,
    NO_TIME,
    PASSED,
    PHASES,
    Examination,
    Phase,
    compared_losses,
    main,
    parse_arguments,
)
from support.source_tree import ROOT
from support.warm_python import warm_python

# The phases that a CPU runs, with the figures that their record must have; other tests run phases of several processes.
FOUND = {
    "environment": ("python", "packages", "driver"),
    "speed": ("tokens_per_second", "losses", "memory", "synchronizations", "profile"),
    "plain": ("tokens_per_second", "losses"),
    "exactness": ("cases",),
    "collectives": ("cases",),
    "ledger": ("cases",),
}


def test_every_phase_is_a_function_that_takes_its_options() -> None:
    assert {phase.name for phase in PHASES} == set(gpu_phases.PHASES)
    assert len({phase.key for phase in PHASES}) == len(PHASES)
    for phase in PHASES:
        code = gpu_phases.PHASES[phase.name].__code__
        assert set(phase.options) <= set(code.co_varnames[1 : 1 + code.co_kwonlyargcount]), phase.key


def test_the_test_of_recorded_passes_is_there_for_the_phase_of_gpu_tests() -> None:
    """The phase leaves out the rest of the file; a name that is not there would fail on a GPU only."""
    file, _, name = gpu_phases.GRAPHS_TEST.partition("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text("utf-8")


def test_phases_that_matter_fit_into_the_time() -> None:
    alone = [phase for phase in PHASES if phase.runs == gpu_examination.ALONE]
    together = [phase for phase in PHASES if phase.runs == gpu_examination.TOGETHER]
    before = [phase for phase in alone if PHASES.index(phase) < PHASES.index(together[0])]
    assert sum(phase.limit for phase in before) + max(phase.limit for phase in together) <= 575
    assert parse_arguments(["--device", "cpu"]).seconds <= 540


@pytest.fixture
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let phases, and the programs that they start, be run by a python that has its imports."""
    monkeypatch.setattr(sys, "executable", warm_python())


@pytest.mark.gloo
@pytest.mark.usefixtures("_warm")
def test_phases_on_a_cpu(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--seconds", "280", "--results", str(tmp_path), "--output", "toy", "--only", *FOUND]
    assert main([*words, "ceilings"]) == 0
    record = json.loads((tmp_path / "toy.json").read_text())
    assert (record["device"], record["examines"]) == ("CPU", "a GPU")
    for phase in PHASES:
        if phase.name not in (*FOUND, "ceilings"):
            continue
        row = record["phases"][phase.key]
        assert row["status"] == (NEEDS_GPU if phase.needs_gpu else PASSED), row
        for key in () if phase.needs_gpu else FOUND[phase.name]:
            assert key in row["found"], phase.key
    [speed] = [row["found"] for key, row in record["phases"].items() if key.startswith("speed") and "found" in row]
    assert speed["profile"] == speed["memory"] == NEEDS_GPU and speed["mfu"] is None
    log = (tmp_path / "toy.log").read_text()
    assert all(f"===== {key}\n" in log for key, row in record["phases"].items() if row["status"] == PASSED)


@pytest.mark.gloo
@pytest.mark.usefixtures("_warm")
def test_phases_of_programs_on_a_cpu(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--seconds", "280", "--results", str(tmp_path), "--output", "toy"]
    assert main([*words, "--only", "losses", "layouts", "settings"]) == 0
    record = json.loads((tmp_path / "toy.json").read_text())
    assert [row["largest_relative"] for row in record["phases"]["settings"]["found"]["cases"].values()] == [0.0]
    cases = record["phases"]["losses where=device"]["found"]["cases"]
    assert set(cases) == {"device fp32", "device bf16 compile off stage 2", "generate"}
    curves = record["loss_curves"]
    assert curves["cpu fp32"]["largest_relative"] == curves["device fp32"]["largest_relative"] == 0.0
    assert 0 < curves["device bf16 compile off stage 2"]["largest_relative"] < 0.05


@pytest.mark.gloo
@pytest.mark.usefixtures("_warm")
def test_a_failing_phase_is_recorded_and_later_ones_run(tmp_path: Path) -> None:
    examination = Examination("cpu", 200.0, tmp_path / "toy.json")
    wrong = Phase("speed", 40, {"preset": "gpt2-124m", "micro_batch": 64, "stage": 7})
    hanging = Phase("plain", 0.02, {"preset": "gpt2-124m", "micro_batch": 1})
    assert not examination.run([wrong, hanging, Phase("ceilings", 1, needs_gpu=True), Phase("environment", 60, {})])
    phases = json.loads((tmp_path / "toy.json").read_text())["phases"]
    failed, ended, passed = (phases[phase.key] for phase in (wrong, hanging, Phase("environment", 60)))
    assert failed["status"] == "failed, exit status 1" and "--zero-stage 7" in failed["found"]["error"]
    assert "--zero-stage 7" in failed["tail"] and ended["status"] == "failed, ended after 0 s"
    assert passed["status"] == PASSED and passed["found"]["packages"]


@pytest.mark.parametrize(("status", "expected"), [(PASSED, 0), (NEEDS_GPU, 0), (NO_TIME, 0), ("failed, ...", 1)])
def test_exit_status(status: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Examination, phases: list[Phase], scratch: Path) -> None:
        self.record["phases"] |= {phase.key: {"status": status} for phase in phases}

    monkeypatch.setattr(Examination, "_run_in_turn", run)
    assert main(["--device", "cpu", "--results", str(tmp_path), "--only", "environment"]) == expected


def test_without_time_nothing_starts(tmp_path: Path) -> None:
    examination = Examination("cpu", 1.0, tmp_path / "toy.json")
    assert examination.run([Phase("environment", 40), Phase("ceilings", 40, needs_gpu=True)])
    statuses = {key: row["status"] for key, row in examination.record["phases"].items()}
    assert statuses == {"environment": NO_TIME, "ceilings": NEEDS_GPU}


def test_losses_beside_those_of_the_cpu() -> None:
    found = {"cpu fp32": [4.0, 2.0], "device fp32": [4.0, 2.1], "device bf16": []}
    phases = {"losses where=cpu": {"found": {"curves": found}}, "plain": {"status": NEEDS_GPU}}
    curves = compared_losses(phases)
    assert curves["device fp32"] == {"last": 2.1, "largest_relative": pytest.approx(0.05)}
    assert curves["device bf16"] == {"last": None, "largest_relative": None}


def test_a_machine_without_a_gpu_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_examination.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        parse_arguments([])
    assert "sees no GPU" in capsys.readouterr().err


def test_the_script_passes_arguments_and_status_on(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"; exit 3\n')
    python.chmod(0o755)
    script = ["bash", str(ROOT / "benchmarks" / "gpu_examination.sh"), "--seconds", "7"]
    done = subprocess.run(script, env={"PYTHON": str(python), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout == "benchmarks/gpu_examination.py --seconds 7\n"
    fetched = subprocess.run([*script[:2], "--fetch", "wheels"], env={"PYTHON": str(python), "PATH": "/usr/bin:/bin"},
                             capture_output=True, text=True)  # fmt: skip
    assert "pydantic_core==" in fetched.stdout and "typing-inspection==" in fetched.stdout
