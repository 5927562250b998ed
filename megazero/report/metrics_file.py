"""Writes the metrics file, which has one JSON object a line at full precision, for programs to read.

A *step line* is {"iteration": ..., ..., "ranks": [{"rank": 0, ...}, ...]}, an *evaluation line* {"evaluation": {...}}.
JSON has no infinities and no NaN; they become null.
"""

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megazero.errors import ConfigError, Problem
from megazero.report.metrics import Evaluation, RankMetrics, StepMetrics, StepPicture


class MetricsFile:
    """A writer of the metrics file; a resumed run continues at its checkpoint's iteration.

    Every line is flushed, so a reader never waits for the next.  Opening the file drops the lines after
    `resumed_iteration`, whose steps a resumed run repeats, and a last line that a killed run left unfinished; with 0 it
    starts over.  Raises `ConfigError` when the file cannot be written, or is not a metrics file.
    """

    def __init__(self, path: Path, *, resumed_iteration: int = 0, has_timers: bool = False) -> None:
        """has_timers: True writes the times of parts at log intervals."""
        self._has_timers = has_timers
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_fifo():  # opening it would wait for a program that reads
                raise OSError(errno.EINVAL, "a FIFO is there")
            _truncate_after(path, resumed_iteration)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            rule = "the metrics file can be written"
            raise ConfigError(Problem(f"--metrics-file {path}: {error.strerror}", rule, "another path")) from error

    def step(self, metrics: StepMetrics, ranks: Sequence[RankMetrics]) -> None:
        record = _step_record(metrics, ranks)
        if self._has_timers and metrics.part_times is not None:
            record["timers"] = metrics.part_times.to_json()
        self._write(record)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._write({"evaluation": _evaluation_record(evaluation)})

    def sample(self, iteration: int, prompt: str, continuation: str) -> None:
        """Texts are no metrics."""

    def picture(self, picture: StepPicture) -> None:
        """Pictures are no metrics."""

    def flush(self) -> None:
        """Nothing is held back: every line is flushed as it is written."""

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()


def _step_record(metrics: StepMetrics, ranks: Sequence[RankMetrics]) -> dict[str, Any]:
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
        "ranks": [_rank_record(rank, figures) for rank, figures in enumerate(ranks)],
    }
    if metrics.overflow_parameter:
        record["overflow_parameter"] = metrics.overflow_parameter
    if metrics.pipeline_idle_share is not None:
        record["pipeline_idle_share"] = metrics.pipeline_idle_share
    if metrics.statistics:
        record["statistics"] = {name: _finite(value) for name, value in metrics.statistics.items()}
    return record


def _rank_record(rank: int, figures: RankMetrics) -> dict[str, Any]:
    record: dict[str, Any] = {
        "rank": rank,
        "peak_memory_bytes": figures.peak_memory_bytes,
        "model_state_bytes": dict(figures.model_state_bytes),
        "comm_bytes": {axis: dict(by_collective) for axis, by_collective in figures.comm_bytes.items()},
        "data_wait_seconds": figures.data_wait_seconds,
    }
    if figures.device_memory_bytes:
        record["device_memory_bytes"] = dict(figures.device_memory_bytes)
    return record | {"ledger": dict(figures.ledger)} if figures.ledger else record


def _evaluation_record(evaluation: Evaluation) -> dict[str, Any]:
    bits = evaluation.bits_per_byte
    return {
        "iteration": evaluation.iteration,
        "consumed_samples": evaluation.consumed_samples,
        "split": evaluation.split,
        "loss": _finite(evaluation.loss),
        "perplexity": _finite(evaluation.perplexity),
        "bits_per_byte": None if bits is None else _finite(bits),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _truncate_after(path: Path, last_iteration: int) -> None:
    """Rewrite `path` without lines past `last_iteration`; a new file replaces the old one in one move."""
    if not path.exists():
        return
    temporary = path.with_name(f".{path.name}.aside")
    try:
        with path.open(encoding="utf-8", errors="replace") as source, temporary.open("w", encoding="utf-8") as target:
            _copy_until(path, source, target, last_iteration=last_iteration)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _copy_until(path: Path, source: IO[str], target: IO[str], *, last_iteration: int) -> None:
    for line, iteration in _iterations(path, source):
        # A run that starts at 0 evaluates at 0 again, so no line of an older one is copied.
        if last_iteration > 0 and iteration <= last_iteration:
            target.write(line)


def _iterations(path: Path, source: IO[str]) -> Iterator[tuple[str, int]]:
    """Yield (line, iteration) of every whole line; raises `ConfigError` at one that no run wrote."""
    for number, line in enumerate(source, start=1):
        if not line.endswith("\n"):
            return
        try:
            record = json.loads(line)
            yield line, int(record.get("evaluation", record)["iteration"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            rule = "an existing metrics file has only steps and evaluations"
            given = f"--metrics-file {path}, line {number}"
            raise ConfigError(Problem(given, rule, "a new file, or the file of this run")) from error
