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
from megazero.parallel.topology import SHARDS
from megazero.units import format_bytes
from megazero.zero.engine import Engine
from megazero.zero.plan import NO_FILES, FileTraffic, HostTraffic, file_traffic, host_traffic

# Beyond this many times the computation, the price is a warning.
_DEAR = 3.0
_REPETITIONS = 3
_COPIED_BYTES = 32 << 20
_WRITTEN_BYTES = 64 << 20
_UPDATED_NUMEL = 1 << 20
_PRODUCT_SIZE = MappingProxyType({"cpu": 512, "cuda": 4096})


class OffloadPrice(NamedTuple):
    """The cost of offloading for one rank's step.

    traffic: bytes copied.  updated: elements that the host updates.  The seconds are those of copies, of the host's
    update, and of the model's computation, each by itself; None where a model's operations are not known.
    threads: those of the host's update.
    files: bytes written and read; file_seconds: None where there was no room to measure their rate.
    is_late: whether the update runs beside the next step's computation.
    """

    traffic: HostTraffic
    updated: int
    copy_seconds: float
    update_seconds: float
    compute_seconds: float | None
    threads: int
    files: FileTraffic = NO_FILES
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
        if any(self.files):
            written, read = map(format_bytes, self.files)
            seconds = "at a rate not measured (no room)"
            if self.file_seconds is not None:
                seconds = _at_rate(sum(self.files), self.file_seconds)
            files = f" {written} written to files and {read} read, {seconds};"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        line = (
            f"offloading, a step of this rank: {format_bytes(self.traffic.stored)} to host memory and"
            f" {format_bytes(self.traffic.loaded)} back, {_at_rate(sum(self.traffic), self.copy_seconds)};{files}"
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
    plan, mesh, shape = engine.plan, engine.mesh, engine.optimizer_shape
    numel, partitions = engine.layout.used_numel(trainable=True), mesh.topology.size(SHARDS)
    traffic = host_traffic(plan, numel, partitions, num_micro_batches)
    if not any(traffic):
        return []
    updated = round(numel // partitions * plan.share_away)
    price = estimate_price(traffic, updated=updated, flops=flops, dtype=plan.parameter.dtype, device=mesh.device)
    # A pass before the update takes about its time: both read and write what the memory holds of each element.
    price = price._replace(
        is_late=engine.settings.zero.delayed_parameter_update,
        update_seconds=price.update_seconds * (1 + shape.num_passes),
    )
    files = file_traffic(plan, numel, partitions, num_micro_batches, optimizer=shape)
    if any(files):
        sample = min(sum(files), _WRITTEN_BYTES)
        rate = engine.measure_files(sample)
        price = price._replace(files=files, file_seconds=None if rate is None else sum(files) / rate)
    lines = price.lines()
    folder = engine.settings.zero.nvme_path
    return lines if folder is None or engine.files_are_direct else [*lines, cache_notice(folder)]


def estimate_price(
    traffic: HostTraffic, *, updated: int, flops: float | None, dtype: torch.dtype, device: torch.device
) -> OffloadPrice:
    """Measure the rates of copies, of the host's update and of products, and return the price of a step.

    updated: elements that the host updates by AdamW.  flops: floating-point operations of the rank's step, made in
    products of `dtype`; None: not known.
    """
    total = sum(traffic)
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
