"""Tests of the curves of a run: lines at log intervals, what stays of them, and how they are thinned."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.step_metrics import make_step

from megazero.report.curves_file import CurvesFile
from megazero.report.history import read_history
from megazero.report.metrics import Evaluation, RankMetrics
from megazero.report.summary import read_records, summarize


def open_file(folder: Path, **settings: Any) -> CurvesFile:
    plain = {"log_interval": 3, "train_iters": 10, "run": "a1", "report": lambda line: pytest.fail(line)}
    return CurvesFile(folder / "c.jsonl", **{**plain, **settings})


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "c.jsonl").read_text().splitlines()]


def ranks(*peaks: int) -> list[RankMetrics]:
    return [RankMetrics(peak, {"parameters": 4}, {"dp": {"all_reduce": 8}}) for peak in peaks]


def test_a_line_has_the_means_over_its_steps(tmp_path: Path) -> None:
    """The first step and the last have lines as on the console; a skipped step has no loss."""
    file = open_file(tmp_path)
    for iteration in range(1, 11):
        skipped = iteration == 2
        loss = math.nan if skipped else float(iteration)
        file.step(
            make_step(
                iteration,
                loss=loss,
                skipped=skipped,
                step_seconds=iteration,
                tokens_per_second=60 / iteration,
                data_wait_seconds=0.5 * iteration,
            ),
            [],
        )
    file.close()
    found = read(tmp_path)
    assert [(line["iteration"], line["steps"], line["skipped"], line["loss"]) for line in found] == [
        (1, 1, 0, 1.0),
        (3, 2, 1, 3.0),
        (6, 3, 0, 5.0),
        (9, 3, 0, 8.0),
        (10, 1, 0, 10.0),
    ]
    # 3 steps of 60 tokens in 4 + 5 + 6 seconds.
    assert (found[2]["step_seconds"], found[2]["tokens_per_second"]) == (5.0, 12.0)
    assert found[2]["data_wait_seconds"] == 2.5
    assert {line["run"] for line in found} == {"a1"} and not any("ranks" in line for line in found)
    summary = summarize(read_records(tmp_path / "c.jsonl"))
    assert (summary.num_steps, summary.num_skipped, summary.train_seconds) == (10, 1, 55.0)
    assert summary.tokens_per_second == pytest.approx(9 * 60 / 54)


def test_a_checkpoint_writes_what_is_held_and_the_ranks(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    for iteration in range(1, 6):
        file.step(make_step(iteration), ranks(9, 9))
    file.saved(5, ranks(100, 300))
    assert [(line["iteration"], line.get("steps")) for line in read(tmp_path)] == [(1, 1), (3, 2), (5, 2), (5, None)]
    history = read_history(tmp_path / "c.jsonl")
    assert history.peaks == [(5, 300)] and [rank["rank"] for rank in history.ranks] == [0, 1]
    assert history.most_steps == 2 and list(history.iterations) == [1, 3, 5]


def test_a_resumed_run_continues_at_its_step_with_what_can_be_read(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    for iteration in range(1, 8):
        file.step(make_step(iteration), [])
    file.evaluation(Evaluation(7, 56, "validation", loss=2.0))
    file.close()
    with (tmp_path / "c.jsonl").open("a") as torn:
        torn.write('x\n{"iteration": 2, "los')
    file = open_file(tmp_path, resumed_iteration=4)
    file.step(make_step(5), [])
    assert [line["iteration"] for line in read(tmp_path)] == [1, 3, 5]
    open_file(tmp_path)
    assert read(tmp_path) == []


def test_a_run_that_saves_elsewhere_takes_its_lines_along(tmp_path: Path) -> None:
    """Those of its own id, up to the checkpoint; the folder it saves into may have curves that its steps replace."""
    before, after = tmp_path / "before", tmp_path / "after"
    for folder, run, last in ((before, "a1", 7), (after, "b2", 5)):
        file = open_file(folder, run=run)
        for iteration in range(1, last + 1):
            file.step(make_step(iteration, loss=float(iteration)), [])
        file.saved(last, ranks(9))
        file.close()
    kept = (before / "c.jsonl").read_text()
    open_file(after, resumed_iteration=6, earlier=before / "c.jsonl").step(make_step(7), [])
    assert [(line["iteration"], line["run"]) for line in read(after)] == [(1, "a1"), (3, "a1"), (6, "a1"), (7, "a1")]
    assert [line["loss"] for line in read(after)[:3]] == [1.0, 2.5, 5.0]
    assert (before / "c.jsonl").read_text() == kept, "they stay where they are"
    # Without curves there, or with those of another run, it begins anew; its own stay where the others are missing.
    for earlier, wanted in ((tmp_path / "nowhere" / "c.jsonl", [1, 3, 6]), (after / "other.jsonl", [])):
        open_file(after, resumed_iteration=6, earlier=earlier)
        assert [line["iteration"] for line in read(after)] == wanted
        (after / "other.jsonl").write_text(kept.replace('"a1"', '"b2"'))
    open_file(after, run="b2", resumed_iteration=0, earlier=before / "c.jsonl")
    assert read(after) == []


def test_a_long_run_stays_within_its_bytes(tmp_path: Path) -> None:
    """Steps, seconds and skipped steps are kept in sum; the first line of each kind and the last ranks as they are."""
    file = open_file(tmp_path, log_interval=1, train_iters=50_000, most_bytes=20_000, lines=50)
    for iteration in range(1, 1001):
        file.step(make_step(iteration, loss=iteration, skipped=iteration % 100 == 0), [])
        if iteration % 10 == 0:
            file.evaluation(Evaluation(iteration, 8 * iteration, "validation", loss=1.0))
            file.saved(iteration, ranks(iteration, iteration + 1, 3))
    size = (tmp_path / "c.jsonl").stat().st_size
    assert 10_000 < size < 60_000  # 150 lines of the three kinds, and as much again before it is thinned
    history = read_history(tmp_path / "c.jsonl")
    steps = [line for line in read(tmp_path) if "steps" in line]
    assert sum(line["steps"] for line in steps) == 1000 and steps[0]["steps"] == 1
    assert list(history.iterations) == sorted(set(history.iterations)) and history.iterations[-1] == 1000
    mean = sum(line["loss"] * (line["steps"] - line["skipped"]) for line in steps) / (1000 - 10)
    assert mean == pytest.approx(500, rel=1e-2)
    assert history.summary.num_skipped == 10 and history.summary.train_seconds == 1000
    evaluated = [iteration for iteration, _ in history.evaluations["validation"]]
    assert evaluated[0] == 10 and evaluated[-1] == 1000 and 20 < len(evaluated) < 90
    assert len(history.ranks) == 3 and history.peaks[-1] == (1000, 1001)


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").mkdir()
    said: list[str] = []
    file = open_file(tmp_path, report=said.append)
    for iteration in range(1, 8):
        file.step(make_step(iteration), [])
    file.close()
    (line,) = said
    assert line.startswith(f"{tmp_path / 'c.jsonl'} cannot be written: ") and line.endswith("goes on without curves")
