"""Reports the seconds that the parts of a step take, over all ranks of a job.

Ranks add up their own seconds step by step.  At a log interval each sends one row of numbers to rank 0, which has the
figures of all; nothing is sent in between, and no other rank gets any.
"""

import torch

from megazero.comm.mesh import Mesh, gather_on_first
from megazero.report.part_times import Option, PartTimes
from megazero.timers import Timings, parts_of

STEP = "step"


class TimingReport:
    """The times of one rank's steps, and on rank 0 those of all ranks' at every log interval."""

    def __init__(self, mesh: Mesh, *, level: int, option: Option, log_interval: int, is_on: bool = True) -> None:
        """Report the parts of a level; is_on: False reports nothing, and sends nothing."""
        self._mesh = mesh
        self._parts = parts_of(level)
        self._option = option
        self._interval = log_interval
        self._is_on = is_on
        self._num_steps = 0
        self._sums = dict.fromkeys(self._parts, 0.0)

    def step(self, iteration: int, seconds: float, timings: Timings, *, is_last: bool = False) -> PartTimes | None:
        """Add a step that took `seconds`; return all ranks' times on rank 0 at a log interval, else None.

        At a log interval, and after the last step, a collective call.  timings: of a step that the device has ended.
        """
        if not self._is_on:
            return None
        self._num_steps += 1
        for name, value in {STEP: seconds, **timings.read()}.items():
            self._sums[name] += value
        if iteration % self._interval and not is_last:
            return None
        row = torch.tensor([self._sums[name] / self._num_steps for name in self._parts], dtype=torch.float64)
        rows = gather_on_first(self._mesh, row)
        num_steps, self._num_steps = self._num_steps, 0
        self._sums = dict.fromkeys(self._parts, 0.0)
        if rows is None:
            return None
        by_part = dict(zip(self._parts, rows.T.tolist(), strict=True))
        return PartTimes(self._option, num_steps, {name: ranks for name, ranks in by_part.items() if any(ranks)})
