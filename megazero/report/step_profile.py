"""Profiles some steps of a run: with torch's profiler, which writes a trace, or as a range for a profiler of GPUs."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megazero.errors import first_line
from megazero.report.memory_history import MemoryHistory

_start: Callable[[], None] = torch.cuda.profiler.start
_stop: Callable[[], None] = torch.cuda.profiler.stop


class StepProfile:
    """A profile of the steps `first` to `last` on one rank; other steps compare a number.

    A run that continues behind `first` has no profile.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        first: int,
        last: int,
        trace: Path | None,
        history: MemoryHistory | None = None,
    ) -> None:
        """trace: the file for torch's profiler; None: CUDA's profiler is started and stopped, as nsys expects it.

        first: 0 for a rank that profiles no step.  history: one of memory that is recorded already, and ends with the
        profile.
        """
        self._history = history
        self._device = device
        self._first = first
        self._last = last
        self._trace = trace
        self._profiler: profile | None = None
        self._is_on = False

    def begin_step(self, iteration: int) -> None:
        """Start if the coming step is the first to be profiled."""
        if iteration != self._first:
            return
        self._is_on = True
        if self._trace is None:
            _start()
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        self._profiler = profile(activities=activities, record_shapes=True, with_stack=True)
        self._profiler.start()

    def end_step(self, iteration: int) -> str:
        """Stop after the last step that is profiled; return a line about it, "" after all others."""
        return self.close() if self._is_on and iteration == self._last else ""

    def close(self) -> str:
        """Stop if steps are being profiled, and write their trace and the history of memory; return lines about it.

        A GPU is waited for.  A trace that cannot be written ends no run: standard error has a line, on any rank.
        """
        if not self._is_on:
            return ""
        self._is_on = False
        lines = [self._close_trace(), "" if self._history is None else self._history.close()]
        return "\n".join(filter(None, lines))

    def _close_trace(self) -> str:
        if self._profiler is None or self._trace is None:
            torch.cuda.synchronize(self._device)
            _stop()
            return f"profiled from step {self._first} on; the profiler that the run is under has the result"
        self._profiler.stop()
        try:
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._trace))
        except (OSError, RuntimeError) as error:
            print(f"no profile {self._trace}: {first_line(error)}", file=sys.stderr, flush=True)
            return ""
        finally:
            self._profiler = None
        return f"profiled from step {self._first} on: {self._trace}"
