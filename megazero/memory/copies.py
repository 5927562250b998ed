"""Copies between the device and host memory, which run beside the computation.

On CUDA the copies of one `CopyStream` run on a stream of their own, one after the other.  A copy begins after the work
that is queued before it; work that needs its result waits for the *arrival*, in one of three ways: the device's later
work waits (`wait`), only the work queued in a block waits (`ahead`), or the host waits (`finish`).  On a CPU a copy has
been made when the call returns.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Arrival(Protocol):
    """The end of a copy that may still be running."""

    def wait(self) -> None:
        """Make the device's work that is queued from here on run after the copy, and after what was queued `ahead`."""

    def ahead(self) -> AbstractContextManager[object]:
        """Make the work that is queued inside run after the copy, but not the device's work that is queued later."""

    def finish(self) -> None:
        """Wait on the host until the copy has been made."""


class CopyStream(Protocol):
    """A stream on which copies run one after the other."""

    def copy(self, target: Tensor, source: Tensor) -> Arrival:
        """Begin to copy between the device and the host, after all work queued before, beside the work that follows.

        Both tensors are retained by the caller, and not written to, until the arrival.
        """


class _Arrived:
    """The arrival of a copy that has been made."""

    def wait(self) -> None:
        return None

    def ahead(self) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self) -> None:
        return None


ARRIVED: Arrival = _Arrived()


class _AtOnce:
    """The stand-in for a stream on a CPU."""

    def copy(self, target: Tensor, source: Tensor) -> Arrival:
        target.copy_(source)
        return ARRIVED


class _CudaStream:
    """A stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
        self._stream = make_stream(device)
        self._ahead = make_stream(device)  # else what is queued ahead would run after all copies queued until then

    def copy(self, target: Tensor, source: Tensor) -> Arrival:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return _CudaArrival(self._stream.record_event(), self._ahead, self._device)


class _CudaArrival:
    def __init__(self, event: torch.cuda.Event, ahead: torch.cuda.Stream, device: torch.device) -> None:
        self._event = self._last = event
        self._ahead = ahead
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._last)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        # Memory that has been freed for the work inside may still be in use by what the device has been given so far.
        self._ahead.wait_stream(torch.cuda.current_stream(self._device))
        self._ahead.wait_event(self._event)
        with torch.cuda.stream(self._ahead):
            yield
        self._last = self._ahead.record_event()

    def finish(self) -> None:
        self._event.synchronize()


def copy_stream(device: torch.device) -> CopyStream:
    """Return a new stream for copies between the host and `device`."""
    return _CudaStream(device) if device.type == "cuda" else _AtOnce()
