"""The training loop of a run, which decides when to train, report, evaluate, save and stop.

The host reads a step's figures from the device when nothing is lost by it: at once on the CPU and in fp16 (whose loss
scale and learning rate depend on them), one step later on a GPU, which meanwhile computes the next.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megazero.checkpoint.journal import Journal
from megazero.checkpoint.state import TrainState
from megazero.comm.mesh import gather_json_on_first
from megazero.console import Console
from megazero.data.loader import BatchLoader, StepBatch
from megazero.errors import Problem, TrainingError, first_line
from megazero.memory.host_copy import HostCopy
from megazero.optim.loss_scaler import LossScaler
from megazero.optim.schedules import LearningRate
from megazero.pipeline.trace import SpanRow
from megazero.report.device_memory import MemoryReport, ProcessMemory
from megazero.report.ledger_report import LedgerReport
from megazero.report.metrics import Evaluation, RankMetrics, Rates, StepMetrics, traffic_line
from megazero.report.pipeline_report import PipelineReport
from megazero.report.step_profile import StepProfile
from megazero.report.stragglers import OwnTime, StragglerReport
from megazero.report.timing_report import TimingReport
from megazero.report.writers import MetricsWriter
from megazero.rules.files import EXIT_TRIGGER, SAVE_TRIGGER
from megazero.signals import StopRequest
from megazero.timers import Timings
from megazero.train.context import StepContext
from megazero.train.evaluate import EvaluationSet, evaluate
from megazero.train.leaving import leave_page
from megazero.train.replay import BadStep, Cause, find_cause
from megazero.train.samples import SampledText, continue_text
from megazero.train.saving import Saver
from megazero.train.step import StepControls, training_step
from megazero.units import format_bytes, format_count, format_duration
from megazero.zero.plan import Home
from megazero.zero.statistics import StatisticsChoice, layers_of, read_statistics, take_statistics
from megazero.zero.step import first_overflow


@dataclass(frozen=True)
class Timetable:
    """The intervals, in steps, at which the run evaluates, saves and exits; None: never.

    kill_switch: the file that ends the run when it is there.  triggers: the folder of files that make it save or end.
    """

    train_iters: int
    eval_interval: int
    eval_at_start: bool
    save_interval: int | None
    exit_interval: int | None
    exit_after_seconds: float | None
    kill_switch: Path | None = None
    triggers: Path | None = None


@dataclass(frozen=True)
class Reporting:
    """The writers of figures, and the constants that turn counts into rates.

    gathers_ranks: True if a writer needs every rank's figures, at log intervals.  cuts_rows: True if steps have rows of
    different lengths, which are reported.
    statistics: those taken every log_interval steps, and of the first and the last step.
    opening, closing: lines on this rank's memory, printed before the first step and after the last.
    """

    console: Console
    writers: Sequence[MetricsWriter]
    rates: Rates
    cuts_rows: bool
    gathers_ranks: bool
    memory: MemoryReport
    ledger: LedgerReport
    pipeline: PipelineReport
    stragglers: StragglerReport
    part_times: TimingReport
    opening: Sequence[str]
    closing: Callable[[], Sequence[str]]
    statistics: StatisticsChoice
    log_interval: int
    profile: StepProfile


@dataclass(frozen=True)
class Run:
    """A run that is built, and continues from `state`.  sampled: what evaluations generate.  launcher: see `Launch`."""

    context: StepContext
    state: TrainState
    scaler: LossScaler
    learning_rate: LearningRate
    loader: BatchLoader
    held_out: Mapping[str, EvaluationSet]
    timetable: Timetable
    saver: Saver | None
    reporting: Reporting
    journal: Journal
    sampled: SampledText | None = None
    launcher: int | None = None


class _PendingSave(NamedTuple):
    """A checkpoint that is saved beside training.

    begun: when, on the clock of `time.perf_counter`.  waited: the seconds that training has waited for the copy.
    """

    iteration: int
    begun: float
    waited: float


class _PendingStep(NamedTuple):
    """A step that has been launched, and whose figures may still be on the device.

    before: the counters before it.  own_seconds: those that this rank has not waited for other ranks.
    """

    figures: HostCopy
    batch: StepBatch
    before: TrainState
    iteration: int
    consumed_samples: int
    lr: float
    loss_scale: float
    seconds: float
    timers: Timings
    comm_bytes: Mapping[str, Mapping[str, int]]
    bytes_across_nodes: Mapping[str, Mapping[str, int]]
    memory: ProcessMemory
    ledger: Mapping[str, Any]
    spans: Sequence[SpanRow] | None
    data_wait_seconds: float
    own_seconds: float


def train(run: Run) -> str:
    """Train to the end, or until a request to stop; return why it ended.  Raises TrainingError when it cannot go on."""
    with _stop_request(run) as stop:
        loop = _Loop(run, stop)
        try:
            reason = loop.run_to_end()
            run.journal.write("stop", iteration=run.state.iteration, reason=reason)
            _leave_page(run)
            run.reporting.console.line(reason)
            return reason
        except BaseException as error:
            run.journal.write("stop", iteration=run.state.iteration, reason=first_line(error))
            with suppress(OSError):  # the error that ends the run is the one to see
                for writer in run.reporting.writers:
                    writer.flush()
            _leave_page(run)
            raise
        finally:
            if run.saver is not None:
                run.saver.close()  # first: what follows may wait for ranks that are gone
            run.loader.close()
            for writer in run.reporting.writers:
                writer.close()
            run.context.engine.close()
            with suppress(RuntimeError):  # a GPU that has failed; the error that ends the run is the one to see
                run.reporting.profile.close()


def _leave_page(run: Run) -> None:
    """Write the run's page, on rank 0 of a run that saves; print that there is none if it does not."""
    if run.saver is None:
        run.reporting.console.line("no checkpoint and no page of this run: they are kept below --save DIR")
    elif run.context.mesh.rank == 0:
        run.reporting.console.line(leave_page(run.saver.root))


def _stop_request(run: Run) -> StopRequest:
    saves = "stops; without --save nothing is kept" if run.saver is None else f"saves to {run.saver.root} and stops"
    announcement = f"the run finishes this step, {saves}"
    return StopRequest(announcement=announcement, rank=run.context.mesh.rank, launcher=run.launcher)


class _Loop:
    """The training loop of one run, with the state that checkpoints do not need."""

    def __init__(self, run: Run, stop: StopRequest) -> None:
        self._run = run
        self._context = run.context
        self._state = run.state
        self._stop = stop
        self._started = time.monotonic()
        self._mark = (time.perf_counter(), run.context.mesh.meter.waited_seconds)
        self._pending: deque[_PendingStep] = deque()
        on_cpu = run.context.mesh.device.type == "cpu"
        self._max_pending = 0 if on_cpu or run.context.checks_overflow else 1
        self._first_iteration = run.state.iteration + 1
        self._stops = self._saves = False
        self._may_be_triggered = True
        self._saving: _PendingSave | None = None
        self._reported: _PendingStep | None = None
        self._saved_iteration = run.saver.saved_iteration if run.saver else None
        self._evaluated_iteration: int | None = None

    def run_to_end(self) -> str:
        timetable, state = self._run.timetable, self._state
        self._announce()
        if timetable.eval_at_start and state.iteration == 0:
            self._evaluate("validation")
        while not self._stops and self._has_step_to_train():
            self._one_step()
            if self._saving is not None and self._is_saved():
                self._finish_saving()
            # Save before evaluating: an evaluation can take long, fail, or be cut short.
            if _is_due(timetable.save_interval, state.iteration) or self._saves:
                self._save()
            if self._saves:
                self._take_back_trigger()
            if _is_due(timetable.eval_interval, state.iteration) and not self._stops:
                self._evaluate("validation")
            reason = self._reason_to_exit()
            if reason:
                return self._end(reason)
        if state.iteration < timetable.train_iters:
            return self._end(self._reason_to_exit())
        self._report_steps(max_pending=0)
        self._save()
        self._evaluate("validation")
        if not self._stops:
            self._evaluate("test")
        return self._end(f"finished {state.iteration} iterations")

    def _has_step_to_train(self) -> bool:
        """Pass over the steps that come next and do not train; return True unless the run has come to its end.

        Their samples are used up, and they count as steps without an update, so the schedule of rates stands still.
        What is due at them, an evaluation, a checkpoint or an exit, is left out, since the weights stay the same.
        """
        state, loader, before = self._state, self._run.loader, replace(self._state)
        while state.iteration < self._run.timetable.train_iters and loader.is_unread:
            num_samples, num_tokens = loader.pass_over()
            state.advance(num_samples=num_samples, skipped=True, num_tokens=num_tokens)
        if state.iteration > before.iteration:
            self._tell_untrained(before)
        return state.iteration < self._run.timetable.train_iters

    def _tell_untrained(self, before: TrainState) -> None:
        """Write down which steps after `before` have not trained."""
        first, last = before.iteration + 1, self._state.iteration
        num_samples = self._state.consumed_samples - before.consumed_samples
        self._run.journal.write("pass over", first=first, last=last, samples=num_samples)
        steps = f"iteration {first} does" if first == last else f"iterations {first} to {last} do"
        self._run.reporting.console.line(
            f"{steps} not train, {num_samples} samples are passed over (--skip-train-iteration-range)"
        )
        if self._first_iteration == first:
            self._first_iteration = last + 1

    def _one_step(self) -> None:
        """Take a batch, launch the step, count it, and report the steps whose figures are due."""
        timers, meter, loader = self._context.timers, self._context.mesh.meter, self._run.loader
        flight = meter.flight
        flight.iteration, flight.activity = self._state.iteration + 1, "data"
        timers.take()  # an evaluation or a checkpoint since the last step is no part of one
        self._run.reporting.profile.begin_step(self._state.iteration + 1)
        waited_before = loader.waited_seconds
        with timers.measure("batch-generator"):
            batch = next(loader)
        waited = loader.waited_seconds - waited_before
        rates = self._run.learning_rate
        progress = rates.progress(self._state.optimizer_steps, self._state.update_samples, self._state.update_tokens)
        lr = rates.at(progress)
        scale = self._state.loss_scale.scale
        meter.reset()
        self._run.reporting.ledger.begin_step()
        self._run.reporting.memory.begin_step()
        next_iteration = self._state.iteration + 1
        self._run.reporting.pipeline.begin_step(
            next_iteration, is_last=next_iteration == self._run.timetable.train_iters
        )
        momentum, weight_decay = rates.momentum(progress), rates.weight_decay_at(progress)
        decoupled_lr = rates.decoupled_at(progress)
        stop, is_triggered = self._wants_to_stop(), self._may_be_triggered and self._is_triggered(SAVE_TRIGGER)
        save = None if self._run.timetable.triggers is None else is_triggered
        controls = StepControls(lr, scale, stop, momentum, weight_decay, decoupled_lr, save)
        report = training_step(self._context, batch, controls)
        statistics = self._statistics(next_iteration)
        before = replace(self._state)
        skipped = bool(report.skipped.item()) if self._context.checks_overflow else False
        self._state.loss_scale = self._run.scaler.after_step(self._state.loss_scale, overflow=skipped)
        num_samples = loader.consumed_samples - self._state.consumed_samples
        self._state.advance(num_samples=num_samples, skipped=skipped, num_tokens=num_samples * batch.seq_length)
        ledger = self._run.reporting.ledger.end_step(self._state.iteration)
        memory = self._run.reporting.memory.end_step(ledger)
        spans = self._run.reporting.pipeline.end_step()
        if line := self._run.reporting.profile.end_step(self._state.iteration):
            self._run.reporting.console.line(line)
        seconds, own_seconds = self._restart_clock()
        self._pending.append(
            _PendingStep(
                HostCopy([*report, *statistics]),
                batch,
                before,
                self._state.iteration,
                self._state.consumed_samples,
                lr,
                scale,
                seconds,
                timers.take(),
                meter.bytes_by_axis(),
                meter.bytes_across_nodes(),
                memory,
                ledger,
                spans,
                waited,
                own_seconds,
            )
        )
        self._report_steps(max_pending=self._max_pending)

    def _statistics(self, iteration: int) -> Sequence[Tensor]:
        """Return the statistics after a step whose line is written, on the device; a collective call, nothing else."""
        if not self._has_line(iteration) or not any(self._run.reporting.statistics):
            return ()
        return take_statistics(self._context.engine, self._run.reporting.statistics).unbind()

    def _has_line(self, iteration: int) -> bool:
        """Return True for the steps of which figures of all ranks are gathered: log intervals, the first, the last."""
        last = self._run.timetable.train_iters
        return _is_due(self._run.reporting.log_interval, iteration) or iteration in (self._first_iteration, last)

    def _report_steps(self, *, max_pending: int) -> None:
        """Read the figures of all but the last `max_pending` steps, and write them."""
        while len(self._pending) > max_pending:
            pending = self._pending.popleft()
            self._reported = pending
            loss, norm, stops, skipped, overflow, saves, *statistics = pending.figures.read()
            bad = BadStep(pending.batch, pending.loss_scale, int(overflow))
            is_overflow = skipped > 0 and self._context.checks_overflow
            name = first_overflow(self._context.engine, bad.overflow) if is_overflow else ""
            metrics = self._metrics(pending, loss, norm, name)
            if statistics:
                choice = self._run.reporting.statistics
                layers = layers_of(self._context.engine) if choice.layer_grad_norms else ()
                taken = read_statistics(statistics, choice, layers, grad_norm=norm)
                metrics = replace(metrics, statistics=taken)
            self._stops, self._saves = self._stops or stops > 0, self._saves or saves > 0
            is_last = pending.iteration == self._run.timetable.train_iters
            part_times = self._run.reporting.part_times.step(
                pending.iteration, pending.seconds, pending.timers, is_last=is_last
            )
            metrics = replace(metrics, part_times=part_times)
            gathers = self._run.reporting.gathers_ranks and self._has_line(pending.iteration)
            ranks = self._rank_metrics(pending) if gathers else []
            for writer in self._run.reporting.writers:
                writer.step(metrics, ranks)
            traffic = traffic_line(pending.comm_bytes, pending.bytes_across_nodes)
            if traffic and pending.iteration == self._first_iteration:
                self._run.reporting.console.line(traffic)
            for report in (self._run.reporting.pipeline, self._run.reporting.ledger):
                if (picture := report.take_picture()) is not None:
                    for writer in self._run.reporting.writers:
                        writer.picture(picture)
            own = OwnTime(pending.data_wait_seconds, pending.own_seconds - pending.data_wait_seconds)
            for line in self._run.reporting.stragglers.step(pending.iteration, own):
                self._run.reporting.console.line(line)
            self._check_health(metrics, pending.before, bad)

    def _metrics(self, pending: _PendingStep, loss: float, norm: float, overflow_parameter: str) -> StepMetrics:
        length = pending.batch.seq_length
        rates = self._run.reporting.rates.of_length(length)
        batch = pending.consumed_samples - pending.before.consumed_samples
        num_tokens = batch * length
        seconds = pending.seconds
        return StepMetrics(
            iteration=pending.iteration,
            consumed_samples=pending.consumed_samples,
            global_batch_size=batch,
            loss=loss,
            grad_norm=norm,
            lr=pending.lr,
            loss_scale=pending.loss_scale,
            skipped=bool(overflow_parameter),
            step_seconds=seconds,
            tokens_per_second=rates.tokens_per_second(num_tokens, seconds=seconds),
            tflops_per_device=rates.tflops_per_device(num_tokens, seconds=seconds),
            mfu=rates.mfu(num_tokens, seconds=seconds),
            overflow_parameter=overflow_parameter,
            timers=pending.timers.read(),
            pipeline_idle_share=self._run.reporting.pipeline.publish(pending.iteration, pending.spans),
            data_wait_seconds=pending.data_wait_seconds,
            seq_length=length if self._run.reporting.cuts_rows else None,
        )

    def _rank_metrics(self, pending: _PendingStep) -> list[RankMetrics]:
        """Return every rank's memory and traffic of a step on rank 0, which writes; a collective call."""
        mesh = self._context.mesh
        mine = RankMetrics(
            peak_memory_bytes=pending.memory.peak_bytes,
            model_state_bytes=asdict(self._context.engine.model_state_bytes()),
            host_state_bytes=asdict(self._context.engine.model_state_bytes(Home.HOST)),
            file_state_bytes=asdict(self._context.engine.model_state_bytes(Home.FILE)),
            comm_bytes=pending.comm_bytes,
            bytes_across_nodes=pending.bytes_across_nodes,
            ledger=pending.ledger,
            data_wait_seconds=pending.data_wait_seconds,
            device_memory_bytes=pending.memory.device_bytes,
        )
        return [RankMetrics(**figures) for figures in gather_json_on_first(mesh, asdict(mine))]

    def _check_health(self, metrics: StepMetrics, before: TrainState, step: BadStep) -> None:
        """Raise TrainingError if the loss scale is exhausted, or a figure is not finite; the run is saved first."""
        if self._run.scaler.exhausted(self._state.loss_scale):
            cause = find_cause(self._context, step)
            self._save()
            self._finish_saving()
            raise TrainingError(self._run.scaler.exhaustion(self._state.loss_scale, cause=str(cause)))
        checks = self._context.engine.settings.checks_finite
        if checks and not metrics.skipped and not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
            cause = find_cause(self._context, step)
            self._pending.clear()  # a GPU has begun the step behind this one, which changed nothing
            kept = self._keep(before, cause)
            figures = f"iteration {metrics.iteration}: loss {metrics.loss}, gradient norm {metrics.grad_norm}"
            given, rule = f"{figures}; {cause}", "loss and gradient norm are finite (--check-for-nan-in-loss-and-grad)"
            raise TrainingError(Problem(given, rule, f"a lower --lr or a longer warm-up, or other samples; {kept}"))

    def _keep(self, before: TrainState, cause: Cause) -> str:
        """Save the state before a bad step, unless it is damaged; return what became of it, in words."""
        if not self._context.engine.refuses_updates:
            return "from the last checkpoint: the update has been made before the figures were read"
        if cause.in_weights:
            return "from an earlier checkpoint: the weights were not finite before this step, and are not saved"
        if self._run.saver is None or before.iteration == 0:
            return "the update was not made, and there is nothing to save"
        self._state = before
        self._save()
        self._finish_saving()
        return f"the update was not made: --load {self._run.saver.root} goes on after iteration {before.iteration}"

    def _evaluate(self, split: str) -> None:
        """Evaluate the sets of a split and report their losses, at most once per iteration.

        A request to stop cuts it short.
        """
        sets = {name: held_out for name, held_out in self._run.held_out.items() if held_out.split == split}
        if not sets or (split == "validation" and self._evaluated_iteration == self._state.iteration):
            return
        self._report_steps(max_pending=0)
        if self._state.iteration >= self._run.timetable.train_iters:
            self._context.engine.publish_late()  # no step follows that would
        self._context.mesh.meter.flight.activity = "evaluation"
        iteration = self._state.iteration
        for name, held_out in sets.items():
            loss = evaluate(self._context, held_out, self._wants_to_stop)
            if loss is None:
                self._stops = True
                line = f"{name} at iteration {iteration} cut short by the request to stop: no loss is reported"
                self._run.reporting.console.line(line)
                return
            result = Evaluation(
                iteration, self._state.consumed_samples, split, loss, held_out.bytes_per_token, held_out.group
            )
            for writer in self._run.reporting.writers:
                writer.evaluation(result)
        if split == "validation":
            self._evaluated_iteration = iteration
            self._sample()
        self._restart_clock()

    def _sample(self) -> None:
        """Generate and report a text, if the run does; a collective call."""
        text = self._run.sampled
        if text is None:
            return
        tokens = continue_text(self._context, text)
        if text.decode is not None:
            for writer in self._run.reporting.writers:
                writer.sample(self._state.iteration, text.decode(text.prompt), text.decode(tokens))

    def _save(self) -> None:
        """Save a checkpoint of this iteration, at most once; beside training only its copy is made here."""
        if self._run.saver is None or self._saved_iteration == self._state.iteration:
            return
        self._report_steps(max_pending=0)  # a step whose loss was not finite ends the run here, unsaved
        self._finish_saving()
        start = time.perf_counter()
        self._context.mesh.meter.flight.activity = "saving"
        folder = self._run.saver.save(self._state)
        self._saved_iteration = self._state.iteration
        seconds = time.perf_counter() - start
        if folder is None:
            self._saving = _PendingSave(self._state.iteration, start, seconds)
        else:
            self._tell_saved(self._state.iteration, folder, seconds)
        if self._reported is not None:
            ranks = self._rank_metrics(self._reported._replace(memory=self._run.reporting.memory.now()))
            for writer in self._run.reporting.writers:
                writer.saved(self._state.iteration, ranks)
        self._restart_clock()

    def _is_saved(self) -> bool:
        """Return True if the save beside training has ended well on this rank."""
        saver = self._run.saver
        background = None if saver is None else saver.background
        return background is not None and background.is_done and not background.has_failed

    def _finish_saving(self) -> None:
        """Wait for the save beside training, if there is one, and report it; raise its error, which all ranks have."""
        saving, self._saving = self._saving, None
        if saving is None or self._run.saver is None or self._run.saver.background is None:
            return
        folder = self._run.saver.background.finish()
        if folder is not None:
            seconds = time.perf_counter() - saving.begun
            self._tell_saved(saving.iteration, folder, seconds, f", training waited {format_duration(saving.waited)}")

    def _tell_saved(self, iteration: int, folder: Path, seconds: float, beside: str = "") -> None:
        self._run.journal.write("save", iteration=iteration, checkpoint=folder.name, seconds=round(seconds, 3))
        self._run.reporting.console.line(
            f"saved checkpoint of iteration {iteration} to {folder} in {format_duration(seconds)}{beside}"
        )

    def _take_back_trigger(self) -> None:
        """Remove the file that has made the run save; if that fails, no further one does."""
        self._saves = False
        path, console = self._run.timetable.triggers, self._run.reporting.console
        if path is None or self._context.mesh.rank:
            return
        if self._run.saver is None:
            console.line(f"{path / SAVE_TRIGGER}: without --save nothing is kept")
        try:
            (path / SAVE_TRIGGER).unlink(missing_ok=True)
        except OSError as error:
            self._may_be_triggered = False
            console.line(f"{path / SAVE_TRIGGER} cannot be removed ({error.strerror}): it triggers no further saves")

    def _restart_clock(self) -> tuple[float, float]:
        """Return the seconds since the last call, and those of them without waits for other ranks."""
        before, self._mark = self._mark, (time.perf_counter(), self._context.mesh.meter.waited_seconds)
        seconds, waited = (now - then for now, then in zip(self._mark, before, strict=True))
        return seconds, seconds - waited

    def _reason_to_exit(self) -> str:
        """Return the reason to end the run after this step, the same on all ranks; empty to continue."""
        timetable, iteration = self._run.timetable, self._state.iteration
        if self._stops:
            why = self._stop.reason or "by another rank, the clock or a file"
            return f"asked to stop after iteration {iteration} ({why})"
        if _is_due(timetable.exit_interval, iteration) and iteration < timetable.train_iters:
            return f"exit interval {timetable.exit_interval} reached at iteration {iteration}"
        return ""

    def _end(self, reason: str) -> str:
        self._report_steps(max_pending=0)
        if line := self._run.reporting.profile.close():  # the run ends before the last step that is profiled
            self._run.reporting.console.line(line)
        for writer in self._run.reporting.writers:
            writer.flush()  # the last steps' line comes before those that end the run
        self._save()
        self._finish_saving()
        for line in self._run.reporting.closing():
            self._run.reporting.console.line(line)
        return reason

    def _wants_to_stop(self) -> bool:
        """Return True if this rank requests the end of the run: by a signal, the clock, a file, or a failed save."""
        limit, switch = self._run.timetable.exit_after_seconds, self._run.timetable.kill_switch
        is_late = limit is not None and time.monotonic() - self._started >= limit
        # A save that fails does so on all ranks, but at moments of their own: they end after the same step.
        saver = self._run.saver
        has_failed = saver is not None and saver.background is not None and saver.background.has_failed
        is_asked = self._is_there(switch) or self._is_triggered(EXIT_TRIGGER)
        return self._stop.requested or is_late or is_asked or has_failed

    def _is_triggered(self, name: str) -> bool:
        """Return True on rank 0 if the folder of triggers has this file."""
        triggers = self._run.timetable.triggers
        return triggers is not None and self._is_there(triggers / name)

    def _is_there(self, path: Path | None) -> bool:
        """Return True on rank 0 if there is this file: thousands of ranks would keep the file system busy."""
        return path is not None and self._context.mesh.world.rank == 0 and path.exists()

    def _announce(self) -> None:
        mesh, layout = self._context.mesh, self._context.engine.layout
        states = self._context.engine.model_state_bytes()
        engine = self._context.engine
        away = engine.model_state_bytes(Home.HOST).total
        in_files = engine.model_state_bytes(Home.FILE).total
        numel = layout.used_numel(trainable=True) + layout.used_numel(trainable=False)
        self._run.reporting.console.line(
            f"{mesh.topology.describe()} on {mesh.device.type} | parameters on this rank: {format_count(numel)} | "
            f"model states on this rank: {format_bytes(states.total)} (parameters {format_bytes(states.parameters)}, "
            f"gradients {format_bytes(states.gradients)}, master {format_bytes(states.master)}, "
            f"moments {format_bytes(states.moments)})"
            f"{f', and in host memory: {format_bytes(away)}' if away else ''}"
            f"{f', and in files: {format_bytes(in_files)}' if in_files else ''}"
        )
        for line in self._run.reporting.opening:
            self._run.reporting.console.line(line)
        if self._state.iteration:
            self._run.reporting.console.line(
                f"resumed at iteration {self._state.iteration}, {self._state.consumed_samples} samples consumed"
            )


def _is_due(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0
