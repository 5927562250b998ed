"""Timers add up seconds by name; the bounds in these tests hold on a machine of any speed."""

import time

import pytest
import torch

from megazero.timers import Timers

PAUSE = 0.002


def test_parts_add_up_by_name_until_they_are_taken() -> None:
    timers = Timers(torch.device("cpu"), waits=True)
    start = time.perf_counter()
    for name in ("one", "two", "one"):
        with timers.measure(name):
            time.sleep(PAUSE)
    taken = timers.take()
    assert list(taken) == ["one", "two"]
    assert taken["one"] >= 2 * PAUSE and taken["two"] >= PAUSE
    assert sum(taken.values()) <= time.perf_counter() - start
    assert timers.take() == {}


def test_parts_may_lie_within_each_other() -> None:
    timers = Timers(torch.device("cpu"), waits=False)
    with timers.measure("outer"), timers.measure("inner"):
        time.sleep(PAUSE)
    taken = timers.take()
    assert taken["outer"] >= taken["inner"] >= PAUSE


def test_a_part_that_fails_is_counted() -> None:
    timers = Timers(torch.device("cpu"), waits=False)
    with pytest.raises(ZeroDivisionError), timers.measure("part"):
        raise ZeroDivisionError
    assert timers.take()["part"] > 0


def test_what_was_taken_does_not_change_any_more() -> None:
    timers = Timers(torch.device("cpu"), waits=False)
    with timers.measure("part"):
        pass
    taken = timers.take()
    before = dict(taken)
    with timers.measure("part"):
        time.sleep(PAUSE)
    assert taken == before


@pytest.mark.cuda
def test_kernels_are_waited_for_on_request() -> None:
    """Only a timer that waits for kernels counts the 50 ms of a kernel that returns to the host at once."""
    device = torch.device("cuda")
    torch.cuda._sleep(1)  # the first launch loads the kernel
    taken = {}
    for waits in (False, True):
        torch.cuda.synchronize(device)
        timers = Timers(device, waits=waits)
        with timers.measure("kernel"):
            torch.cuda._sleep(100_000_000)
        taken[waits] = timers.take()["kernel"]
    assert taken[False] < taken[True]
