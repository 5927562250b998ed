"""Reports of an engine about its steps: figures to trackers, and the times of parts every `steps_per_print` steps."""

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.comm.mesh import Mesh
from megazero.library.config import EngineConfig
from megazero.memory.host_copy import HostCopy
from megazero.report.timing_report import TimingReport
from megazero.report.trackers import flattened, open_trackers
from megazero.report.writers import part_scalars
from megazero.timers import Timers, Timings


class StepFigures(NamedTuple):
    """The figures of a step that the host has.

    number: of the steps so far, this one included.  samples: of all steps, over all ranks.  lr: of the first param
    group.  losses: what this rank's backward passes have got, on the device.
    """

    number: int
    samples: int
    lr: float
    loss_scale: float
    losses: Sequence[Tensor]
    grad_norm: Tensor


class _PendingStep(NamedTuple):
    """A step whose figures may still be on the device, and whose times lie between events of it."""

    figures: StepFigures
    seconds: float
    timings: Timings
    copies: HostCopy | None


class StepReports:
    """The reports of one engine's steps; on a GPU a step is read when the next one has been launched."""

    def __init__(self, config: EngineConfig, mesh: Mesh, timers: Timers) -> None:
        self._timers = timers
        is_timed = config.reports.timing_log_level > 0
        self._is_first = mesh.world.rank == 0
        self._is_on = is_timed or config.reports.tracks
        self._timing = TimingReport(
            mesh,
            level=config.reports.timing_log_level,
            option=config.reports.timing_log_option,
            log_interval=config.steps_per_print,
            is_on=is_timed,
        )
        self._trackers = (
            open_trackers(config.reports, folder=None, settings=flattened(config), report=_tell)
            if self._is_first
            else ()
        )
        self._pending: deque[_PendingStep] = deque()
        self._max_pending = 0 if mesh.device.type == "cpu" else 1
        self._mark = time.perf_counter()
        self._recomputing: dict[str, float] = {}  # seconds of steps that have been reported

    def end_step(self, figures: StepFigures) -> None:
        """Report the steps whose figures are due; every `steps_per_print` steps a collective call, if parts are timed.

        Trackers get the mean of rank 0's losses every step, as far as `engine.backward` has got them.
        """
        if not self._is_on:
            return
        now = time.perf_counter()
        copies = None
        if self._trackers:
            losses = [loss.mean().double() for loss in figures.losses]
            mean = torch.stack(losses).mean() if losses else torch.full_like(figures.grad_norm, torch.nan)
            copies = HostCopy([mean.to(figures.grad_norm), figures.grad_norm])
        self._pending.append(_PendingStep(figures._replace(losses=()), now - self._mark, self._timers.take(), copies))
        self._mark = now
        self._report(self._max_pending)

    def close(self) -> None:
        """Give the trackers what is left, for which a GPU's host waits, and close them; no collective call."""
        if self._trackers:
            self._report(0, closes=True)
        for tracker in self._trackers:
            tracker.close()

    def take_recomputing(self) -> Mapping[str, float]:
        """Return the seconds in recomputed functions since the last call, by part; a GPU's host waits for them."""
        if not self._is_on:
            self._keep_recomputing(self._timers.take())
        taken, self._recomputing = self._recomputing, {}
        return taken

    def _report(self, max_pending: int, *, closes: bool = False) -> None:
        while len(self._pending) > max_pending:
            step = self._pending.popleft()
            number, samples = step.figures.number, step.figures.samples
            scalars = {} if step.copies is None else _scalars(step, *step.copies.read())
            self._keep_recomputing(step.timings)
            times = None if closes else self._timing.step(number, step.seconds, step.timings)
            if times is not None:
                _tell(f"step {number}: " + "\n".join(times.lines()))
            for tracker in self._trackers:
                tracker.scalars(scalars, number, samples)
                if times is not None:
                    tracker.scalars(part_scalars(times), number)

    def _keep_recomputing(self, timings: Timings) -> None:
        for name, seconds in timings.read().items():
            if name.startswith("checkpoint-"):
                self._recomputing[name] = self._recomputing.get(name, 0.0) + seconds


def _scalars(step: _PendingStep, loss: float, grad_norm: float) -> dict[str, float]:
    """Return a step's figures by the names that a run gives them; no loss where none is known."""
    return ({} if loss != loss else {"loss/train": loss}) | {
        "optimizer/learning-rate": step.figures.lr,
        "optimizer/loss-scale": step.figures.loss_scale,
        "optimizer/grad-norm": grad_norm,
        "speed/seconds-per-step": step.seconds,
    }


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
