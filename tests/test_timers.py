"""Timers add up seconds by part and level; the bounds in these tests hold on a machine of any speed."""

import time

import pytest
import torch

from megazero.timers import PARTS, Timers, parts_of

CPU = torch.device("cpu")
PAUSE = 0.002


def test_parts_add_up_by_name_until_they_are_taken() -> None:
    timers = Timers(CPU, level=1)
    start = time.perf_counter()
    for name in ("forward-backward", "optimizer", "forward-backward"):
        with timers.measure(name):
            time.sleep(PAUSE)
    taken = timers.take().read()
    assert list(taken) == ["forward-backward", "optimizer"]
    assert taken["forward-backward"] >= 2 * PAUSE and taken["optimizer"] >= PAUSE
    assert sum(taken.values()) <= time.perf_counter() - start
    assert timers.take().read() == {}


def test_parts_may_lie_within_each_other() -> None:
    timers = Timers(CPU, level=2)
    with timers.measure("forward-backward"), timers.measure("forward-compute"):
        time.sleep(PAUSE)
    taken = timers.take().read()
    assert taken["forward-backward"] >= taken["forward-compute"] >= PAUSE


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_level_measures_its_parts_and_those_of_the_levels_below(level: int) -> None:
    timers = Timers(CPU, level=level)
    for name in PARTS:
        with timers.measure(name):
            pass
    expected = [name for name, own in PARTS.items() if own <= level]
    assert list(timers.take().read()) == expected == list(parts_of(level))


def test_a_part_that_is_not_in_the_table_is_an_error_at_every_level() -> None:
    with pytest.raises(KeyError):
        Timers(CPU).measure("some-part")


def test_a_part_that_fails_is_counted() -> None:
    timers = Timers(CPU, level=1)
    with pytest.raises(ZeroDivisionError), timers.measure("optimizer"):
        raise ZeroDivisionError
    assert timers.take().read()["optimizer"] > 0


def test_what_was_taken_does_not_change_any_more() -> None:
    timers = Timers(CPU, level=1)
    with timers.measure("optimizer"):
        pass
    taken = timers.take()
    before = dict(taken.read())
    with timers.measure("optimizer"):
        time.sleep(PAUSE)
    assert taken.read() == before == taken.read()


class Device:
    """A device whose clock ticks once for every mark in its work, and whose host may run ahead of it."""

    def __init__(self) -> None:
        self.marks: list[int] = []
        self.passed = 0
        self.num_waits = 0

    def event(self) -> "Mark":
        return Mark(self)


class Mark:
    """An event of a `Device`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._time = -1

    def record(self) -> None:
        self._time = len(self._device.marks)
        self._device.marks.append(self._time)

    def query(self) -> bool:
        return self._time < self._device.passed

    def synchronize(self) -> None:
        self._device.num_waits += 1
        self._device.passed = max(self._device.passed, self._time + 1)

    def elapsed_time(self, end_event: "Mark", /) -> float:
        assert end_event.query(), "the device has not come to the event"
        return 1000.0 * (end_event._time - self._time)


def test_a_device_is_asked_for_its_times_when_they_have_passed() -> None:
    """Measuring and taking wait for nothing, and neither does reading once the device has done the work."""
    device = Device()
    timers = Timers(CPU, level=2, event=device.event)
    for _ in range(3):
        with timers.measure("forward-backward"), timers.measure("forward-compute"):
            pass
    taken = timers.take()
    assert device.num_waits == 0 and len(device.marks) == 12
    device.passed = len(device.marks)
    assert taken.read() == {"forward-compute": 3.0, "forward-backward": 9.0}
    assert device.num_waits == 0


def test_reading_too_early_waits_for_the_device() -> None:
    device = Device()
    timers = Timers(CPU, level=1, event=device.event)
    with timers.measure("optimizer"):
        pass
    assert timers.take().read() == {"optimizer": 1.0} and device.num_waits == 1


def test_the_hosts_own_work_is_timed_by_its_clock() -> None:
    device = Device()
    timers = Timers(CPU, level=1, event=device.event)
    with timers.measure("batch-generator"):
        time.sleep(PAUSE)
    assert timers.take().read()["batch-generator"] >= PAUSE and device.marks == []


def test_a_level_that_measures_nothing_marks_nothing() -> None:
    device = Device()
    timers = Timers(CPU, event=device.event)
    with timers.measure("forward-backward"):
        pass
    assert device.marks == [] and timers.take().read() == {}


@pytest.mark.cuda
def test_kernels_are_timed_and_not_waited_for() -> None:
    """The host gets on at once while a kernel runs for 50 ms, which are counted."""
    device = torch.device("cuda")
    torch.cuda._sleep(1)  # the first launch loads the kernel
    torch.cuda.synchronize(device)
    timers = Timers(device, level=1)
    start = time.perf_counter()
    with timers.measure("optimizer"):
        torch.cuda._sleep(100_000_000)
    assert (host := time.perf_counter() - start) < (measured := timers.take().read()["optimizer"])
    assert measured > 0.02 > host
