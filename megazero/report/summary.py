"""Summarises the outcome of a run, which is read from its metrics file, or from the file of its curves.

The figures of interest are the first and the last *evaluation* of the validation split (of its first group, where it
has groups) - before and after training - and the *pace*, tokens a second over all steps but the first, which includes
warming up.  A file is of one run, whose id its lines carry.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.errors import DataError, Problem
from megazero.files import open_regular, parse_json
from megazero.report.metrics_file import RUN_KEY
from megazero.units import format_count, format_duration

_MAX_LINE_BYTES = 1 << 24


@dataclass(frozen=True)
class RunSummary:
    """A run's outcome.

    before, after: first and last evaluation record of the metrics file, equal if there is only one; None when the run
    did not evaluate.  num_steps: steps so far.  train_seconds: time in steps, without evaluations and saving.
    """

    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    num_steps: int
    num_skipped: int
    train_seconds: float
    tokens_per_second: float

    def lines(self) -> list[str]:
        """Return the summary for the user, line by line."""
        pace = f"{format_duration(self.train_seconds)} in steps, {format_count(self.tokens_per_second)} tokens/s"
        skipped = f", {self.num_skipped} skipped" if self.num_skipped else ""
        steps = f"{'steps':<16} {self.num_steps}{skipped} ({pace})"
        if self.before is None or self.after is None:
            return [steps, "no evaluation"]
        shown = [self.before, self.after] if self.before is not self.after else [self.after]
        titles = (f"step {record['iteration']}" for record in shown)
        table = [f"{'':<16} " + " ".join(f"{title:>12}" for title in titles)]
        for title, name in (
            ("validation loss", "loss"),
            ("perplexity", "perplexity"),
            ("bits per byte", "bits_per_byte"),
        ):
            values = (_figure(record[name]) for record in shown)
            table.append(f"{title:<16} " + " ".join(f"{value:>12}" for value in values))
        return [*table, steps]


def summarize(records: Iterable[Mapping[str, Any]]) -> RunSummary:
    """Return the summary of a file's records."""
    evaluations: list[Mapping[str, Any]] = []
    num_steps, num_skipped, seconds, timed_seconds, timed_tokens = 0, 0, 0.0, 0.0, 0.0
    for record in records:
        if "evaluation" in record:
            found = record["evaluation"]
            is_first = not evaluations or found.get("group") == evaluations[0].get("group")
            evaluations += [found] if found["split"] == "validation" and is_first else []
            continue
        if "step_seconds" not in record:
            continue
        taken = record["step_seconds"] * record.get("steps", 1)
        if num_steps:
            timed_seconds += taken
            timed_tokens += taken * record["tokens_per_second"]
        num_steps = record["iteration"]
        num_skipped += record["skipped"]
        seconds += taken
    return RunSummary(
        before=evaluations[0] if evaluations else None,
        after=evaluations[-1] if evaluations else None,
        num_steps=num_steps,
        num_skipped=num_skipped,
        train_seconds=seconds,
        tokens_per_second=timed_tokens / timed_seconds if timed_seconds > 0 else 0.0,
    )


def read_records(path: Path, run: str = "") -> Iterator[Mapping[str, Any]]:
    """Yield a file's records; a last line without its end was cut off and is left out.

    run: the id of the run that it must be of, "" for any.  Raises `DataError` if the file is missing, is not a metrics
    file, or has lines of another run.
    """
    for number, line in enumerate(_lines(path), start=1):
        if len(line) < _MAX_LINE_BYTES and not line.endswith(b"\n"):
            return
        try:
            record = parse_json(line.decode(errors="replace"))
            # The keys that the summary reads must exist.
            if "evaluation" in record:
                _ = record["evaluation"]["split"]
            elif "ranks" not in record:
                _ = record["step_seconds"]
        except (ValueError, TypeError, KeyError) as error:
            rule = "every line is a step or an evaluation"
            legal = "a file written by --metrics-file, or a run's curves.jsonl"
            raise DataError(Problem(f"{path}, line {number}", rule, legal)) from error
        own = record.get(RUN_KEY, run)
        if run and own != run:
            given = f"{path}, line {number}: a figure of run {own}, among those of run {run}"
            raise DataError(Problem(given, "figures are of one run", f"the metrics file of run {run}"))
        run = own
        yield record


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the file's lines; one that is longer than any of a metrics file comes in parts."""
    try:
        with open_regular(path) as stream:
            yield from iter(lambda: stream.readline(_MAX_LINE_BYTES), b"")
    except OSError as error:
        problem = Problem(f"{path}: {error.strerror}", "the run has written a metrics file", "--metrics-file FILE")
        raise DataError(problem) from error


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
