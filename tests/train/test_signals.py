"""Tests of signals that this process sends to itself."""

import os
import signal
import subprocess
import sys

import pytest

from megazero.train.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
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


def test_former_handlers_come_back() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        stop = StopRequest()
        stop.close()
        stop.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1] and not stop.requested
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_without_it_the_process_dies() -> None:
    """A signal raises the flag within the block and, by default, ends the process after it."""
    program = (
        "import os, signal; from megazero.train.signals import StopRequest\n"
        "with StopRequest(): os.kill(os.getpid(), signal.SIGTERM); print('lives', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM); print('still lives')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "lives\n", done.stderr
    assert done.returncode == -signal.SIGTERM
