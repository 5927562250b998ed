"""The history of a run, read back from its metrics file for pictures: the figures of every step, and evaluations."""

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

    figures: by the names of `SHOWN`, and `PEAK`, the most memory of any rank.
    evaluations: {split: [(iteration, loss)]}.  ranks: every rank's figures of the last step that has them.
    """

    iterations: NDArray[np.int64]
    figures: Mapping[str, NDArray[np.float64]]
    evaluations: Mapping[str, list[tuple[int, float]]]
    ranks: list[Mapping[str, Any]]
    summary: RunSummary


@dataclass
class _Notes:
    """What is kept of the records that have been read."""

    steps: list[tuple[float, ...]] = field(default_factory=list)
    evaluations: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    ranks: list[Mapping[str, Any]] = field(default_factory=list)


def read_history(metrics_file: Path) -> History:
    """Read a metrics file; raises `DataError` if it is missing or not a metrics file."""
    notes = _Notes()
    summary = summarize(_noted(read_records(metrics_file), notes))
    table = np.array(notes.steps, np.float64).reshape(len(notes.steps), 2 + len(SHOWN))
    figures = dict(zip((PEAK, *SHOWN), table.T[1:], strict=True))
    return History(table[:, 0].astype(np.int64), figures, notes.evaluations, notes.ranks, summary)


def _noted(records: Iterable[Mapping[str, Any]], notes: _Notes) -> Iterator[Mapping[str, Any]]:
    """Yield the records, and note what pictures show of them."""
    for record in records:
        if "evaluation" in record:
            evaluation = record["evaluation"]
            found = notes.evaluations.setdefault(str(evaluation["split"]), [])
            found.append((evaluation["iteration"], _number(evaluation["loss"])))
        else:
            ranks = record.get("ranks") or ()
            peak = max((rank[PEAK] for rank in ranks), default=None)
            notes.steps.append((record["iteration"], _number(peak), *(_number(record.get(name)) for name in SHOWN)))
            notes.ranks = ranks or notes.ranks
        yield record


def _number(value: float | None) -> float:
    """Return the number; NaN for the null that stands for a loss that was not finite."""
    return float("nan") if value is None else value
