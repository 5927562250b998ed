"""The same work on many tasks by several processes, with the results in the order of the tasks.

Task number i goes to worker i modulo their number, so nobody needs to say who did what; a worker has a few tasks ahead
of it and takes them in with a thread of its own, so neither side can wait for the other for ever.
"""

import fcntl
import multiprocessing
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

from megazero.errors import DataError, Problem, UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

# Tasks that a worker has been given and whose results have not been taken.
AHEAD = 3
PIPE_BYTES = 1 << 20


class _Failure(NamedTuple):
    """What a worker sends instead of a result: the user's problems, or the traceback of a bug."""

    problems: tuple[Problem, ...]
    trace: str


class _Worker(NamedTuple):
    process: multiprocessing.process.BaseProcess
    tasks: Connection
    results: Connection


@contextmanager
def ordered_map(
    start: Callable[[], Callable[[Task], Result]], tasks: Iterable[Task], workers: int
) -> Iterator[Iterator[Result]]:
    """The results of all tasks, in order, while the `with` block lasts.

    start: makes the function that does one task; called once in each worker, so it must be picklable, as tasks and
    results must.  One worker is this process.  Raises what a task raises, when its turn comes: a UserError with its
    problems, anything else as a RuntimeError with the worker's traceback.
    """
    if workers == 1:
        yield map(start(), tasks)
        return
    with _started(start, workers) as pool:
        yield _results(pool, iter(tasks))


@contextmanager
def _started(start: Callable[[], Callable[[Task], Result]], count: int) -> Iterator[list[_Worker]]:
    # spawn, not fork: the tokenizer libraries hold threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool: list[_Worker] = []
    try:
        for _ in range(count):
            (task_end, tasks), (results, result_end) = context.Pipe(duplex=False), context.Pipe(duplex=False)
            _widen(results)
            process = context.Process(target=_work, args=(start, task_end, result_end), daemon=True)
            with _uninterrupted():
                process.start()
            # Only the worker has its ends now, so that a death on either side reads as the end of a pipe.
            task_end.close()
            result_end.close()
            pool.append(_Worker(process, tasks, results))
        yield pool
    finally:
        for worker in pool:
            worker.results.close()  # a worker still sending gets an error and ends
            worker.tasks.close()
        for worker in pool:
            worker.process.terminate()
            worker.process.join()


def _widen(pipe: Connection) -> None:
    """Let a whole result lie in a pipe, so that its sender goes on with the next task before anybody has read it."""
    with suppress(OSError):  # more than the system allows a user
        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits, and never reaches processes that are started here: it is for this one, which ends them."""
    resource_tracker.ensure_running()  # which the first start would do, and let Ctrl-C through afterwards
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _results(pool: list[_Worker], tasks: Iterator[Task]) -> Iterator[Result]:
    waiting: deque[_Worker] = deque()
    for number, task in enumerate(tasks):
        if len(waiting) == AHEAD * len(pool):
            yield _receive(waiting.popleft().results)
        worker = pool[number % len(pool)]
        with suppress(BrokenPipeError):  # it has died, and reading its result tells
            worker.tasks.send(task)
        waiting.append(worker)
    while waiting:
        yield _receive(waiting.popleft().results)


def _receive(results: Connection) -> Any:
    try:
        item = results.recv()
    except (EOFError, OSError) as error:  # between two results, or within one
        raise DataError(
            Problem("a worker process died", "it was killed, most likely for want of memory", "fewer --workers")
        ) from error
    if isinstance(item, _Failure):
        if item.problems:
            raise DataError(*item.problems)
        raise RuntimeError(f"a worker process failed:\n{item.trace}")
    return item


def _work(start: Callable[[], Callable[[Task], Result]], tasks: Connection, results: Connection) -> None:
    """A worker's life: take in tasks, do them in order, send each result."""
    todo: queue.Queue[Task | None] = queue.Queue()
    threading.Thread(target=_take_in, args=(tasks, todo), daemon=True).start()
    with suppress(BrokenPipeError):  # the parent is going, and has said why
        try:
            work = start()
            while (task := todo.get()) is not None:
                results.send(work(task))
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
