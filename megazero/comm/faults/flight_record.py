"""The flight record: the last collectives of one rank, and the position of its step.

The step writes plain attributes and appends to a bounded list, without a lock; the monitor's thread reads them
(`monitor.py`).  A reading may mix two moments of a running step; of a step that stands still it is exact.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

_KEPT = 64  # collectives


class Begun(NamedTuple):
    """A collective that this rank has begun.

    axis: the mesh's key of its communicator.  number: its place among the communicator's collectives, counted from 1,
    which is the same on all ranks.  nbytes: of the whole tensor.  time: on the monotonic clock.
    """

    axis: str
    collective: str
    number: int
    nbytes: int
    time: float

    def __str__(self) -> str:
        return f"{self.collective} number {self.number} on {self.axis}"


class FlightRecord:
    """The last collectives of a rank, the one that it waits for, and where in the training step it is.

    activity: "start-up", "data", "forward", "backward", "update", "saving", ...  unit: the module or the parameter
    that forward or backward has come to.  failed: the first error of a collective.  waiting: None outside collectives.
    """

    def __init__(self) -> None:
        self.begun: deque[Begun] = deque(maxlen=_KEPT)
        self.waiting: Begun | None = None
        self.waiting_since = 0.0
        """The moment at which the wait for `waiting` began, on the clock of `time.perf_counter`."""
        self.failed: BaseException | None = None
        self.iteration = 0
        self.micro_batch = 0
        self.activity = "start-up"
        self.unit = ""
        self.on_failure: Callable[[], None] | None = None
        """The function to call when a collective has failed; the monitor sets it."""

    def begin(self, axis: str, collective: str, number: int, nbytes: int) -> Begun:
        """Record a collective that begins now, and return its record."""
        begun = Begun(axis, collective, number, nbytes, time.monotonic())
        self.begun.append(begun)
        return begun

    def fail(self, begun: Begun, error: BaseException) -> None:
        """Record that a collective has failed, after which nothing that communicates can be relied on."""
        self.waiting = begun
        if self.failed is None:
            self.failed = error
            if self.on_failure is not None:
                self.on_failure()
