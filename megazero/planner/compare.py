"""Puts the steps of a run, by its metrics file, beside their prediction.  Pure but for reading the file."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megazero.errors import DataError, Problem
from megazero.planner.seconds import StepTime

# {part of a predicted step: the timers of a run (`--timing-log-level 2`) that measure it}
TIMERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "forward": ("forward-compute",),
        "backward": ("backward-compute", "backward-input-compute", "backward-weight-compute"),
        "reduce": ("all-grads-sync",),
        "update": ("grad-norm", "optimizer"),
    }
)
_WARM_UP = 2  # steps that no comparison counts, if there are more


@dataclass(frozen=True)
class ComparedPart:
    """A part of a step: predicted and measured, both in seconds, or both shares of the step."""

    name: str
    predicted: float
    measured: float
    is_share: bool = False

    @property
    def error(self) -> float:
        """The predicted figure's excess over the measured one, relative to that one."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def compared(step: StepTime, records: Iterable[Mapping[str, Any]], *, origin: str) -> tuple[ComparedPart, ...]:
    """Return the rows of the step and of its parts, as far as a run has measured them.

    records: of a metrics file.  origin: its name, for the message.  Raises DataError if it has no steps.
    """
    steps = [record for record in records if "step_seconds" in record and "steps" not in record]
    if not steps:
        rule = "a comparison is with the steps of a run, which --metrics-file records"
        raise DataError(Problem(f"{origin}: no step is recorded", rule, "--compare RUN/metrics.jsonl"))
    steps = steps[_WARM_UP:] or steps[-1:]
    rows = [ComparedPart("step", step.seconds, statistics.median(record["step_seconds"] for record in steps))]
    timed = [record["timers"] for record in steps if record.get("timers")]
    predicted = step.parts()
    for part, names in TIMERS.items():
        measured = [sum(_largest(timers[name]) for name in names if name in timers) for timers in timed]
        if part in predicted and measured and max(measured) > 0:
            rows.append(ComparedPart(part, predicted[part], statistics.median(measured)))
    idle = [record["pipeline_idle_share"] for record in steps if record.get("pipeline_idle_share") is not None]
    if idle:
        rows.append(ComparedPart("waits for other stages", step.idle_share, statistics.median(idle), is_share=True))
    return tuple(rows)


def lines(rows: Sequence[ComparedPart]) -> Iterator[str]:
    """Yield the rows as a table in text."""
    width = max(len(row.name) for row in rows)
    yield f"{'':<{width}}  {'predicted':>12} {'measured':>12} {'error':>8}"
    for row in rows:
        figures = (row.predicted, row.measured)
        shown = [f"{100 * figure:.1f} %" if row.is_share else f"{1000 * figure:,.1f} ms" for figure in figures]
        yield f"{row.name:<{width}}  {shown[0]:>12} {shown[1]:>12} {100 * row.error:>+6.1f} %"
    if len(rows) == 1:
        yield "parts of the step: a run with --timing-log-level 2 --log-timers-to-tensorboard measures them"


def _largest(timer: Mapping[str, float] | Sequence[float]) -> float:
    """Return the slowest rank's seconds of a part, in either form of the file."""
    return timer["max"] if isinstance(timer, Mapping) else max(timer)
