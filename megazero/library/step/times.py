"""The times of a training loop's steps on every rank, by which slow ranks are named (`report/stragglers.py`)."""

import sys
import time

from megazero.comm.mesh import Mesh
from megazero.report.stragglers import STEPS, OwnTime, StragglerReport

_BETWEEN = "what the program does between a step and the next forward, as loading data"


class StepTimes:
    """The clock of one rank's steps: what lies before a step's first forward, and what the step itself takes."""

    def __init__(self, mesh: Mesh) -> None:
        self._meter = mesh.meter
        self._prints = mesh.world.rank == 0
        self._stragglers = StragglerReport(mesh, log_interval=STEPS, before=_BETWEEN)
        self._mark = self._now()  # at the end of the last step
        self._before: float | None = None

    def begin_forward(self) -> None:
        """Note the step's first forward."""
        if self._before is None:
            self._before = self._now() - self._mark

    def end_step(self, number: int) -> None:
        """Print a line for every rank that has become slow or has recovered; a collective call every 20 steps."""
        before, self._before = self._before or 0.0, None
        for line in self._stragglers.step(number, OwnTime(before, self._now() - self._mark - before)):
            if self._prints:
                print(line, file=sys.stderr, flush=True)
        self._mark = self._now()

    def _now(self) -> float:
        """Return the seconds that have passed without waits for other ranks, from an arbitrary moment on."""
        return time.perf_counter() - self._meter.waited_seconds
