"""Handles the signals that make a program save and stop.

SIGTERM (a scheduler reclaims its nodes), SIGUSR1 (a warning some minutes before that), SIGINT (Ctrl-C) and SIGHUP (the
terminal is gone) only raise a flag, on the rank that got them and nowhere else.  The training loop sends every rank's
flag through the step's reductions, so all ranks stop after the same step.  A second SIGTERM, SIGINT or SIGHUP ends the
process at once.

torchrun forwards SIGTERM, SIGINT and SIGHUP to its ranks.  It dies of other signals and leaves its ranks behind, so the
flag is also raised when torchrun has ended.
"""

import os
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from megazero.console import launcher_rank
from megazero.interrupts import NOT_ON_WINDOWS

if sys.platform == "win32":  # for programs that use megazero as a library; megazero's own have ended by now
    raise ImportError(NOT_ON_WINDOWS)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_REPEATABLE = (signal.SIGUSR1,)  # a scheduler may send it several times; a second one of the others ends the process
# `nohup`, and a shell that starts a job in the background, set these to be ignored, and they stay so.
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
# Shell, kernel and launcher can each forward the same Ctrl-C or hang-up: what arrives so soon is not a second one.
_SAME_SECONDS = 1.0


def launcher_process() -> int | None:
    """Return the process id of the torchrun that started this process; None if another program did."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


class StopRequest:
    """The flag of this rank, and the handlers that raise it until `close`.

        with megazero.StopRequest() as stop:
            for batch in batches:
                ...
                engine.step(stop=stop.requested)
                if engine.stop_requested():  # on any rank
                    break

    A context manager.  Python allows only the main thread to make or close one, since both change handlers.  A thread
    announces the first signal on rank 0 at once, and ends the process at a second one, even while the main thread waits
    for another rank.
    """

    def __init__(
        self,
        *,
        announcement: str = "stopping",
        rank: int | None = None,
        launcher: int | None = None,
        signals: tuple[signal.Signals, ...] = STOP_SIGNALS,
    ) -> None:
        """announcement: what follows the first signal's name ("SIGINT: stopping").  rank: the launcher's by default.

        launcher: process id of the torchrun whose end raises the flag too; the parent by default, if it is torchrun.
        """
        self._announcement = announcement
        self._rank = launcher_rank() if rank is None else rank
        self._launcher = launcher_process() if launcher is None else launcher
        self._signals = signals
        self._received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}
        # The interpreter writes a signal's number to the pipe as soon as it arrives; handlers wait for the main thread.
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._previous_writing = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, args=(reading,), name="stop request", daemon=True)
        self._thread.start()
        for number in signals:
            if number not in _MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        forked = weakref.WeakMethod(self._restore)
        # A forked process would write its signals to this process's pipe.
        os.register_at_fork(after_in_child=lambda: (restore := forked()) and restore())

    @property
    def requested(self) -> bool:
        """True if this rank has received a signal, or the torchrun that started it has ended."""
        return self._received is not None or self._is_orphan()

    @property
    def reason(self) -> str:
        """The name of the first signal received ("SIGTERM"), or that torchrun has ended; empty if neither was."""
        if self._received is not None:
            return self._received.name
        return "torchrun has ended" if self._is_orphan() else ""

    def close(self) -> None:
        """Restore the former handlers; a second call does nothing."""
        if self._writing < 0:
            return
        self._restore()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _is_orphan(self) -> bool:
        return self._launcher is not None and os.getppid() != self._launcher

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Keep the first one: it is the reason that the run reports.
        if self._received is None:
            self._received = signal.Signals(number)

    def _restore(self) -> None:
        """Restore handlers and wake-up descriptor, and close the pipe's end, which ends the thread."""
        if self._writing < 0:
            return
        while self._previous:
            number, handler = self._previous.popitem()
            # `signal.signal` returned None for a handler that was not installed from Python; it cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_writing)
        os.close(self._writing)
        self._writing = -1

    def _watch(self, reading: int) -> None:
        """Announce the first signal, and end the process at a second one, until the pipe closes."""
        warned, asked = False, 0.0
        while received := os.read(reading, 64):
            for number in (signal.Signals(byte) for byte in received if byte in self._signals):
                now = time.monotonic()
                if number in _REPEATABLE:
                    if not warned and not asked:
                        self._print(f"{number.name}: {self._announcement}")
                    warned = True
                elif not asked:
                    asked = now
                    self._print(f"{number.name}: {self._announcement}; a second one ends the program at once, unsaved")
                elif now - asked >= _SAME_SECONDS:
                    self._end(number)
        os.close(reading)

    def _print(self, text: str) -> None:
        if self._rank == 0:
            _write(text)

    def _end(self, number: signal.Signals) -> None:
        """End the process without waiting for anything."""
        if self._rank == 0:
            _write(f"{number.name} again: ended at once; the work since the last save is lost")
        else:
            _write(f"rank {self._rank}: {number.name} again: ended at once")
        os._exit(128 + number)


def _write(text: str) -> None:
    """Write a line to standard error past the stream's lock, which the main thread may hold."""
    with suppress(OSError):  # the terminal is gone
        os.write(2, f"{text}\n".encode())
