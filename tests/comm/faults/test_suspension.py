"""A process that stays stopped is killed after its time, one that goes on is not, and nothing is left of either."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megazero.owner import ProcessState, process_start, process_state

LIMIT_SECONDS, INTERVAL_SECONDS = 1.0, 0.05
PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
from megazero.comm.faults import suspension
print(suspension.kill_when_suspended({limit}, every={interval}).pid, flush=True)
time.sleep(60)
"""


@contextmanager
def guarded_process() -> Iterator[tuple[subprocess.Popen[str], tuple[int, int]]]:
    """Yield a process that is watched, and the id and start of the process that watches it."""
    program = PROGRAM.format(root=str(Path(__file__).parents[3]), limit=LIMIT_SECONDS, interval=INTERVAL_SECONDS)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            watcher = int(process.stdout.readline())
            yield process, (watcher, process_start(watcher) or 0)
        finally:
            process.kill()


def has_ended(pid: int, started: int, seconds: float) -> bool:
    """Return True as soon as the process has ended."""
    deadline = time.monotonic() + seconds
    while process_state(pid, started) is not ProcessState.GONE and time.monotonic() < deadline:
        time.sleep(0.05)
    return process_state(pid, started) is ProcessState.GONE


@pytest.mark.skipif(process_start(os.getpid()) is None, reason="the system does not tell states of processes")
def test_one_that_stays_stopped_is_killed_and_one_that_goes_on_is_not() -> None:
    with guarded_process() as (frozen, its_watcher), guarded_process() as (paused, other_watcher):
        begun = time.monotonic()
        for process in (frozen, paused):
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4 * INTERVAL_SECONDS)
        os.kill(paused.pid, signal.SIGCONT)
        assert frozen.wait(30) == -signal.SIGKILL
        assert time.monotonic() - begun >= LIMIT_SECONDS
        assert has_ended(*its_watcher, 10)
        # Both were stopped at the same time, and this one's watcher has looked at it many times since then.
        assert not has_ended(*other_watcher, LIMIT_SECONDS / 2)
        assert paused.poll() is None
        paused.kill()
        assert has_ended(*other_watcher, 10)
