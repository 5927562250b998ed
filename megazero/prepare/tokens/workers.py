"""Runs a pool of processes that do the same work on many tasks, with the results in the order of the tasks.

Task number i goes to worker i modulo their number, so results need no task numbers; a worker has a few tasks queued and
receives them in a thread of its own, so neither side can wait for the other for ever.

The arrays of a result lie in memory that a worker shares with this process, so they are copied once and never sent
through a pipe.  A worker has as many slots there as queued tasks: a slot's next task is sent only after its earlier
result has been used.
"""

import mmap
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any, NamedTuple, TypeVar

from megazero.errors import DataError, Problem, UserError
from megazero.operating_system import nameless_file

Task = TypeVar("Task")
Result = TypeVar("Result")

# The number of tasks that a worker has received and whose results have not been used.
AHEAD = 3
# The bytes for the arrays of a result; a larger result goes through the pipe.  Only memory that is written is used.
SLOT_BYTES = 16 << 20
# Every array begins at a multiple of this many bytes.
ALIGNMENT = 64


class _Failure(NamedTuple):
    """A worker's message instead of a result: the user's problems, or the traceback of a bug."""

    problems: tuple[Problem, ...]
    trace: str


class _Packed(NamedTuple):
    """A pickled result, and the sizes of its buffers, which lie in the slot, one after the other."""

    content: bytes
    sizes: list[int]


class _Slots:
    """Memory for results, which is shared with one worker."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._memory = memoryview(mmap.mmap(file, AHEAD * SLOT_BYTES))

    @classmethod
    def new(cls) -> "_Slots":
        return cls(nameless_file(AHEAD * SLOT_BYTES))

    def __reduce__(self) -> tuple[Callable[[Any], "_Slots"], tuple[Any]]:
        return _received, (reduction.DupFd(self._file),)

    def in_turn(self) -> Iterator[memoryview]:
        """Return every slot, again and again."""
        return cycle([self._memory[n * SLOT_BYTES : (n + 1) * SLOT_BYTES] for n in range(AHEAD)])

    def close_file(self) -> None:
        """Close the file; the memory stays until its last user is gone."""
        os.close(self._file)


def _received(file: Any) -> _Slots:
    return _Slots(file.detach())


class _Worker(NamedTuple):
    process: multiprocessing.process.BaseProcess
    tasks: Connection
    results: Connection
    slots: Iterator[memoryview]


@contextmanager
def worker_pool(
    start: Callable[[], Callable[[Task], Result]], count: int
) -> Iterator[Callable[[Iterable[Task]], Iterator[Result]]]:
    """Yield a function that returns the results of tasks, in their order; it is called once.

    start: a function that makes the function that does one task; called once in each worker, so it must be picklable,
    as tasks and results must.  Arrays in a result are valid until the next result.  Raises a task's error in its turn:
    a UserError with its problems, anything else as a RuntimeError with the worker's traceback.
    """
    # spawn, not fork: the tokenizer libraries have threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool: list[_Worker] = []
    try:
        try:
            for _ in range(count):
                pool.append(_start_worker(context, start))
        except OSError as error:
            given = f"--workers {count}: number {len(pool) + 1} cannot be started: {error.strerror}"
            rule = "the system's limits leave room for all of them"
            raise DataError(Problem(given, rule, "fewer workers, or higher limits (ulimit -a)")) from error
        yield partial(_results, pool)
    finally:
        for worker in pool:
            worker.results.close()  # a worker still sending gets an error and ends
            worker.tasks.close()
        for worker in pool:
            worker.process.terminate()
            worker.process.join()


def _start_worker(context: SpawnContext, start: Callable[[], Callable[[Task], Result]]) -> _Worker:
    (task_end, tasks), (results, result_end) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    slots = _Slots.new()
    process = context.Process(target=_work, args=(start, task_end, result_end, slots), daemon=True)
    with _uninterrupted():
        process.start()
    # Only the worker has its ends now, so that the death of either side closes the pipe for the other.
    task_end.close()
    result_end.close()
    slots.close_file()
    return _Worker(process, tasks, results, slots.in_turn())


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block Ctrl-C inside, also for processes that are started there, since this process ends them."""
    resource_tracker.ensure_running()  # the first start would do this, and unblock Ctrl-C afterwards
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _results(pool: list[_Worker], tasks: Iterable[Any]) -> Iterator[Any]:
    waiting: deque[_Worker] = deque()
    for worker, task in zip(cycle(pool), tasks, strict=False):
        if len(waiting) == AHEAD * len(pool):
            yield _receive(waiting.popleft())
        with suppress(BrokenPipeError):  # the worker has died, which reading its result reports
            worker.tasks.send(task)
        waiting.append(worker)
    while waiting:
        yield _receive(waiting.popleft())


def _receive(worker: _Worker) -> Any:
    try:
        item = worker.results.recv()
    except (EOFError, OSError) as error:  # between two results, or within one
        raise DataError(
            Problem("a worker process died", "it was killed, most likely for want of memory", "fewer --workers")
        ) from error
    if isinstance(item, _Failure):
        if item.problems:
            raise DataError(*item.problems)
        raise RuntimeError(f"a worker process failed:\n{item.trace}")
    return _unpack(item, next(worker.slots))


def _pack(result: Any, slot: memoryview) -> _Packed:
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(result, protocol=5, buffer_callback=buffers.append)
    parts = [buffer.raw() for buffer in buffers]
    sizes = [part.nbytes for part in parts]
    if sum(map(_aligned, sizes)) > len(slot):
        return _Packed(pickle.dumps(result), [])
    for part, memory in zip(parts, _buffers(slot, sizes), strict=True):
        memory[:] = part
    return _Packed(content, sizes)


def _unpack(packed: _Packed, slot: memoryview) -> Any:
    # The pickle comes from a worker that this process has started, through a private pipe: never from a file.
    return pickle.loads(packed.content, buffers=_buffers(slot, packed.sizes))


def _buffers(slot: memoryview, sizes: list[int]) -> Iterator[memoryview]:
    """Yield the memory of every buffer, one after the other."""
    offset = 0
    for size in sizes:
        yield slot[offset : offset + size]
        offset += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _work(start: Callable[[], Callable[[Task], Result]], tasks: Connection, results: Connection, slots: _Slots) -> None:
    """Run a worker: receive tasks, do them in order, send each result."""
    todo: queue.Queue[Task | None] = queue.Queue()
    threading.Thread(target=_take_in, args=(tasks, todo), daemon=True).start()
    with suppress(BrokenPipeError):  # the parent is ending, and has printed the reason
        try:
            work, free = start(), slots.in_turn()
            while (task := todo.get()) is not None:
                results.send(_pack(work(task), next(free)))
        except BrokenPipeError:
            raise
        except UserError as error:
            results.send(_Failure(error.problems, ""))
        except Exception:
            results.send(_Failure((), traceback.format_exc()))


def _take_in(tasks: Connection, todo: "queue.Queue[Task | None]") -> None:
    try:
        with suppress(EOFError, OSError):
            while True:
                todo.put(tasks.recv())
    finally:
        todo.put(None)
