"""Tests of the summary of metrics files, which are made by the writer that a run uses."""

from pathlib import Path

import pytest
from support.step_metrics import make_step

from megazero.errors import DataError
from megazero.report.metrics import Evaluation, StepMetrics
from megazero.report.metrics_file import MetricsFile
from megazero.report.summary import read_records, summarize


def evaluation(iteration: int, loss: float, *, split: str = "validation") -> Evaluation:
    return Evaluation(iteration, 8 * iteration, split, loss=loss, bytes_per_token=3.0)


def write(path: Path, *entries: StepMetrics | Evaluation) -> Path:
    file = MetricsFile(path)
    for entry in entries:
        if isinstance(entry, Evaluation):
            file.evaluation(entry)
        else:
            file.step(entry, [])
    file.close()
    return path


def test_before_and_after(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl",
        evaluation(0, 7.5),
        make_step(1, step_seconds=10.0, tokens_per_second=10.0),
        make_step(2, step_seconds=1.0, tokens_per_second=300.0, skipped=True),
        evaluation(2, 5.0),
        make_step(3, step_seconds=2.0, tokens_per_second=150.0),
        evaluation(3, 3.0),
        evaluation(3, 9.0, split="test"),
    )
    summary = summarize(read_records(path))
    assert summary.before is not None and summary.after is not None
    assert (summary.before["iteration"], summary.before["loss"]) == (0, 7.5)
    assert (summary.after["iteration"], summary.after["loss"]) == (3, 3.0)
    assert (summary.num_steps, summary.num_skipped, summary.train_seconds) == (3, 1, 13.0)
    # 300 tokens in 1 s and 300 in 2 s; the first step does not count towards the pace.
    assert summary.tokens_per_second == 200.0
    assert summary.lines() == [
        "                       step 0       step 3",
        "validation loss        7.5000       3.0000",
        "perplexity          1808.0424      20.0855",
        "bits per byte          3.6067       1.4427",
        "steps            3, 1 skipped (13.0s in steps, 200 tokens/s)",
    ]


def test_a_run_without_evaluation(tmp_path: Path) -> None:
    assert summarize(read_records(write(tmp_path / "m.jsonl", make_step(1)))).lines()[-1] == "no evaluation"


def test_an_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", make_step(1), make_step(2))
    path.write_text(path.read_text()[:-5])
    assert summarize(read_records(path)).num_steps == 1


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000 + "\n", "\0" * (1 << 24), "dear diary\n", "[]\n", '{"iteration": 3}\n', '{"evaluation": 3}\n'],
    ids=["deep", "long", "text", "list", "step", "evaluation"],
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.jsonl").write_text(content)
    with pytest.raises(DataError, match="line 1"):
        summarize(read_records(tmp_path / "m.jsonl"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        summarize(read_records(tmp_path / "m.jsonl"))
