"""What an engine reports about its steps, every `steps_per_print` of them: the times of their parts."""

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from megazero.comm.mesh import Mesh
from megazero.library.config import EngineConfig
from megazero.report.timing_report import TimingReport
from megazero.timers import Timers, Timings


class _PendingStep(NamedTuple):
    """A step whose times may still lie between events of the device."""

    number: int
    seconds: float
    timings: Timings


class StepReports:
    """The reports of one engine's steps; on a GPU a step is read when the next one has been launched."""

    def __init__(self, config: EngineConfig, mesh: Mesh, timers: Timers) -> None:
        self._timers = timers
        self._is_on = config.reports.timing_log_level > 0
        self._part_times = TimingReport(
            mesh,
            level=config.reports.timing_log_level,
            option=config.reports.timing_log_option,
            log_interval=config.steps_per_print,
            is_on=self._is_on,
        )
        self._pending: deque[_PendingStep] = deque()
        self._max_pending = 0 if mesh.device.type == "cpu" else 1
        self._mark = time.perf_counter()
        self._recomputing: dict[str, float] = {}  # seconds of steps that have been reported

    def end_step(self, number: int) -> None:
        """Take the times of a step; when they are due, print all ranks' on rank 0, in a collective call."""
        if not self._is_on:
            return
        now = time.perf_counter()
        self._pending.append(_PendingStep(number, now - self._mark, self._timers.take()))
        self._mark = now
        while len(self._pending) > self._max_pending:
            step = self._pending.popleft()
            self._keep_recomputing(step.timings)
            times = self._part_times.step(step.number, step.seconds, step.timings)
            if times is not None:
                print(f"step {step.number}: " + "\n".join(times.lines()), file=sys.stderr, flush=True)

    def take_recomputing(self) -> Mapping[str, float]:
        """Return the seconds in recomputed functions since the last call, by part; a GPU's host waits for them."""
        if not self._is_on:
            self._keep_recomputing(self._timers.take())
        taken, self._recomputing = self._recomputing, {}
        return taken

    def _keep_recomputing(self, timings: Timings) -> None:
        for name, seconds in timings.read().items():
            if name.startswith("checkpoint-"):
                self._recomputing[name] = self._recomputing.get(name, 0.0) + seconds
