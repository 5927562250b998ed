"""Tests of a process's memory as its device counts it: what each figure is, and at which step a peak begins anew."""

import torch

from megazero.report.device_memory import (
    AllocatorFigures,
    MemoryReport,
    ProcessMemory,
    closing_line,
    device_memory_scalars,
    step_memory,
)

CPU, MIB = torch.device("cpu"), 1 << 20


class Allocator:
    """An allocator that a test fills: `live` bytes given out of `reserved` ones, on a device that uses 300 MiB more."""

    def __init__(self) -> None:
        self.live = self.peak = self.reserved = self.reserved_peak = 0
        self.readings = 0

    def allocate(self, most: int, then: int) -> None:
        """Give out `most` bytes, and free all but `then`; what is reserved stays."""
        self.peak, self.live = max(self.peak, most), then
        self.reserved = self.reserved_peak = max(self.reserved, most)

    def figures(self) -> AllocatorFigures:
        self.readings += 1
        return AllocatorFigures(self.peak, self.reserved_peak, self.reserved, self.reserved + 300 * MIB)

    def reset_peaks(self) -> None:
        self.peak, self.reserved_peak = self.live, self.reserved


def steps(report: MemoryReport, allocator: Allocator, *peaks: int) -> list[int]:
    found = []
    for peak in peaks:
        report.begin_step()
        allocator.allocate(peak, 10 * MIB)
        found.append(report.end_step({"peak_bytes": peak - MIB}).peak_bytes)
    return found


def test_start_up_and_the_first_step_are_no_part_of_later_peaks() -> None:
    allocator = Allocator()
    allocator.allocate(900 * MIB, 10 * MIB)
    report = MemoryReport(CPU, allocator=allocator)
    assert steps(report, allocator, 500 * MIB, 100 * MIB, 200 * MIB, 150 * MIB) == [
        500 * MIB,
        100 * MIB,
        200 * MIB,
        200 * MIB,
    ]
    (line,) = report.closing_lines()
    assert line == (
        "device memory: allocator's peak 200.0 MiB (the ledger's, of tensors alone, 199.0 MiB), in the first step"
        " 500.0 MiB; at most 900.0 MiB reserved; 300.0 MiB beyond the allocator (communicators, kernels, CUDA's"
        " context, other processes)"
    )


def test_steps_that_nobody_reads_are_not_measured() -> None:
    allocator = Allocator()
    report = MemoryReport(CPU, each_step=False, allocator=allocator)
    steps(report, allocator, 500 * MIB, 100 * MIB, 200 * MIB)
    assert allocator.readings == 1
    assert "allocator's peak 200.0 MiB" in report.closing_lines()[0] and "500.0 MiB" in report.closing_lines()[0]


def test_what_the_allocator_cannot_see_is_never_negative() -> None:
    """Another process may end between the two readings."""
    assert step_memory(AllocatorFigures(5, 9, 8, 20)) == ProcessMemory(5, {"reserved_peak": 9, "beyond_allocator": 12})
    assert step_memory(AllocatorFigures(5, 9, 8, 6)).device_bytes["beyond_allocator"] == 0


def test_without_a_ledger_there_is_none_to_compare_with() -> None:
    assert "ledger" not in closing_line(
        ProcessMemory(1, {"reserved_peak": 1, "beyond_allocator": 1}), ProcessMemory(2, {}), 0
    )


def test_a_cpu_has_the_process_alone() -> None:
    report = MemoryReport(CPU)
    report.begin_step()
    found = report.end_step({})
    assert found.peak_bytes > 10 * MIB and not found.device_bytes and not report.closing_lines()
    assert device_memory_scalars([found]) == {}


def test_scalars_are_those_of_the_fullest_rank() -> None:
    ranks = [
        ProcessMemory(5, {"reserved_peak": 9, "beyond_allocator": 2}),
        ProcessMemory(6, {"reserved_peak": 8, "beyond_allocator": 3}),
    ]
    assert device_memory_scalars(ranks) == {
        "memory/allocator-peak": 6,
        "memory/reserved-peak": 9,
        "memory/beyond-allocator": 3,
    }
