"""Tests of the benchmark of faults: it has twenty, records each job once, and keeps torchrun's words out."""

import json
import sys
from pathlib import Path

import pytest
from fault_reports import IN_LARGER_JOBS, KINDS, LAUNCHES, main, own_lines, table
from support.warm_python import warm_python


def test_twenty_faults_under_three_launches_and_some_in_larger_jobs() -> None:
    assert (len(KINDS), len(LAUNCHES)) == (20, 5)
    assert len(list(table())) == 3 * 20 + 2 * len(IN_LARGER_JOBS)


def test_what_torchrun_prints_is_left_out() -> None:
    output = """\
pipeline 1 x data 2
fault: rank 1
[2026-11-22] iteration 3/10
  rank 0
W1122 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 5
  rank 1
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
    return launch_agent(
"""
    assert own_lines(output) == ["fault: rank 1", "  rank 0", "  rank 1"]
    assert own_lines("done\n") == []


@pytest.mark.gloo
def test_a_job_is_recorded_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())
    records = tmp_path / "records.jsonl"
    page = tmp_path / "page.md"
    for _ in range(2):
        assert main(["--records", str(records), "--only", "ranks: killed, rank 1", "--output", str(page)]) == 0
    (row,) = map(json.loads, records.read_text().splitlines())
    assert row["codes"] == [1, -9] and row["ended"]
    assert row["printed"][0][0].startswith("fault: rank 1 ") and "is gone" in row["printed"][0][0]
    assert max(row["seconds"]) < 20
    text = page.read_text()
    assert f"| killed, rank 1 | {row['seconds'][0]} {row['seconds'][1]} | - |" in text
    assert f"Exit statuses: 1 -9.\n\n```text\n{row['printed'][0][0]}\n" in text
