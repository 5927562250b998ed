"""Stands for disks and for the thread of late updates in a dry run, in which no file is made and no thread computes.

A file of states transfers nothing: its accesses are recorded where they are asked for, and waits where they are needed.
A late update's tasks are run where the next part of the trace begins, beside which they run on a machine, or where one
is needed earlier.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megazero.memory import file_states
from megazero.memory.block_file import aligned
from megazero.memory.homes import StateHome
from megazero.planner.dry.recorder import Recorder
from megazero.zero import engine, late_update, update


class DryHomes:
    """The disks and the thread of one dry rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pending: deque[_Task] = deque()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of the system's files and threads inside."""
        with ExitStack() as stack:
            stack.enter_context(patch.object(engine, "BlockIO", _NoThreads))
            stack.enter_context(patch.object(file_states, "make_folder", lambda folder: None))
            stack.enter_context(patch.object(file_states, "BlockFile", self._file))
            stack.enter_context(patch.object(late_update, "ThreadPoolExecutor", self._thread))
            stack.enter_context(patch.object(update.ShardUpdate, "_is_late", _is_late))
            yield

    @property
    def has_late(self) -> bool:
        """True if the part before has begun tasks that are still to be run."""
        return bool(self._pending)

    def run_late(self) -> None:
        """Run the tasks that have been begun in the part before, beside which this part runs."""
        with self._recorder.beside():
            while self._pending:
                self._pending[0].run()

    def submit(self, task: Callable[..., object], *args: Any) -> "_Task":
        """Put a task behind those begun before."""
        self._pending.append(_Task(self, task, args))
        return self._pending[-1]

    def shutdown(self) -> None:
        """Leave what is pending undone."""

    def run_until(self, last: "_Task") -> None:
        """Run the tasks up to this one."""
        while self._pending and not last.is_done:
            self._pending[0].run()

    def wait_for(self, number: int) -> None:
        """Record that the host waits for an event of this part."""
        self._recorder.wait(number, "host")

    def run_next(self, task: "_Task", call: Callable[[], object]) -> int | None:
        """Run the first pending task; return the number of its last event if it runs beside, else None."""
        assert self._pending[0] is task, "tasks run in the order in which they are begun"
        self._pending.popleft()
        before = self._recorder.num_events
        call()
        is_beside = self._recorder.is_beside and self._recorder.num_events > before
        return self._recorder.num_events - 1 if is_beside else None

    def _thread(self, **_: object) -> "DryHomes":
        return self

    def _file(self, folder: Path, name: str, nbytes: int, io: object) -> "_DryFile":
        return _DryFile(self._recorder, folder / name, nbytes)


def _is_late(steps: update.ShardUpdate, home: StateHome, at_home: object) -> bool:
    """Return True if most steps' updates of what lives in a home are late: a step has no number in a dry run."""
    return steps.has_late_steps and not home.is_device


class _Task:
    """A task of a late update; `result` returns when it has been run."""

    def __init__(self, homes: DryHomes, task: Callable[..., object], args: Sequence[Any]) -> None:
        self._homes = homes
        self._call: Callable[[], object] = lambda: task(*args)
        self._event: int | None = None
        self.is_done = False

    def run(self) -> None:
        self.is_done = True
        self._event = self._homes.run_next(self, self._call)
        self._call = _nothing  # what a task refers to is free once it has been run

    def result(self) -> None:
        self._homes.run_until(self)
        if self._event is not None:
            self._homes.wait_for(self._event)
            self._event = None


def _nothing() -> None:
    return None


class _NoThreads:
    """Stands for the threads of a rank's files."""

    def __init__(self, *, block_bytes: int, queue_depth: int) -> None:
        self.block_bytes, self.queue_depth = block_bytes, queue_depth

    def close(self) -> None:
        """Do nothing, as there are no threads."""


class _DryTransfer:
    """A read or a write whose access is recorded next; it has ended when a kernel has been run since, or at a wait."""

    def __init__(self, recorder: Recorder) -> None:
        self._wait: Callable[[], None] | None = recorder.awaiting_next("host")
        self._has_passed = recorder.computing_after_next()

    @property
    def is_done(self) -> bool:
        return self._wait is None or self._has_passed()

    def wait(self) -> None:
        """Record the wait, once."""
        if self._wait is not None:
            self._wait()
            self._wait = None

    finish = wait


class _DryFile:
    """Stands for a `BlockFile`."""

    is_direct = True

    def __init__(self, recorder: Recorder, path: Path, nbytes: int) -> None:
        self._recorder, self.path, self.nbytes = recorder, path, aligned(nbytes)

    def write(self, offset: int, memory: Tensor) -> _DryTransfer:
        return _DryTransfer(self._recorder)

    def read(self, offset: int, memory: Tensor) -> _DryTransfer:
        return _DryTransfer(self._recorder)

    def holds(self, offset: int, memory: Tensor) -> bool:
        """Return True: what changes a block in a step writes it itself."""
        return True

    def close(self) -> None:
        """Do nothing, as there is no file."""
