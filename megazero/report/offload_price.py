"""The price of states that live in host memory or in files, estimated before the first step: what binds a step.

Copies and files run beside the computation, and the host updates after it, or late, beside the next one: a step takes
at least the longest of the three.  The rates of copies, of files, of the host's update and of matrix products are
measured on this machine, in some milliseconds each.
"""

import statistics
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.memory.file_states import cache_notice
from megazero.memory.host import host_bandwidth
from megazero.units import format_bytes
from megazero.zero.engine import Engine
from megazero.zero.home_traffic import HomeTraffic

# Beyond this many times the computation, the price is a warning.
_DEAR = 3.0
_REPETITIONS = 3
_COPIED_BYTES = 32 << 20
_WRITTEN_BYTES = 64 << 20
_UPDATED_NUMEL = 1 << 20
_PRODUCT_SIZE = MappingProxyType({"cpu": 512, "cuda": 4096})


class OffloadPrice(NamedTuple):
    """The cost of offloading for one rank's step.

    traffic: bytes copied, and those written to files and read.  updated: elements that the host updates.  The seconds
    are those of copies, of the host's update, and of the model's computation, each by itself; None where a model's
    operations are not known.
    threads: those of the host's update.
    file_seconds: None where there was no room to measure the rate of files.
    is_late: whether the update runs beside the next step's computation.
    """

    traffic: HomeTraffic
    updated: int
    copy_seconds: float
    update_seconds: float
    compute_seconds: float | None
    threads: int
    file_seconds: float | None = 0.0
    is_late: bool = False

    @property
    def step_seconds(self) -> float:
        """The least time of a step."""
        return max(self.copy_seconds, self.file_seconds or 0.0, self._processor_seconds)

    @property
    def _processor_seconds(self) -> float:
        """The time of computation and update together."""
        both = self.compute_seconds or 0.0, self.update_seconds
        return max(both) if self.is_late else sum(both)

    @property
    def _dear_below(self) -> float:
        """The time of a computation than which a step takes over three times as long for all shorter ones."""
        beside = max(self.copy_seconds, self.file_seconds or 0.0) / _DEAR
        return max(beside, self.update_seconds / (_DEAR if self.is_late else _DEAR - 1.0))

    @property
    def binding(self) -> str:
        """The name of what the step waits for most."""
        compute = self.compute_seconds or 0.0
        if (self.file_seconds or 0.0) > max(self.copy_seconds, self._processor_seconds):
            return "the disk"
        if self.copy_seconds > self._processor_seconds:
            return "the link to host memory"
        return "the host's update" if self.update_seconds > compute else "the computation"

    def lines(self) -> list[str]:
        """Return what is printed before the first step: the cost, and a warning beyond three times the computation.

        Where the computation is not known, the cost ends with the time of one that is so short.
        """
        compute = self.compute_seconds
        beside = "the computation beside" if compute is None else f"computation, {_ms(compute)}"
        files = ""
        if self.traffic.in_files:
            written, read = format_bytes(self.traffic.written), format_bytes(self.traffic.read)
            seconds = "at a rate not measured (no room)"
            if self.file_seconds is not None:
                seconds = _at_rate(self.traffic.in_files, self.file_seconds)
            files = f" {written} written to files and {read} read, {seconds};"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        line = (
            f"offloading, a step of this rank: {format_bytes(self.traffic.stored)} to host memory and"
            f" {format_bytes(self.traffic.loaded)} back, {_at_rate(self.traffic.copied, self.copy_seconds)};{files}"
            f" {self.updated:,} elements updated by the host on {threads}, {_ms(self.update_seconds)};"
            f" {beside} | at least {_ms(self.step_seconds)} a step: {self.binding} binds"
        )
        if compute is None:
            return [f"{line}; a computation below {_ms(self._dear_below)} a step would be slowed over three times"]
        if self.step_seconds <= _DEAR * compute:
            return [line]
        times = self.step_seconds / max(compute, 1e-9)
        warning = f"warning: by offloading, a step takes about {times:.1f} times as long, because of {self.binding}"
        return [line, warning]


def offload_lines(engine: Engine, num_micro_batches: int, *, flops: float | None = None) -> list[str]:
    """Return lines on the price of what lives in host memory or in files, and on files in the system's cache.

    There are none where everything lives on the device.

    num_micro_batches: of a step.  flops: the floating-point operations of this rank's step; None: not known.
    """
    traffic, folder = engine.home_traffic(num_micro_batches), engine.settings.zero.nvme_path
    lines = []
    if traffic.copied:
        lines = _price(engine, traffic, flops).lines()
    return lines if folder is None or engine.files_are_direct else [*lines, cache_notice(folder)]


def _price(engine: Engine, traffic: HomeTraffic, flops: float | None) -> OffloadPrice:
    """Measure the rates that the price of an engine's step needs, and return the price."""
    dtype, device = engine.plan.parameter.dtype, engine.mesh.device
    price = estimate_price(traffic, updated=engine.num_updated_by_host, flops=flops, dtype=dtype, device=device)
    # A pass before the update takes about its time: both read and write what the memory holds of each element.
    price = price._replace(
        is_late=engine.settings.zero.delayed_parameter_update,
        update_seconds=price.update_seconds * (1 + engine.optimizer_shape.num_passes),
    )
    if traffic.in_files:
        rate = engine.measure_files(min(traffic.in_files, _WRITTEN_BYTES))
        price = price._replace(file_seconds=None if rate is None else traffic.in_files / rate)
    return price


def estimate_price(
    traffic: HomeTraffic, *, updated: int, flops: float | None, dtype: torch.dtype, device: torch.device
) -> OffloadPrice:
    """Measure the rates of copies, of the host's update and of products, and return the price of a step.

    updated: elements that the host updates by AdamW.  flops: floating-point operations of the rank's step, made in
    products of `dtype`; None: not known.
    """
    total = traffic.copied
    copied = min(max(total // 2, 1), _COPIED_BYTES)
    return OffloadPrice(
        traffic,
        updated,
        copy_seconds=total / host_bandwidth(device, copied),
        update_seconds=updated * _update_seconds(min(max(updated, 1), _UPDATED_NUMEL)),
        compute_seconds=None if flops is None else flops * _flop_seconds(dtype, device),
        threads=torch.get_num_threads(),
    )


def _at_rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.3g} GB/s, {_ms(seconds)}"


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
