"""Tests of signals that a process sends to itself, or that reach one whose main thread waits in C."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support.each import each

from megazero.signals import StopRequest, launcher_process

ALL = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP]


@pytest.fixture(autouse=True)
def former_handlers() -> Iterator[None]:
    """Restore the handlers that a failing test leaves behind."""
    before = {number: signal.getsignal(number) for number in ALL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@each("number", ALL)
def test_a_signal_raises_the_flag(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.requested and stop.reason == ""
        os.kill(os.getpid(), number)
        assert stop.requested and stop.reason == number.name


def test_the_first_signal_is_the_reason() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGUSR1"


def test_rank_0_announces_the_first_signal(capfd: pytest.CaptureFixture[str]) -> None:
    """One line for the warning and one for what may be repeated; the same signal from shell and launcher is one."""
    for rank in (1, 0):
        with StopRequest(rank=rank, announcement="saving"):
            for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
                os.kill(os.getpid(), number)
        told = capfd.readouterr().err.splitlines()
        second = "SIGHUP: saving; a second one ends the program at once, unsaved"
        assert told == ([] if rank else ["SIGUSR1: saving", second])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        assert not stop.requested
    assert signal.getsignal(number) is signal.SIG_IGN


def test_the_end_of_torchrun_raises_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launcher_process() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launcher_process() == os.getppid()
    with StopRequest() as stop:
        assert not stop.requested
    with StopRequest(launcher=os.getpid()) as stop:  # not the parent, as after the parent's end
        assert stop.requested and stop.reason == "torchrun has ended"


def test_former_handlers_come_back() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    stop = StopRequest()
    stop.close()
    stop.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [signal.SIGUSR1] and not stop.requested


# The main thread waits in C for a lock it holds, as it waits for a peer in a collective: no Python handler runs there.
BLOCKED = """
import ctypes, os, signal
from megazero import signals

with signals.StopRequest(announcement="saving") as stop:
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)  # a forked process has the former handlers
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stop.requested, flush=True)
    signals._SAME_SECONDS = 0.2
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize(
    ("rank", "told"), [("0", "SIGHUP again: ended at once; the work"), ("1", "rank 1: SIGHUP again")]
)
def test_a_second_signal_ends_a_blocked_process(rank: str, told: str) -> None:
    """The first signal is announced at once, what follows it at once does not count, and a later one ends."""
    # From Python 3.12 on a fork in a process with threads is warned of.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BLOCKED]
    with subprocess.Popen(
        command, env={**os.environ, "RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == f"-{signal.SIGTERM} False\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        if rank == "0":
            assert process.stderr.readline().endswith(": saving; a second one ends the program at once, unsaved\n")
        time.sleep(0.4)
        process.send_signal(signal.SIGHUP)
        assert process.stderr.readline().startswith(told)
        assert process.wait(60) == 128 + signal.SIGHUP


def test_without_it_the_process_dies() -> None:
    """A signal raises the flag within the block and, by default, ends the process after it."""
    program = (
        "import os, signal; from megazero.signals import StopRequest\n"
        "with StopRequest(): os.kill(os.getpid(), signal.SIGTERM); print('lives', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM); print('still lives')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "lives\n", done.stderr
    assert done.returncode == -signal.SIGTERM
