"""Tests of work shared among processes: its order, large items, failures of every kind and sudden deaths."""

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from multiprocessing import Pipe, Process, spawn
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from support.warm_python import TOOLS, warm_python
from support.worker_tasks import fail_to_start, start_failing, start_reverse, start_square, time_ids

from megazero.errors import DataError
from megazero.prepare.tokens import workers
from megazero.prepare.tokens.workers import AHEAD, SLOT_BYTES, worker_pool

ROOT = Path(__file__).parents[3]


class Arrays(NamedTuple):
    number: int
    small: NDArray[np.uint16]
    large: NDArray[np.float64]
    empty: NDArray[np.int64]


def arrays(number: int) -> Arrays:
    """Return arrays, for every seventh task more than a slot holds; after odd sizes the next array must be aligned."""
    size = SLOT_BYTES // 8 + number if number % 7 == 3 else number
    large = np.full(size, number, np.float64)
    return Arrays(number, np.full(2 * number + 1, number, np.uint16), large, np.empty(0, np.int64))


def start_arrays() -> Callable[[int], Arrays]:
    return arrays


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers come from a process that has their imports; in some tests they start by themselves."""
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(warm_python(TOOLS)))


@pytest.mark.parametrize(("count", "tasks"), [(1, 0), (1, 50), (2, 1), (3, 50)])
def test_results_come_in_the_order_of_the_tasks(count: int, tasks: int) -> None:
    with worker_pool(start_square, count) as run:
        assert list(run(range(tasks))) == [number * number for number in range(tasks)]


def test_tasks_and_results_larger_than_a_pipe_holds(warm: None) -> None:
    """Full pipes in both directions at once cause no deadlock."""
    tasks = [bytes([number]) * 3 + b"x" * 2_000_000 for number in range(24)]
    with worker_pool(start_reverse, 2) as run:
        assert [result[-3:] for result in run(tasks)] == [task[:3] for task in tasks]


def test_arrays_come_through_shared_memory_and_larger_ones_through_the_pipe(warm: None) -> None:
    """Each array is intact at its turn, however far ahead the workers are, and lies in shared memory, not in a copy."""
    with worker_pool(start_arrays, 2) as run:
        for number, result in enumerate(run(range(10 * AHEAD))):
            time.sleep(0.02 * (number < 2))  # so that the workers get as far ahead as they may
            expected = arrays(number)
            for found, wanted in zip(result[1:], expected[1:], strict=True):
                assert found.dtype == wanted.dtype and np.array_equal(found, wanted), number
                assert found.flags.aligned
            assert result.number == number
            assert isinstance(memory(result.small), memoryview) is (number % 7 != 3)


def memory(array: object) -> object:
    """Return the object that owns the memory of an array or of the array that it is a view of."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array


def test_memory_is_gone_with_its_pool(warm: None) -> None:
    def shared() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:megazero")

    before = shared()
    with worker_pool(start_arrays, 2) as run:
        assert [result.number for result in run(range(5))] == list(range(5))
        assert shared() == before + 2
    del run
    gc.collect()
    assert shared() == before
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    assert not [file for file in files if os.path.lexists(file) and "memfd:megazero" in os.readlink(file)]


def test_few_tasks_are_taken_ahead() -> None:
    """Only a few tasks are taken ahead of their results, because tasks may hold text and must not fill the memory."""
    numbers = count()
    with worker_pool(start_square, 2) as run:
        results = run(numbers)
        assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    assert next(numbers) <= 5 + 2 * AHEAD + 1


@pytest.mark.parametrize("kind", ["user", "bug", "unpicklable", "killed"])
def test_a_failure_is_raised_at_its_turn(kind: str, warm: None, capfd: pytest.CaptureFixture[str]) -> None:
    """Results before the failed task are returned; later tasks, which fail too in both workers, are not reported."""
    seen: list[int] = []
    error = RuntimeError if kind in ("bug", "unpicklable") else DataError
    with (
        pytest.raises(error) as caught,
        worker_pool(partial(start_failing, kind, 10), 2) as run,
    ):
        seen.extend(run(range(20 * AHEAD)))
    assert seen == list(range(10))
    text = str(caught.value)
    told = {"user": "task 10", "bug": "planted 10", "unpicklable": "lambda", "killed": "a worker process died"}
    assert told[kind] in text
    assert "another" in text or kind != "user"
    assert capfd.readouterr().err == ""


def test_a_worker_that_cannot_start_is_told() -> None:
    with pytest.raises(DataError, match="the tokenizer"), worker_pool(fail_to_start, 2) as run:
        list(run(range(50)))


@pytest.mark.parametrize("sent", [b"", b"\0\0\1\0half of it"])
def test_a_death_between_results_and_within_one_is_told(sent: bytes) -> None:
    receiving, sending = Pipe(duplex=False)
    os.write(sending.fileno(), sent)
    sending.close()
    with pytest.raises(DataError, match="a worker process died"):
        workers._receive(workers._Worker(Process(), Pipe()[0], receiving, iter(())))


@pytest.mark.parametrize(("limit", "given"), [(resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_NOFILE, 40)])
def test_limits_of_the_system_are_told(limit: int, given: int) -> None:
    soft, hard = resource.getrlimit(limit)
    try:
        resource.setrlimit(limit, (given, hard))
        with (
            pytest.raises(DataError, match=r"--workers 20: number \d+ cannot be started"),
            worker_pool(start_square, 20),
        ):
            pass
    finally:
        resource.setrlimit(limit, (soft, hard))


def test_an_error_of_the_caller_ends_all_workers() -> None:
    with pytest.raises(ZeroDivisionError), worker_pool(partial(time_ids, 0), 2) as run:
        results = run(range(100))
        ids = {next(results) for _ in range(4)}
        raise ZeroDivisionError
    assert len(ids) == 2 and not any(map(is_alive, ids))


def is_alive(process: int) -> bool:
    """Return True if a process is running; a zombie, whose end its parent has not collected, is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


PARENT = """
import sys, time
from functools import partial
from megazero.prepare.tokens.workers import worker_pool
from support.worker_tasks import range_forever, time_ids

if __name__ == "__main__":
    with worker_pool(partial(time_ids, 0), 2) as run:
        results = run(range_forever())
        print(*{next(results) for _ in range(8)}, flush=True)
        if len(sys.argv) > 1:
            time.sleep(60)
        for _ in results:
            pass
"""


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path: Path, kind: signal.Signals, waits: bool) -> None:
    """Workers end, busy or waiting, when their parent is killed, or interrupted along with them as by Ctrl-C."""
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), *["wait"] * waits]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None and parent.stderr is not None
        ids = [int(word) for word in parent.stdout.readline().split()]
        assert len(ids) == 2
        if kind == signal.SIGKILL:
            parent.kill()
        else:
            os.killpg(parent.pid, kind)
        try:
            parent.wait(30)
        finally:
            parent.kill()
        stderr = parent.stderr.read()
    deadline = time.monotonic() + 30
    while any(map(is_alive, ids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, ids))
    assert stderr.count("Traceback") == (kind == signal.SIGINT), stderr  # the only traceback is the parent's
