"""Handles the signals that make a run save and stop.

SIGTERM (a scheduler reclaims its nodes) and SIGUSR1 (a warning some minutes before that) only raise a flag, on
the rank that got them and nowhere else.  The training loop sends every rank's flag through the step's reductions, so
all ranks stop after the same step.  Signals belong to ranks: torchrun itself dies of SIGUSR1 and orphans its workers.
"""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """The flag of this rank, and the handlers that raise it until `close`.

    A context manager.  Python allows only the main thread to make or close one, since both change handlers.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = STOP_SIGNALS) -> None:
        self._received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}
        for number in signals:
            self._previous[number] = signal.signal(number, self._receive)

    @property
    def requested(self) -> bool:
        """True if this rank has received a signal."""
        return self._received is not None

    @property
    def reason(self) -> str:
        """The name of the first signal received ("SIGTERM"); empty if there was none."""
        return "" if self._received is None else self._received.name

    def close(self) -> None:
        """Restore the former handlers; a second call does nothing."""
        while self._previous:
            number, handler = self._previous.popitem()
            # `signal.signal` returned None for a handler that was not installed from Python; it cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Keep the first one: it is the reason that the run reports.
        if self._received is None:
            self._received = signal.Signals(number)
