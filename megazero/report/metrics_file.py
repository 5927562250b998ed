"""Writes the metrics file, which has one JSON object a line at full precision, for programs to read.

A *step line* is {"iteration": ..., ..., "ranks": [{"rank": 0, ...}, ...]}, an *evaluation line* {"evaluation": {...}};
each ends in the id of its run.  JSON has no infinities and no NaN; they become null.  `curves_file.py` writes the same
lines, fewer of them, below --save.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megazero.errors import ConfigError, Problem
from megazero.files import open_regular
from megazero.report.metrics import Evaluation, RankMetrics, StepMetrics, StepPicture

RUN_KEY = "run"  # in every record: the id of its run, if it has one
_HEAD_BYTES = 1 << 20  # enough for a line with the figures of a thousand ranks


class MetricsFile:
    """A writer of the metrics file; a resumed run continues at its checkpoint's iteration.

    Every line is flushed, so a reader never waits for the next.  Opening the file drops the lines after
    `resumed_iteration`, whose steps a resumed run repeats, and a last line that a killed run left unfinished; with 0 it
    starts over.  run: the id of the run, "" for none.  Raises `ConfigError` when the file cannot be written, is not a
    metrics file, or would go on with that of another run.  Later on a full disk, say, ends no run: `report` gets one,
    and training goes on without the file.  has_timers: True writes the times of parts at log intervals.
    """

    def __init__(
        self,
        path: Path,
        *,
        resumed_iteration: int = 0,
        has_timers: bool = False,
        run: str = "",
        report: Callable[[str], None] = print,
    ) -> None:
        self._has_timers = has_timers
        self._path, self._run, self._report = path, run, report
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_fifo():  # opening it would wait for a program that reads
                raise OSError(errno.EINVAL, "a FIFO is there")
            truncate_after(
                path, resumed_iteration, kept=lambda source: _own_lines(path, source, resumed_iteration, run)
            )
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            rule = "the metrics file can be written"
            raise ConfigError(Problem(f"--metrics-file {path}: {error.strerror}", rule, "another path")) from error

    def step(self, metrics: StepMetrics, ranks: Sequence[RankMetrics]) -> None:
        record = step_record(metrics) | ({"ranks": rank_records(ranks)} if ranks else {})
        if self._has_timers and metrics.part_times is not None:
            record["timers"] = metrics.part_times.to_json()
        self._write(record)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._write({"evaluation": evaluation_record(evaluation)})

    def sample(self, iteration: int, prompt: str, continuation: str) -> None:
        """Texts are no metrics."""

    def picture(self, picture: StepPicture) -> None:
        """Pictures are no metrics."""

    def saved(self, iteration: int, ranks: Sequence[RankMetrics]) -> None:
        """The steps of log intervals have their ranks' figures."""

    def flush(self) -> None:
        """Do nothing: every line is flushed as it is written."""

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(to_line(record, self._run))
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # what is buffered is written once more
                self._file.close()
            self._report(cannot_go_on(self._path, error, "it"))


def cannot_go_on(path: Path, error: OSError, without: str) -> str:
    """Return the line on a file that training goes on without."""
    return f"{path} cannot be written: {error.strerror or error}; training goes on without {without}"


def to_line(record: Mapping[str, Any], run: str) -> str:
    """Return a record of a run as a line of the file."""
    return json.dumps({**record, RUN_KEY: run} if run else record, allow_nan=False) + "\n"


def step_record(metrics: StepMetrics) -> dict[str, Any]:
    """Return the figures of a step, without those of its ranks."""
    record: dict[str, Any] = {
        "iteration": metrics.iteration,
        "consumed_samples": metrics.consumed_samples,
        "loss": _finite(metrics.loss),
        "grad_norm": _finite(metrics.grad_norm),
        "lr": metrics.lr,
        "loss_scale": metrics.loss_scale,
        "skipped": metrics.skipped,
        "step_seconds": metrics.step_seconds,
        "tokens_per_second": metrics.tokens_per_second,
        "tflops_per_device": metrics.tflops_per_device,
        "data_wait_seconds": metrics.data_wait_seconds,
    }
    if metrics.seq_length is not None:
        record["seq_length"] = metrics.seq_length
    if metrics.overflow_parameter:
        record["overflow_parameter"] = metrics.overflow_parameter
    if metrics.pipeline_idle_share is not None:
        record["pipeline_idle_share"] = metrics.pipeline_idle_share
    if metrics.statistics:
        record["statistics"] = {name: _finite(value) for name, value in metrics.statistics.items()}
    return record


def rank_records(ranks: Sequence[RankMetrics]) -> list[dict[str, Any]]:
    """Return the figures of every rank."""
    return [_rank_record(rank, figures) for rank, figures in enumerate(ranks)]


def _rank_record(rank: int, figures: RankMetrics) -> dict[str, Any]:
    record: dict[str, Any] = {
        "rank": rank,
        "peak_memory_bytes": figures.peak_memory_bytes,
        "model_state_bytes": dict(figures.model_state_bytes),
        "comm_bytes": {axis: dict(by_collective) for axis, by_collective in figures.comm_bytes.items()},
        "data_wait_seconds": figures.data_wait_seconds,
    }
    if figures.bytes_across_nodes:
        record["bytes_across_nodes"] = {axis: dict(sent) for axis, sent in figures.bytes_across_nodes.items()}
    if any(figures.host_state_bytes.values()):
        record["host_state_bytes"] = dict(figures.host_state_bytes)
    if any(figures.file_state_bytes.values()):
        record["file_state_bytes"] = dict(figures.file_state_bytes)
    if figures.device_memory_bytes:
        record["device_memory_bytes"] = dict(figures.device_memory_bytes)
    return record | {"ledger": dict(figures.ledger)} if figures.ledger else record


def evaluation_record(evaluation: Evaluation) -> dict[str, Any]:
    """Return the figures of an evaluation."""
    bits = evaluation.bits_per_byte
    return {
        "iteration": evaluation.iteration,
        "consumed_samples": evaluation.consumed_samples,
        "split": evaluation.split,
        **({"group": evaluation.group} if evaluation.group else {}),
        "loss": _finite(evaluation.loss),
        "perplexity": _finite(evaluation.perplexity),
        "bits_per_byte": None if bits is None else _finite(bits),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def truncate_after(
    path: Path, last_iteration: int, *, kept: Callable[[Iterable[str]], Iterable[str]], source: Path | None = None
) -> None:
    """Write `path` anew with the lines that `kept` yields of it, with none if it starts at 0.

    source: the file whose lines are taken in place of its own.
    """
    source = source or path
    if not source.exists():
        return
    temporary = path.with_name(f".{path.name}.aside")
    try:
        with source.open(encoding="utf-8", errors="replace") as lines, temporary.open("w", encoding="utf-8") as target:
            for line in kept(lines):
                # A run that starts at 0 evaluates at 0 again, so no line of an older one is copied.
                if last_iteration > 0:
                    target.write(line)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def iteration_of(record: Mapping[str, Any]) -> int:
    """Return the iteration after which a record was written; raises an error for anything else than a record."""
    return int(record.get("evaluation", record)["iteration"])


def _own_lines(path: Path, source: Iterable[str], last_iteration: int, run: str) -> Iterator[str]:
    """Yield every whole line up to an iteration; raises `ConfigError` at one that this run cannot have written."""
    for number, line in enumerate(source, start=1):
        if not line.endswith("\n"):
            return
        given = f"--metrics-file {path}, line {number}"
        try:
            record = json.loads(line)
            iteration = iteration_of(record)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            rule = "an existing metrics file has only steps and evaluations"
            raise ConfigError(Problem(given, rule, "a new file, or the file of this run")) from error
        other = record.get(RUN_KEY, run)
        if last_iteration > 0 and run and other != run:
            raise ConfigError(_other_run(given, other, run))
        if iteration <= last_iteration:
            yield line


def problem_of_run(path: Path, run: str) -> Problem | None:
    """Return the problem of a metrics file that a resumed run cannot go on with, as another run wrote it, else None.

    It is found by the first line that names a run, since a file has the lines of one; the writer reads the others.
    run: the id of the run that resumes, "" if it has none yet.
    """
    try:
        with open_regular(path) as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError:
        return None
    for number, line in enumerate(head.splitlines(), start=1):
        try:
            other = json.loads(line).get(RUN_KEY)
        except (ValueError, AttributeError, RecursionError):
            return None
        if other is not None:
            return None if other == run else _other_run(f"--metrics-file {path}, line {number}", other, run)
    return None


def _other_run(given: str, other: object, run: str) -> Problem:
    own = f"run {run}" if run else "a run without an id"
    rule = f"a run that resumes goes on with its own metrics file, and this is {own}"
    return Problem(f"{given}: of run {other}", rule, "a new file, or the file of this run")
