"""The run: when to train, report, evaluate, save and stop.

The host reads a step's figures from the device when nothing is lost by it: at once on the CPU and in fp16 (whose loss
scale and learning rate depend on them), one step later on a GPU, which meanwhile computes the next.
"""

import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from megazero.comm.mesh import gather_json
from megazero.console import Console
from megazero.data.loader import BatchLoader
from megazero.errors import Problem, TrainingError
from megazero.optim.loss_scaler import LossScaler
from megazero.optim.schedules import LearningRate
from megazero.pipeline.trace import SpanRow
from megazero.report.ledger_report import LedgerReport
from megazero.report.metrics import Evaluation, RankMetrics, Rates, StepMetrics
from megazero.report.pipeline_report import PipelineReport
from megazero.report.writers import MetricsWriter
from megazero.train.context import StepParts
from megazero.train.evaluate import EvaluationSet, evaluate
from megazero.train.saving import Saver
from megazero.train.signals import StopRequest
from megazero.train.state import TrainState
from megazero.train.step import StepControls, StepReport, training_step
from megazero.units import format_bytes, format_count, format_duration

_event: Callable[[], torch.cuda.Event] = torch.cuda.Event


@dataclass(frozen=True)
class Timetable:
    """When things are due, in steps; None: never."""

    train_iters: int
    eval_interval: int
    eval_at_start: bool
    save_interval: int | None
    exit_interval: int | None
    exit_after_seconds: float | None


@dataclass(frozen=True)
class Reporting:
    """Where figures go and what turns counts into rates; gathers_ranks: whether writers want every rank's figures.

    opening, closing: what else there is to say of this rank's memory, before the first step and after the last.
    """

    console: Console
    writers: Sequence[MetricsWriter]
    rates: Rates
    global_batch_size: int
    tokens_per_sample: int
    gathers_ranks: bool
    ledger: LedgerReport
    pipeline: PipelineReport
    opening: str
    closing: Callable[[], Sequence[str]]


@dataclass(frozen=True)
class Run:
    """A run, ready to go on from `state`."""

    parts: StepParts
    state: TrainState
    scaler: LossScaler
    learning_rate: LearningRate
    loader: BatchLoader
    held_out: Mapping[str, EvaluationSet]
    timetable: Timetable
    saver: Saver | None
    reporting: Reporting


class _Readback:
    """A report on its way to the host, queued behind its own step and before the next."""

    def __init__(self, report: StepReport) -> None:
        figures = torch.stack(report)
        self._host = figures.to("cpu", non_blocking=True)
        self._arrived = _event() if figures.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        """The report's figures, in its order; waits for its own step only."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()


class _Launched(NamedTuple):
    """A step whose figures may still be on the device."""

    figures: _Readback
    iteration: int
    consumed_samples: int
    lr: float
    loss_scale: float
    seconds: float
    timers: Mapping[str, float]
    comm_bytes: Mapping[str, Mapping[str, int]]
    ledger: Mapping[str, Any]
    spans: Sequence[SpanRow]
    data_wait_seconds: float


def train(run: Run) -> str:
    """Train to the end, or until asked to stop; returns why it ended.  Raises TrainingError when it cannot go on."""
    with StopRequest() as stop:
        loop = _Loop(run, stop)
        try:
            return loop.run_to_end()
        finally:
            run.loader.close()
            for writer in run.reporting.writers:
                writer.close()
            run.parts.engine.close()


class _Loop:
    """The state of the loop itself, which no checkpoint needs."""

    def __init__(self, run: Run, stop: StopRequest) -> None:
        self._run = run
        self._parts = run.parts
        self._state = run.state
        self._stop = stop
        self._started = time.monotonic()
        self._mark = time.perf_counter()
        self._launched: deque[_Launched] = deque()
        on_cpu = run.parts.mesh.device.type == "cpu"
        self._may_lag = 0 if on_cpu or run.parts.checks_overflow else 1
        self._someone_stops = False
        self._saved_iteration = run.saver.already_there if run.saver else None
        self._evaluated_iteration: int | None = None

    def run_to_end(self) -> str:
        timetable, state = self._run.timetable, self._state
        self._announce()
        if timetable.eval_at_start and state.iteration == 0:
            self._evaluate("validation")
        while state.iteration < timetable.train_iters:
            self._one_step()
            # Saved before it is evaluated: an evaluation can take long, fail, or be cut short.
            if _is_due(timetable.save_interval, state.iteration):
                self._save()
            if _is_due(timetable.eval_interval, state.iteration) and not self._someone_stops:
                self._evaluate("validation")
            reason = self._reason_to_exit()
            if reason:
                return self._end(reason)
        self._settle(may_lag=0)
        self._save()
        self._evaluate("validation")
        self._evaluate("test")
        return self._end(f"finished {state.iteration} iterations")

    def _one_step(self) -> None:
        """Take a batch, launch the step, count it, and read what may be read."""
        timers, meter, loader = self._parts.timers, self._parts.mesh.meter, self._run.loader
        waited = loader.waited_seconds
        with timers.measure("batch-generator"):
            batch = next(loader)
        waited = loader.waited_seconds - waited
        lr = self._run.learning_rate.at(self._state.optimizer_steps)
        scale = self._state.loss_scale.scale
        meter.reset()
        self._run.reporting.ledger.begin_step()
        next_one = self._state.iteration + 1
        self._run.reporting.pipeline.begin_step(next_one, is_last=next_one == self._run.timetable.train_iters)
        wish = self._stop.requested or self._is_out_of_time()
        report = training_step(self._parts, batch, StepControls(lr, scale, wish))
        skipped = bool(report.skipped.item()) if self._parts.checks_overflow else False
        self._state.loss_scale = self._run.scaler.after_step(self._state.loss_scale, overflow=skipped)
        num_samples = loader.consumed_samples - self._state.consumed_samples
        self._state.advance(num_samples=num_samples, skipped=skipped)
        ledger = self._run.reporting.ledger.end_step(self._state.iteration)
        spans = self._run.reporting.pipeline.end_step()
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        self._launched.append(
            _Launched(
                _Readback(report),
                self._state.iteration,
                self._state.consumed_samples,
                lr,
                scale,
                seconds,
                timers.take(),
                meter.bytes_by_axis(),
                ledger,
                spans,
                waited,
            )
        )
        self._settle(may_lag=self._may_lag)

    def _settle(self, *, may_lag: int) -> None:
        """Read the figures of all but the last `may_lag` steps and hand them to the writers."""
        while len(self._launched) > may_lag:
            launched = self._launched.popleft()
            loss, norm, stops, skipped, overflow = launched.figures.read()
            name = self._parts.engine.parameter_name(int(overflow)) if skipped else ""
            metrics = self._metrics(launched, loss, norm, name)
            self._someone_stops = self._someone_stops or stops > 0
            ranks = self._rank_metrics(launched) if self._run.reporting.gathers_ranks else []
            for writer in self._run.reporting.writers:
                writer.step(metrics, ranks)
            self._check_health(metrics)

    def _metrics(self, launched: _Launched, loss: float, norm: float, overflow_parameter: str) -> StepMetrics:
        rates = self._run.reporting.rates
        batch = self._run.reporting.global_batch_size
        num_tokens = batch * self._run.reporting.tokens_per_sample
        seconds = launched.seconds
        return StepMetrics(
            iteration=launched.iteration,
            consumed_samples=launched.consumed_samples,
            global_batch_size=batch,
            loss=loss,
            grad_norm=norm,
            lr=launched.lr,
            loss_scale=launched.loss_scale,
            skipped=bool(overflow_parameter),
            step_seconds=seconds,
            tokens_per_second=rates.tokens_per_second(num_tokens, seconds=seconds),
            tflops_per_device=rates.tflops_per_device(num_tokens, seconds=seconds),
            mfu=rates.mfu(num_tokens, seconds=seconds),
            overflow_parameter=overflow_parameter,
            timers=launched.timers,
            pipeline_idle_share=self._run.reporting.pipeline.publish(launched.iteration, launched.spans),
            data_wait_seconds=launched.data_wait_seconds,
        )

    def _rank_metrics(self, launched: _Launched) -> list[RankMetrics]:
        """Every rank's memory and traffic of a step; a collective."""
        mesh = self._parts.mesh
        mine = RankMetrics(
            peak_memory_bytes=peak_memory_bytes(mesh.device),
            model_state_bytes=asdict(self._parts.engine.model_state_bytes()),
            comm_bytes=launched.comm_bytes,
            ledger=launched.ledger,
            data_wait_seconds=launched.data_wait_seconds,
        )
        return [RankMetrics(**figures) for figures in gather_json(mesh.world, asdict(mine), mesh.device)]

    def _check_health(self, metrics: StepMetrics) -> None:
        """Stop a run that has no future: a loss scale at its end (saved first), or figures that are not finite."""
        if self._run.scaler.exhausted(self._state.loss_scale):
            self._save()
            self._run.scaler.check_not_exhausted(self._state.loss_scale, parameter=metrics.overflow_parameter)
        finite = abs(metrics.loss) < float("inf") and abs(metrics.grad_norm) < float("inf")
        if not finite and not metrics.skipped:
            given = f"iteration {metrics.iteration}: loss {metrics.loss}, gradient norm {metrics.grad_norm}"
            legal = "a lower --lr or a longer warm-up, from the last checkpoint; this state has not been saved"
            raise TrainingError(Problem(given, "loss and gradient norm are finite", legal))

    def _evaluate(self, split: str) -> None:
        """Evaluate once per iteration and split, and report."""
        held_out = self._run.held_out.get(split)
        if held_out is None or (split == "validation" and self._evaluated_iteration == self._state.iteration):
            return
        self._settle(may_lag=0)
        loss = evaluate(self._parts, held_out)
        result = Evaluation(self._state.iteration, self._state.consumed_samples, split, loss, held_out.bytes_per_token)
        for writer in self._run.reporting.writers:
            writer.evaluation(result)
        if split == "validation":
            self._evaluated_iteration = self._state.iteration
        self._mark = time.perf_counter()

    def _save(self) -> None:
        """Save this iteration, once."""
        if self._run.saver is None or self._saved_iteration == self._state.iteration:
            return
        self._settle(may_lag=0)  # a step whose loss was not finite ends the run here, unsaved
        start = time.perf_counter()
        folder = self._run.saver.save(self._state)
        self._saved_iteration = self._state.iteration
        self._run.reporting.console.line(
            f"saved checkpoint of iteration {self._state.iteration} to {folder} "
            f"in {format_duration(time.perf_counter() - start)}"
        )
        self._mark = time.perf_counter()

    def _reason_to_exit(self) -> str:
        """Why the run ends after this step, the same on all ranks; empty to go on."""
        timetable, iteration = self._run.timetable, self._state.iteration
        if self._someone_stops:
            return f"asked to stop after iteration {iteration} ({self._stop.reason or 'by another rank or the clock'})"
        if _is_due(timetable.exit_interval, iteration) and iteration < timetable.train_iters:
            return f"exit interval {timetable.exit_interval} reached at iteration {iteration}"
        return ""

    def _end(self, reason: str) -> str:
        self._settle(may_lag=0)
        self._save()
        for line in (*self._run.reporting.closing(), reason):
            self._run.reporting.console.line(line)
        return reason

    def _is_out_of_time(self) -> bool:
        limit = self._run.timetable.exit_after_seconds
        return limit is not None and time.monotonic() - self._started >= limit

    def _announce(self) -> None:
        mesh, layout = self._parts.mesh, self._parts.engine.layout
        states = self._parts.engine.model_state_bytes()
        numel = layout.used_numel(trainable=True) + layout.used_numel(trainable=False)
        self._run.reporting.console.line(
            f"{mesh.topology.describe()} on {mesh.device.type} | parameters on this rank: {format_count(numel)} | "
            f"model states on this rank: {format_bytes(states.total)} (parameters {format_bytes(states.parameters)}, "
            f"gradients {format_bytes(states.gradients)}, master {format_bytes(states.master)}, "
            f"moments {format_bytes(states.moments)})"
        )
        self._run.reporting.console.line(self._run.reporting.opening)
        if self._state.iteration:
            self._run.reporting.console.line(
                f"resumed at iteration {self._state.iteration}, {self._state.consumed_samples} samples consumed"
            )


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has had: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _is_due(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0
