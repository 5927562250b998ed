"""Times single calls on a device, with caches swept before each, so that operands come from memory.

On CUDA the sweep keeps the device busy while the host runs ahead, so that events around a call have its kernels between
them and not the host's time to launch them.
"""

import time
from collections.abc import Callable

import torch

# More than any cache holds; on a GPU so much that writing it takes longer than most calls take to launch.
_SWEEP_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


class Stopwatch:
    """A stopwatch for calls on `device`.

    budget: about how many seconds one `seconds` may take.  at_least, at_most: bounds for the number of its timed calls.
    """

    def __init__(self, device: torch.device, *, budget: float = 0.5, at_least: int = 3, at_most: int = 50) -> None:
        self.device = device
        self._budget, self._at_least, self._at_most = budget, at_least, at_most
        self._sweep = torch.empty(_SWEEP_BYTES[device.type], dtype=torch.uint8, device=device)

    def seconds(self, call: Callable[[], object]) -> list[float]:
        """Return the seconds of every timed call, in order; two more calls before them don't count."""
        call()
        self._wait()
        start = time.perf_counter()
        self._sweep.zero_()
        call()
        self._wait()
        number = int(self._budget / (time.perf_counter() - start))
        number = min(max(number, self._at_least), self._at_most)
        return self._by_events(call, number) if self.device.type == "cuda" else self._by_clock(call, number)

    def best(self, call: Callable[[], object]) -> float:
        """Return the seconds of the fastest call."""
        return min(self.seconds(call))

    def _by_clock(self, call: Callable[[], object], number: int) -> list[float]:
        taken = []
        for _ in range(number):
            self._sweep.zero_()
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return taken

    def _by_events(self, call: Callable[[], object], number: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(number)]
        for start, end in events:
            self._sweep.zero_()
            start.record()
            call()
            end.record()
        self._wait()
        return [start.elapsed_time(end) / 1000 for start, end in events]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
