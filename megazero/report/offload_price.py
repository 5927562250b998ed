"""The price of states that live in host memory, estimated before the first step: which of three binds a step.

Copies run beside the computation, and the host updates after it: a step takes at least the longer of the two.  The
rates of copies, of the host's update and of matrix products are measured on this machine, in some milliseconds each.
"""

import statistics
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.memory.host import host_bandwidth
from megazero.units import format_bytes
from megazero.zero.plan import HostTraffic

# Beyond this many times the step without offloading, the price is a warning.
_DEAR = 3.0
_REPETITIONS = 3
_COPIED_BYTES = 32 << 20
_UPDATED_NUMEL = 1 << 20
_PRODUCT_SIZE = MappingProxyType({"cpu": 512, "cuda": 4096})


class OffloadPrice(NamedTuple):
    """What offloading costs a step of one rank.

    traffic: bytes copied.  updated: elements whose home is host memory.  The seconds are those of copies, of the host's
    update, and of the model's computation, each by itself.
    """

    traffic: HostTraffic
    updated: int
    copy_seconds: float
    update_seconds: float
    compute_seconds: float

    @property
    def step_seconds(self) -> float:
        """The least time of a step."""
        return max(self.copy_seconds, self.compute_seconds + self.update_seconds)

    @property
    def binding(self) -> str:
        """The name of what the step waits for most."""
        if self.copy_seconds > self.compute_seconds + self.update_seconds:
            return "the link to host memory"
        return "the host's update" if self.update_seconds > self.compute_seconds else "the computation"

    @property
    def is_dear(self) -> bool:
        """True if a step takes more than three times as long as its computation."""
        return self.step_seconds > _DEAR * self.compute_seconds

    def lines(self) -> list[str]:
        """Return what a run prints before its first step."""
        line = (
            f"offloading, a step of this rank: {format_bytes(self.traffic.stored)} to host memory and"
            f" {format_bytes(self.traffic.loaded)} back, {_ms(self.copy_seconds)}; {self.updated:,} elements updated by"
            f" the host, {_ms(self.update_seconds)}; computation, {_ms(self.compute_seconds)} | at least"
            f" {_ms(self.step_seconds)} a step: {self.binding} binds"
        )
        if not self.is_dear:
            return [line]
        times = self.step_seconds / max(self.compute_seconds, 1e-9)
        warning = f"warning: by offloading, a step takes about {times:.1f} times as long, because of {self.binding}"
        return [line, warning]


def estimate_price(
    traffic: HostTraffic, *, updated: int, flops: float, dtype: torch.dtype, device: torch.device
) -> OffloadPrice:
    """Measure the three rates, and return the price of a step.

    updated: elements that the host updates by AdamW.  flops: floating-point operations of the rank's step, made in
    products of `dtype`.
    """
    total = sum(traffic)
    copied = min(max(total // 2, 1), _COPIED_BYTES)
    return OffloadPrice(
        traffic,
        updated,
        copy_seconds=total / host_bandwidth(device, copied),
        update_seconds=updated * _update_seconds(min(max(updated, 1), _UPDATED_NUMEL)),
        compute_seconds=flops * _flop_seconds(dtype, device),
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _update_seconds(numel: int) -> float:
    """Return the host's seconds to update an element by AdamW."""
    master, gradient, first, second = (torch.zeros(numel, device="cpu") for _ in range(4))
    step = torch.ones((), device="cpu")

    def update() -> None:
        torch._fused_adamw_(
            [master],
            [gradient],
            [first],
            [second],
            [],
            [step],
            lr=0.0,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )

    return _seconds(update, torch.device("cpu")) / numel


def _flop_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Return the device's seconds for a floating-point operation of a matrix product."""
    size = _PRODUCT_SIZE[device.type]
    factor = torch.ones(size, size, dtype=dtype, device=device)
    products: list[Tensor] = []
    seconds = _seconds(lambda: products.append(factor @ factor), device)
    return seconds / (2 * size**3)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return the median time of the work, after one repetition to warm up."""
    times = []
    for _ in range(1 + _REPETITIONS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
