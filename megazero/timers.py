"""Timers: seconds spent in the named parts of a step, each of which has a level.

A part is measured at its own level and above, and costs nothing below it.  On a CPU the host's clock is read at both
ends.  On CUDA, whose kernels run asynchronously, an event is recorded at both ends, behind the work that the stream has
got so far; nothing is waited for, and the time between two events is read later, when both have long passed.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

# {part: the level from which on it is measured}.  0: the step, and what a switch of its own measures; 1: parts that a
# step has once; 2: parts of those, which a step may have many times.
PARTS: Mapping[str, int] = MappingProxyType(
    {
        "step": 0,
        "checkpoint-forward": 0,
        "checkpoint-recompute": 0,
        "batch-generator": 1,
        "forward-backward": 1,
        "all-grads-sync": 1,
        "optimizer": 1,
        "forward-compute": 2,
        "backward-compute": 2,
        "backward-input-compute": 2,
        "backward-weight-compute": 2,
        "forward-recv": 2,
        "forward-send": 2,
        "backward-recv": 2,
        "backward-send": 2,
        "params-gather": 2,
        "grads-reduce": 2,
        "grad-norm": 2,
        "optimizer-inner-step": 2,
        "params-publish": 2,
    }
)
MAX_LEVEL = max(PARTS.values())
# Parts in which the host works or waits, and the device is not asked for anything.
_ON_HOST = frozenset({"batch-generator"})
_NOT_MEASURED: AbstractContextManager[None] = nullcontext()


def parts_of(level: int) -> tuple[str, ...]:
    """Return the parts that are measured at a level, in the order of `PARTS`."""
    return tuple(name for name, own in PARTS.items() if own <= level)


class Event(Protocol):
    """A mark in the work of a device, as `torch.cuda.Event` is."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: "Event", /) -> float: ...


_cuda_event: Callable[..., Any] = torch.cuda.Event


class _Marks(NamedTuple):
    name: str
    begin: Event
    end: Event


class Timings:
    """The result of `Timers.take`: seconds by part, some of them still between two events of a device."""

    def __init__(self, seconds: dict[str, float], marks: Sequence[_Marks] = ()) -> None:
        self._seconds = seconds
        self._marks = marks

    def read(self) -> Mapping[str, float]:
        """Return the seconds by part; a device that has not passed the last event yet is waited for."""
        for name, begin, end in self._marks:
            if not end.query():
                end.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
        self._marks = ()
        return self._seconds


class Timers:
    """A sum of seconds per part, until `take`."""

    def __init__(self, device: torch.device, *, level: int = 0, event: Callable[[], Event] | None = None) -> None:
        """event: makes the events of the device; by default CUDA's on CUDA, and there are none elsewhere."""
        self.level = level
        self._event = event or (partial(_cuda_event, enable_timing=True) if device.type == "cuda" else None)
        self._seconds: dict[str, float] = {}
        self._marks: list[_Marks] = []

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Count the time inside under `name`, one of `PARTS`, if that is measured at this level."""
        if PARTS[name] > self.level:
            return _NOT_MEASURED
        return self._on_host(name) if self._event is None or name in _ON_HOST else self._on_device(name, self._event)

    def take(self) -> Timings:
        """Return the seconds by part since the last call, and start over."""
        taken = Timings(self._seconds, self._marks)
        self._seconds, self._marks = {}, []
        return taken

    @contextmanager
    def _on_host(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    @contextmanager
    def _on_device(self, name: str, event: Callable[[], Event]) -> Iterator[None]:
        begin, end = event(), event()
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._marks.append(_Marks(name, begin, end))

    def _now(self) -> float:
        return time.perf_counter()
