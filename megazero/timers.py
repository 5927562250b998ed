"""Timers: host seconds spent in the parts of a step, by name."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Timers:
    """A sum of seconds per name, until `take`.

    CUDA kernels run asynchronously; only when `waits` is set are they waited for at both ends of a part, which makes
    the figures exact and the step slower.
    """

    def __init__(self, device: torch.device, *, waits: bool) -> None:
        self._device = device
        self._waits = waits and device.type == "cuda"
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time inside under `name`."""
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def take(self) -> dict[str, float]:
        """Return the seconds by name since the last call, and start over."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _now(self) -> float:
        if self._waits:
            torch.cuda.current_stream(self._device).synchronize()  # waits for no receive that is posted ahead
        return time.perf_counter()
