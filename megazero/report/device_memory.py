"""Reports a process's memory as its device counts it, beside the ledger, which counts the storages of tensors.

On a GPU more is in use than the ledger sees:

    allocator's peak      PyTorch's allocator: tensors, what a kernel's own code allocates for the time it runs, and
                          workspaces of matrix products
    reserved              what the allocator has taken from the device, given out or not
    beyond the allocator  what the device uses besides: communicators, loaded kernels, CUDA's context, and whatever
                          other processes of the same device hold

On a CPU the operating system's figure, the most that was resident, is all there is (0 where it has none).  Reading any
of them waits for nothing that the device computes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from megazero.operating_system import peak_resident_bytes
from megazero.units import format_bytes


class AllocatorFigures(NamedTuple):
    """Bytes of the allocator, with its peaks since they were reset, and all that the device has in use."""

    peak: int
    reserved_peak: int
    reserved: int
    device_used: int


class Allocator(Protocol):
    """The allocator of a device."""

    def figures(self) -> AllocatorFigures: ...

    def reset_peaks(self) -> None: ...


class CudaAllocator:
    """PyTorch's allocator on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def figures(self) -> AllocatorFigures:
        free, total = torch.cuda.mem_get_info(self._device)
        counts = torch.cuda.memory_stats(self._device)
        peak, reserved_peak, reserved = (
            counts.get(f"{name}.all.{which}", 0)
            for name, which in (("allocated_bytes", "peak"), ("reserved_bytes", "peak"), ("reserved_bytes", "current"))
        )
        return AllocatorFigures(peak, reserved_peak, reserved, total - free)

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class ProcessMemory(NamedTuple):
    """The memory of a process in a step.

    peak_bytes: the most that the GPU's allocator had given out, or that was resident on the CPU.
    device_bytes: {"reserved_peak" | "beyond_allocator": bytes} on a GPU, empty on a CPU.
    """

    peak_bytes: int
    device_bytes: Mapping[str, int]


_NOT_READ = ProcessMemory(0, {})


class MemoryReport:
    """The memory of this process, step by step.

    The first step makes buffers, moments and workspaces, so a GPU's peaks begin anew before it and after it: neither
    start-up nor the first step is part of a later step's peak.  A CPU's peak is that of the whole process.
    each_step: False if only the closing lines are used.  allocator: the device's, by default PyTorch's on CUDA and None
    elsewhere.
    """

    def __init__(self, device: torch.device, *, each_step: bool = True, allocator: Allocator | None = None) -> None:
        self._each_step = each_step
        self._allocator = allocator or (CudaAllocator(device) if device.type == "cuda" else None)
        self._first: ProcessMemory | None = None
        self._ledger_peak = 0

    def begin_step(self) -> None:
        """Leave start-up out of the first step's peak."""
        if self._allocator is not None and self._first is None:
            self._allocator.reset_peaks()

    def end_step(self, ledger: Mapping[str, object]) -> ProcessMemory:
        """Return the memory of the step that ends.  ledger: its record by `LedgerReport.end_step`."""
        if self._first is None:
            self._first = self.now()
            if self._allocator is not None:
                self._allocator.reset_peaks()
            return self._first
        if isinstance(peak := ledger.get("peak_bytes"), int):
            self._ledger_peak = max(self._ledger_peak, peak)
        return self.now() if self._each_step else _NOT_READ

    def closing_lines(self) -> list[str]:
        """Describe a GPU's memory since the first step, and the first step's; no line on a CPU, or without a step."""
        if self._allocator is None or self._first is None:
            return []
        return [closing_line(self.now(), self._first, self._ledger_peak)]

    def now(self) -> ProcessMemory:
        """Return the memory since the first step; a CPU's since the process began."""
        if self._allocator is None:
            return ProcessMemory(peak_resident_bytes(), {})
        return step_memory(self._allocator.figures())


def step_memory(figures: AllocatorFigures) -> ProcessMemory:
    """Return the figures of a GPU's allocator as those of a step."""
    beyond = max(figures.device_used - figures.reserved, 0)
    return ProcessMemory(figures.peak, {"reserved_peak": figures.reserved_peak, "beyond_allocator": beyond})


def closing_line(later: ProcessMemory, first: ProcessMemory, ledger_peak: int) -> str:
    """Return a line with all figures.  later: the memory since the first step.  ledger_peak: 0 without a ledger."""
    beside = f" (the ledger's, of tensors alone, {format_bytes(ledger_peak)})" if ledger_peak else ""
    return (
        f"device memory: allocator's peak {format_bytes(later.peak_bytes)}{beside},"
        f" in the first step {format_bytes(first.peak_bytes)};"
        f" at most {format_bytes(later.device_bytes['reserved_peak'])} reserved;"
        f" {format_bytes(later.device_bytes['beyond_allocator'])} beyond the allocator"
        " (communicators, kernels, CUDA's context, other processes)"
    )


def device_memory_scalars(ranks: Sequence[ProcessMemory]) -> dict[str, float]:
    """Return TensorBoard's scalars, each the most of any rank; none on CPUs."""
    on_gpus = [rank for rank in ranks if rank.device_bytes]
    if not on_gpus:
        return {}
    scalars: dict[str, float] = {"memory/allocator-peak": max(rank.peak_bytes for rank in on_gpus)}
    for tag, name in (("reserved-peak", "reserved_peak"), ("beyond-allocator", "beyond_allocator")):
        scalars[f"memory/{tag}"] = max(rank.device_bytes[name] for rank in on_gpus)
    return scalars
