"""Tests of the program that kills runs: it finds nothing wrong, would find damage, and resumes where it was stopped."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from checkpoint_faults import damage, litter
from support.sharded_state import Layout, make_state
from support.source_tree import ROOT
from support.warm_python import warm_python

from megazero.checkpoint.writer import Draft, save
from megazero.comm.local import LocalCommunicator


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for step in (1, 2):
        fragments = Layout().fragments(0, make_state())
        save(Draft(tmp_path, step, {}, ""), fragments, control=LocalCommunicator())
    return tmp_path


def test_damage_is_found(saved: Path) -> None:
    assert list(damage(saved, [1, 2], 2)) == []
    assert list(damage(saved, [1, 2, 3], 2)) == [
        f"step 3 was announced, and the newest is {saved / 'step_0000002'}",
        "step 3 is gone",
    ]
    with open(saved / "step_0000001" / "rank_00000.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    (saved / "latest").write_text("step_0000009")
    first, second = damage(saved, [], 2)
    assert first.startswith("step_0000001: ") and "do not match the hash" in first
    assert second.startswith("latest: ")


def test_litter_is_what_a_finished_run_does_not_leave(saved: Path) -> None:
    assert litter(saved) == []
    for name in (".lock", ".saving_latest.1-2-3", "config.yaml", "step_0000002_2"):
        (saved / name).touch()
    assert litter(saved) == [".lock", ".saving_latest.1-2-3"]


@pytest.mark.gloo
def test_disturbed_runs_lose_nothing_and_a_trial_is_not_run_again(tmp_path: Path) -> None:
    records, page = tmp_path / "r.jsonl", tmp_path / "page.md"
    program = [warm_python(), str(ROOT / "benchmarks" / "checkpoint_faults.py"), "--records", str(records)]
    words = ["--output", str(page), "--kills", "3", "--pairs", "1", "--seed", "7"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run([*program, *words], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert [row["trial"] for row in rows] == ["job 0", "rank 1", "operation 2", "pair 0"]
    assert page.read_text().startswith("# What became of 4 disturbed runs")
    assert "No damage was found." in page.read_text()
