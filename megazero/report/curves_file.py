"""Writes the curves of every run that saves, `curves.jsonl` below --save, which its page is made of.

Its lines are those of the metrics file (`metrics_file.py`), at log intervals only: a *step line* has the means over the
steps since the line before, and with their number; an evaluation has its line; and a *ranks line*,
{"iteration": ..., "ranks": [...]}, has every rank's memory and traffic when a checkpoint was saved, since all ranks
meet there anyway.  So it costs a step nothing.

A file that has grown to `MOST_BYTES` is *thinned*: neighbouring step lines become one, so that steps are spread evenly
over some thousand lines, and lines come as far apart from then on.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megazero.report.metrics import Evaluation, RankMetrics, StepMetrics, StepPicture, interval_metrics
from megazero.report.metrics_file import (
    RUN_KEY,
    cannot_go_on,
    evaluation_record,
    iteration_of,
    rank_records,
    step_record,
    to_line,
    truncate_after,
)

CURVES = "curves.jsonl"
MOST_BYTES = 4 << 20
_LINES = 4000  # that steps are spread over when a file is thinned
_MEANS = ("loss", "step_seconds", "tokens_per_second", "tflops_per_device", "data_wait_seconds")


class CurvesFile:
    """A writer of the curves; a resumed run continues at its checkpoint's iteration, as in `MetricsFile`.

    A file that cannot be written never ends a run: `report` gets one line, and training goes on without it.
    earlier: the curves beside the checkpoint that is resumed, whose lines of the same run this file begins with; None
    if the file itself has them.
    most_bytes, lines: the size at which it is thinned, and how many lines steps are spread over then.
    """

    def __init__(
        self,
        path: Path,
        *,
        log_interval: int,
        train_iters: int,
        report: Callable[[str], None],
        resumed_iteration: int = 0,
        run: str = "",
        earlier: Path | None = None,
        most_bytes: int = MOST_BYTES,
        lines: int = _LINES,
    ) -> None:
        self._path, self._run, self._report = path, run, report
        self._every, self._train_iters = log_interval, train_iters
        self._steps: list[StepMetrics] = []
        self._first = True
        self._most_bytes, self._thins_at, self._lines = most_bytes, most_bytes, lines
        self._works = True
        self._attempt(lambda: self._open(resumed_iteration, earlier))

    def step(self, metrics: StepMetrics, ranks: Sequence[RankMetrics]) -> None:
        self._steps.append(metrics)
        due = metrics.iteration % self._every == 0 or metrics.iteration == self._train_iters
        if due or self._first:
            self.flush()

    def evaluation(self, evaluation: Evaluation) -> None:
        self._write({"evaluation": evaluation_record(evaluation)})

    def sample(self, iteration: int, prompt: str, continuation: str) -> None:
        """Texts are no curves."""

    def picture(self, picture: StepPicture) -> None:
        """Pictures are no curves."""

    def saved(self, iteration: int, ranks: Sequence[RankMetrics]) -> None:
        self.flush()
        self._write({"iteration": iteration, "ranks": rank_records(ranks)})

    def flush(self) -> None:
        if self._steps:
            steps, self._steps, self._first = self._steps, [], False
            self._write(_mean_record(steps))

    def close(self) -> None:
        self.flush()

    def _open(self, resumed_iteration: int, earlier: Path | None) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        truncate_after(
            self._path,
            resumed_iteration,
            kept=lambda source: _lines_until(source, resumed_iteration, self._run),
            source=earlier if earlier is not None and earlier.is_file() else None,
        )

    def _write(self, record: Mapping[str, Any]) -> None:
        self._attempt(lambda: self._append(record))

    def _append(self, record: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(to_line(record, self._run))
            size = file.tell()
        if size > self._thins_at:
            apart = -(-iteration_of(record) // self._lines)
            truncate_after(self._path, 1, kept=lambda source: _thinned(source, apart, self._run))
            self._every = max(self._every, apart)
            # What remains may be much by itself, the figures of many ranks for example.
            self._thins_at = max(self._most_bytes, 2 * os.path.getsize(self._path))

    def _attempt(self, act: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            act()
        except OSError as error:
            self._works = False
            self._report(cannot_go_on(self._path, error, "curves"))


def _mean_record(steps: Sequence[StepMetrics]) -> dict[str, Any]:
    """Return the last step's record, with means over `steps` where a figure is one of each step."""
    interval = interval_metrics(steps)
    mean = replace(
        interval.last,
        loss=float("nan") if interval.loss is None else interval.loss,
        step_seconds=interval.step_seconds,
        tokens_per_second=interval.tokens_per_second,
        tflops_per_device=interval.tflops_per_device,
        data_wait_seconds=interval.data_wait_seconds / len(steps),
    )
    return {**step_record(mean), "skipped": interval.num_skipped, "steps": len(steps)}


def _lines_until(source: Iterable[str], last_iteration: int, run: str) -> Iterator[str]:
    """Yield a run's lines up to an iteration; what is no line of the file, or names another run, is left out."""
    return (
        line
        for line, record in _records(source)
        if iteration_of(record) <= last_iteration and record.get(RUN_KEY, run) == run
    )


def _records(source: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in source:
        try:
            record = json.loads(line)
            iteration_of(record)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if line.endswith("\n"):
            yield line, record


def _thinned(source: Iterable[str], apart: int, run: str) -> Iterator[str]:
    """Yield lines of which at most one of a kind ends in every `apart` iterations, besides the first of each kind.

    Steps between are averaged.  Evaluations between are left out, and the ranks of all checkpoints but the last, of
    which the one that has used most memory stays.
    """
    held: dict[str, list[dict[str, Any]]] = {}
    for line, record in _records(source):
        kind = _kind(record)
        if kind not in held:
            held[kind] = []
            yield line
            continue
        window = held[kind]
        if window and iteration_of(record) // apart != iteration_of(window[0]) // apart:
            yield to_line(_one_of(kind, window), run)
            window.clear()
        window.append(record)
    for kind, window in held.items():
        if window:
            yield to_line(window[-1] if kind == "ranks" else _one_of(kind, window), run)


def _kind(record: Mapping[str, Any]) -> str:
    if "evaluation" in record:
        return f"evaluation of {record['evaluation'].get('split')}"
    return "ranks" if "ranks" in record else "step"


def _one_of(kind: str, records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the record that stands for neighbouring ones of a kind."""
    last = records[-1]
    if kind == "ranks":
        return {**last, "ranks": sorted(last["ranks"], key=lambda rank: rank["peak_memory_bytes"])[-1:]}
    if kind != "step":
        return last
    counts = [record["steps"] for record in records]
    means = {}
    for name in _MEANS:
        known = [
            (record[name], count) for record, count in zip(records, counts, strict=True) if record[name] is not None
        ]
        total = sum(count for _, count in known)
        means[name] = sum(value * count for value, count in known) / total if total else None
    return {**last, **means, "skipped": sum(record["skipped"] for record in records), "steps": sum(counts)}
