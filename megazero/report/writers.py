"""Writes a run's figures to the console, to JSON lines (`metrics_file.py`, `curves_file.py`), and to trackers.

A *writer* is called with every step and every evaluation.  Writers exist on rank 0 only and never communicate with
another rank or the device: their arguments are host figures.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from megazero.config.run import LoggingConfig
from megazero.console import Console
from megazero.report.curves_file import CurvesFile
from megazero.report.device_memory import ProcessMemory, device_memory_scalars
from megazero.report.ledger_report import ledger_scalars
from megazero.report.metrics import (
    Evaluation,
    IntervalMetrics,
    RankMetrics,
    StepMetrics,
    StepPicture,
    interval_metrics,
)
from megazero.report.metrics_file import MetricsFile
from megazero.report.part_times import PartTimes
from megazero.report.trackers import TensorBoard, Tracker
from megazero.units import format_duration


class MetricsWriter(Protocol):
    """A destination for a run's figures."""

    def step(self, metrics: StepMetrics, ranks: Sequence[RankMetrics]) -> None:
        """Write one step; `ranks` has an entry for every rank, in rank order, or none where none were gathered."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write one evaluation."""

    def sample(self, iteration: int, prompt: str, continuation: str) -> None:
        """Write a text that the model has continued after `iteration` steps."""

    def picture(self, picture: StepPicture) -> None:
        """Write the picture of a step."""

    def saved(self, iteration: int, ranks: Sequence[RankMetrics]) -> None:
        """Take the figures of every rank, in rank order, when a checkpoint of `iteration` has been saved."""

    def flush(self) -> None:
        """Write the steps that are still held back, because the run ends here."""

    def close(self) -> None:
        """Write everything that is still buffered, and close; a second call does nothing."""


# The statistics that a line shows under Megatron-LM's names, and those whose names in TensorBoard have dashes.
_CONSOLE_STATISTICS = (("num_zeros", "num zeros: {:.0f}"), ("params_norm", "params norm: {:.3f}"))
_DASHED = frozenset(name for name, _ in _CONSOLE_STATISTICS)
# The timers of --profile-backward, which a line shows for the last step.
_PROFILED = ("checkpoint-forward", "checkpoint-recompute")


class ConsoleWriter:
    """A writer of one line per log interval, one for the very first step and one for the last."""

    def __init__(
        self,
        console: Console,
        *,
        log_interval: int,
        train_iters: int,
        train_samples: int | None = None,
        times_parts: bool = False,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """train_samples: see `IntervalMetrics.eta_seconds`.  times_parts: True prints the times of parts."""
        self._console = console
        self._times_parts = times_parts
        self._train_samples = train_samples
        self._log_interval = log_interval
        self._train_iters = train_iters
        self._now = now
        self._steps: list[StepMetrics] = []
        self._first = True

    def step(self, metrics: StepMetrics, ranks: Sequence[RankMetrics]) -> None:
        self._steps.append(metrics)
        if metrics.skipped and metrics.overflow_parameter:
            self._console.line(f"iteration {metrics.iteration} skipped: {metrics.overflow_parameter} overflowed first")
        due = metrics.iteration % self._log_interval == 0 or metrics.iteration == self._train_iters
        if due or self._first:
            self.flush()
        if metrics.part_times is not None and self._times_parts:
            self._console.line("\n".join(metrics.part_times.lines()))

    def evaluation(self, evaluation: Evaluation) -> None:
        title = f"{evaluation.split} {evaluation.group}".strip()
        self._console.line(f"{title} loss at iteration {evaluation.iteration} | " + _evaluation(evaluation))

    def sample(self, iteration: int, prompt: str, continuation: str) -> None:
        self._console.line(f"sample at iteration {iteration} | {prompt!r} goes on {continuation!r}")

    def picture(self, picture: StepPicture) -> None:
        """Pictures are files of their own."""

    def saved(self, iteration: int, ranks: Sequence[RankMetrics]) -> None:
        """The console has no figures of ranks."""

    def close(self) -> None:
        self.flush()

    def flush(self) -> None:
        if not self._steps:
            return
        interval = interval_metrics(self._steps)
        fields = _interval_fields(interval, self._train_iters, self._train_samples)
        self._console.line(f"[{self._now():%Y-%m-%d %H:%M:%S}] " + " | ".join(fields))
        self._steps.clear()
        self._first = False


def _interval_fields(interval: IntervalMetrics, train_iters: int, train_samples: int | None) -> list[str]:
    """Return the console line's fields under Megatron-LM's names, then megazero's own; waits are the interval's sum."""
    last = interval.last
    width = len(str(train_iters))
    return [
        f"iteration {last.iteration:{width}d}/{train_iters}",
        f"consumed samples: {last.consumed_samples}",
        f"elapsed time per iteration (ms): {1000 * interval.step_seconds:.1f}",
        f"throughput per device (TFLOP/s): {interval.tflops_per_device:.3g}",
        f"MFU: {'-' if interval.mfu is None else f'{100 * interval.mfu:.1f}%'}",
        f"tokens/s: {interval.tokens_per_second:.0f}",
        f"learning rate: {last.lr:.6E}",
        f"global batch size: {last.global_batch_size}",
        *([] if last.seq_length is None else [f"sequence length: {last.seq_length}"]),
        f"lm loss: {'-' if interval.loss is None else f'{interval.loss:.6E}'}",
        f"loss scale: {last.loss_scale:.1f}",
        f"grad norm: {last.grad_norm:.3f}",
        *(text.format(last.statistics[name]) for name, text in _CONSOLE_STATISTICS if name in last.statistics),
        f"number of skipped iterations: {interval.num_skipped}",
        f"number of nan iterations: {interval.num_nan}",
        f"data wait (ms): {1000 * interval.data_wait_seconds:.1f}",
        *(f"{name} (ms): {1000 * last.timers[name]:.1f}" for name in _PROFILED if name in last.timers),
        f"ETA: {format_duration(interval.eta_seconds(train_iters, train_samples))}",
    ]


def _evaluation(evaluation: Evaluation) -> str:
    text = f"lm loss value: {evaluation.loss:.6E} | lm loss PPL: {evaluation.perplexity:.6E}"
    bits = evaluation.bits_per_byte
    return text if bits is None else f"{text} | bits per byte: {bits:.4f}"


class TrackerWriter:
    """A writer of scalars in groups, by iteration and, where it has that axis, by consumed samples, and of texts.

    The groups are loss, memory, optimizer, speed, time, traffic and, in TensorBoard, vs-samples: trackers show them in
    the order of their names, so a run opens on its loss.  docs/watching.md has every name, beside Megatron-LM's.
    speed/data-wait-seconds is the sum since the previous point, so that the wait of every step is shown.

    A run resumed from before its last point draws the steps in between twice: TensorBoard can only drop them for both
    kinds of axis at once.

    texts: Markdown by title, as of `resumed_iteration`.
    """

    def __init__(
        self,
        config: LoggingConfig,
        tracker: Tracker,
        *,
        world_size: int,
        texts: Mapping[str, str] = MappingProxyType({}),
        resumed_iteration: int = 0,
    ) -> None:
        self._config = config
        self._tracker = tracker
        self._world_size = world_size
        self._waited = 0.0
        for title, text in texts.items():
            tracker.text(f"run/{title}", text, resumed_iteration)

    def step(self, metrics: StepMetrics, ranks: Sequence[RankMetrics]) -> None:
        self._waited += metrics.data_wait_seconds
        scalars = {  # which have an interval of their own
            f"optimizer/{name.replace('_', '-') if name in _DASHED else name}": value
            for name, value in metrics.statistics.items()
        }
        by_machine: dict[str, float] = {}
        if self._config.log_timers_to_tensorboard and metrics.part_times is not None:  # so have these
            by_machine.update(part_scalars(metrics.part_times))
        if metrics.iteration % self._config.tensorboard_log_interval == 0:
            scalars.update(_training_scalars(metrics, self._world_size))
            by_machine.update(self._machine_scalars(metrics, ranks))
            self._waited = 0.0
        if scalars:
            self._tracker.scalars(scalars, metrics.iteration, metrics.consumed_samples)
        if by_machine:
            self._tracker.scalars(by_machine, metrics.iteration)

    def evaluation(self, evaluation: Evaluation) -> None:
        tag = f"loss/{evaluation.split}" + f"/{evaluation.group}" * bool(evaluation.group)
        scalars = {tag: evaluation.loss}
        if self._config.log_validation_ppl_to_tensorboard:
            scalars[f"{tag}-perplexity"] = evaluation.perplexity
        if evaluation.bits_per_byte is not None:
            scalars[f"{tag}-bits-per-byte"] = evaluation.bits_per_byte
        self._tracker.scalars(scalars, evaluation.iteration, evaluation.consumed_samples)

    def sample(self, iteration: int, prompt: str, continuation: str) -> None:
        shown = as_markdown(f"{prompt}|{continuation}".splitlines())
        self._tracker.text("samples/validation", shown, iteration)

    def picture(self, picture: StepPicture) -> None:
        self._tracker.picture(picture)

    def saved(self, iteration: int, ranks: Sequence[RankMetrics]) -> None:
        """The steps have had their ranks' figures, where they are asked for."""

    def flush(self) -> None:
        self._tracker.flush()

    def close(self) -> None:
        self._tracker.close()

    def _machine_scalars(self, metrics: StepMetrics, ranks: Sequence[RankMetrics]) -> dict[str, float]:
        """Return the scalars about the machine, which have no axis of samples."""
        scalars = {
            "speed/seconds-per-step": metrics.step_seconds,
            "speed/tflops-per-device": metrics.tflops_per_device,
            "speed/tokens-per-second": metrics.tokens_per_second,
            "speed/data-wait-seconds": self._waited,
        }
        if metrics.mfu is not None:
            scalars["speed/mfu"] = metrics.mfu
        if metrics.pipeline_idle_share is not None:
            scalars["speed/pipeline-idle-share"] = metrics.pipeline_idle_share
        if self._config.log_memory_to_tensorboard and ranks:
            scalars.update(_memory_scalars(ranks))
        scalars.update(ledger_scalars([figures.ledger for figures in ranks]))
        scalars.update(_link_scalars(ranks))
        memory = [ProcessMemory(figures.peak_memory_bytes, figures.device_memory_bytes) for figures in ranks]
        scalars.update(device_memory_scalars(memory))
        return scalars


def part_scalars(times: PartTimes) -> dict[str, float]:
    """Return the seconds of parts on the slowest rank, and on the fastest where the option shows it."""
    return {f"time/{name}": seconds for name, seconds in times.largest().items()} | {
        f"time/{name}-min": seconds for name, seconds in times.smallest().items()
    }


def _training_scalars(metrics: StepMetrics, world_size: int) -> dict[str, float]:
    scalars = {
        "optimizer/learning-rate": metrics.lr,
        "optimizer/batch-size": metrics.global_batch_size,
        "optimizer/loss-scale": metrics.loss_scale,
        "optimizer/grad-norm": metrics.grad_norm,
        "speed/world-size": world_size,
    }
    if metrics.seq_length is not None:
        scalars["optimizer/sequence-length"] = metrics.seq_length
    return scalars if metrics.skipped else scalars | {"loss/train": metrics.loss}


def _link_scalars(ranks: Sequence[RankMetrics]) -> dict[str, float]:
    """Return the most bytes that a rank sent inside its node, and to others; none where nothing left a node."""
    rows = [(_total(rank.comm_bytes), _total(rank.bytes_across_nodes)) for rank in ranks]
    if not any(across for _, across in rows):
        return {}
    most_inside, most_across = max(sent - across for sent, across in rows), max(across for _, across in rows)
    return {"traffic/inside-nodes": most_inside, "traffic/across-nodes": most_across}


def _total(table: Mapping[str, Mapping[str, int]]) -> int:
    """Return the bytes of a table of traffic, without copies to host memory and files."""
    return sum(sum(row.values()) for axis, row in table.items() if axis not in ("host", "file"))


def _memory_scalars(ranks: Sequence[RankMetrics]) -> dict[str, float]:
    """Return the bytes of each category on the rank that has most of it, which runs out of memory first."""
    categories = sorted({name for rank in ranks for name in rank.model_state_bytes})
    scalars: dict[str, float] = {
        f"memory/states-{name}": max(rank.model_state_bytes.get(name, 0) for rank in ranks) for name in categories
    }
    away = max(sum(rank.host_state_bytes.values()) for rank in ranks)
    if away:
        scalars["memory/states-in-host-memory"] = away
    in_files = max(sum(rank.file_state_bytes.values()) for rank in ranks)
    if in_files:
        scalars["memory/states-in-files"] = in_files
    return scalars | {"memory/process-peak": max(rank.peak_memory_bytes for rank in ranks)}


def as_markdown(lines: Iterable[str]) -> str:
    """Return lines as Markdown that is shown as it stands."""
    return "\n".join(f"    {line}" for line in lines)


def open_writers(
    config: LoggingConfig,
    *,
    console: Console,
    train_iters: int,
    world_size: int,
    resumed_iteration: int = 0,
    texts: Mapping[str, str] = MappingProxyType({}),
    train_samples: int | None = None,
    times_parts: bool = False,
    curves: Path | None = None,
    earlier_curves: Path | None = None,
    run: str = "",
    trackers: Callable[[], Sequence[Tracker]] = tuple,
) -> tuple[MetricsWriter, ...]:
    """Return the writers of the configuration; none on a rank that does not print.

    texts: see `TrackerWriter`.  train_samples, times_parts: see `ConsoleWriter`.  curves: the file of the run's
    curves, None for a run that does not save.  earlier_curves: see `CurvesFile`.  run: the run's id, which both files
    of figures carry.
    trackers: opens those besides TensorBoard.
    """
    if not console.prints:
        return ()
    every = config.log_interval
    writers: list[MetricsWriter] = [
        ConsoleWriter(
            console, log_interval=every, train_iters=train_iters, train_samples=train_samples, times_parts=times_parts
        )
    ]
    if config.metrics_file is not None:
        writers.append(
            MetricsFile(
                config.metrics_file,
                resumed_iteration=resumed_iteration,
                has_timers=config.log_timers_to_tensorboard,
                run=run,
                report=console.line,
            )
        )
    if curves is not None:
        writers.append(
            CurvesFile(
                curves,
                log_interval=every,
                train_iters=train_iters,
                resumed_iteration=resumed_iteration,
                run=run,
                earlier=earlier_curves,
                report=console.line,
            )
        )
    tracked: list[Tracker] = []
    if config.tensorboard_dir is not None:
        tracked.append(TensorBoard(config.tensorboard_dir, queue_size=config.tensorboard_queue_size))
    tracked += trackers()
    writers += [
        TrackerWriter(config, tracker, world_size=world_size, texts=texts, resumed_iteration=resumed_iteration)
        for tracker in tracked
    ]
    return tuple(writers)
