"""The history of a run, read back for pictures: figures of steps, evaluations, and the memory of its processes.

It is read from a metrics file, which has every step, or from the file of a run's curves, which has means over some.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.report.summary import RunSummary, read_records, summarize

# The figures of a step that pictures show, by their names in the metrics file.
PEAK = "peak_memory_bytes"
SHOWN = ("loss", "grad_norm", "lr", "tokens_per_second", "step_seconds", "data_wait_seconds")


@dataclass(frozen=True, eq=False)
class History:
    """The figures of a run's steps, [n], NaN where the file has null; and its evaluations.

    figures: by the names of `SHOWN`.  peaks: [(iteration, the most memory of any rank)].  most_steps: that a figure is
    the mean of.  evaluations: {split, with the group's name if there are groups: [(iteration, loss)]}.  ranks: every
    rank's figures when they were taken last.
    """

    iterations: NDArray[np.int64]
    figures: Mapping[str, NDArray[np.float64]]
    peaks: list[tuple[int, float]]
    most_steps: int
    evaluations: Mapping[str, list[tuple[int, float]]]
    ranks: list[Mapping[str, Any]]
    summary: RunSummary


@dataclass
class _Notes:
    """The parts that are kept of the records that have been read."""

    steps: list[tuple[float, ...]] = field(default_factory=list)
    peaks: list[tuple[int, float]] = field(default_factory=list)
    most_steps: int = 1
    evaluations: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    ranks: list[Mapping[str, Any]] = field(default_factory=list)


def read_history(path: Path, run: str = "") -> History:
    """Read a file of figures; run, errors: see `read_records`."""
    notes = _Notes()
    summary = summarize(_noted(read_records(path, run), notes))
    table = np.array(notes.steps, np.float64).reshape(len(notes.steps), 1 + len(SHOWN))
    figures = dict(zip(SHOWN, table.T[1:], strict=True))
    return History(
        table[:, 0].astype(np.int64), figures, notes.peaks, notes.most_steps, notes.evaluations, notes.ranks, summary
    )


def _noted(records: Iterable[Mapping[str, Any]], notes: _Notes) -> Iterator[Mapping[str, Any]]:
    """Yield the records, and note what pictures show of them."""
    for record in records:
        if "evaluation" in record:
            evaluation = record["evaluation"]
            name = f"{evaluation['split']} {evaluation.get('group', '')}".strip()
            found = notes.evaluations.setdefault(name, [])
            if found and found[-1][0] == evaluation["iteration"]:  # evaluated again, with other data perhaps
                found.pop()
            found.append((evaluation["iteration"], _number(evaluation["loss"])))
        elif "step_seconds" in record:
            notes.steps.append((record["iteration"], *(_number(record.get(name)) for name in SHOWN)))
            notes.most_steps = max(notes.most_steps, record.get("steps", 1))
        if ranks := record.get("ranks"):
            notes.peaks.append((record["iteration"], max(rank[PEAK] for rank in ranks)))
            notes.ranks = ranks
        yield record


def _number(value: float | None) -> float:
    """Return the number; NaN for the null that stands for a loss that was not finite."""
    return float("nan") if value is None else value
