"""Tests the model of CUDA's caching allocator on sequences whose segments PyTorch's notes on memory describe."""

import pytest
from support.each import each

from megazero.errors import MemoryLimitError
from megazero.planner.dry.allocator import CachingAllocator, ExactAllocator

MIB = 1 << 20


@each(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 11 * MIB + 1 + 511, 12 * MIB),
        (33 * MIB, 33 * MIB, 34 * MIB),
    ],
)
def test_a_tensor_and_its_segment(nbytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.changed(1, nbytes)
    rest = allocator.reserved - reserved
    assert (rest, allocator.needed) == (0, reserved)
    assert allocator.allocated == allocated or allocator.allocated == reserved  # a rest of 1 MiB or less stays with it
    allocator.changed(1, 0)
    assert (allocator.allocated, allocator.needed, allocator.reserved) == (0, 0, reserved)


def test_small_tensors_share_a_segment_and_large_ones_another() -> None:
    allocator = CachingAllocator()
    for key in range(4):
        allocator.changed(key, MIB // 2)
    assert allocator.reserved == 2 * MIB
    allocator.changed(4, 512)
    assert allocator.reserved == 4 * MIB
    for key in range(5, 9):
        allocator.changed(key, 5 * MIB)
    assert allocator.reserved == 24 * MIB


@each("order", [(0, 1), (1, 0)])
def test_freed_neighbours_are_joined_and_the_smallest_that_fits_is_taken(order: tuple[int, int]) -> None:
    allocator = CachingAllocator()
    for key, size in enumerate((4, 4, 4, 8)):
        allocator.changed(key, size * MIB)
    assert allocator.reserved == 20 * MIB
    for key in order:
        allocator.changed(key, 0)
    allocator.changed(4, 8 * MIB)
    assert allocator.reserved == 20 * MIB, "two freed blocks of 4 MiB are one of 8"
    allocator.changed(2, 0)
    allocator.changed(5, 6 * MIB)
    assert allocator.reserved == 40 * MIB, "4 MiB are free, in one piece"


def test_holes_cost_segments_that_cannot_be_returned() -> None:
    """Every other tensor is freed: half of every segment is free, and a larger tensor needs memory of its own."""
    allocator = CachingAllocator()
    for key in range(8):
        allocator.changed(key, 5 * MIB)
    for key in range(0, 8, 2):
        allocator.changed(key, 0)
    assert (allocator.allocated, allocator.needed, allocator.reserved) == (20 * MIB, 40 * MIB, 40 * MIB)
    allocator.reset_peaks()
    allocator.changed(9, 20 * MIB)
    assert (allocator.needed_peak, allocator.reserved_peak) == (60 * MIB, 60 * MIB)
    for key in range(1, 8, 2):
        allocator.changed(key, 0)
    allocator.reset_peaks()
    assert (allocator.needed_peak, allocator.reserved_peak) == (20 * MIB, 60 * MIB)


def test_a_resized_storage_is_given_out_anew() -> None:
    for allocator in (CachingAllocator(), ExactAllocator()):
        allocator.changed(1, 512)
        allocator.changed(1, 1024)
        assert allocator.allocated == 1024
        allocator.changed(1, 0)
        assert allocator.allocated == 0


def test_a_full_device_gets_unused_segments_back_and_ends_a_run_for_fragments() -> None:
    allocator = CachingAllocator(limit=60 * MIB)
    allocator.changed(0, 30 * MIB)
    allocator.changed(0, 0)
    for key in range(1, 5):
        allocator.changed(key, 5 * MIB)  # of the 30 MiB that were free
    allocator.changed(5, 20 * MIB)
    assert allocator.reserved == 50 * MIB
    for key in (5, 1, 3):
        allocator.changed(key, 0)
    allocator.changed(6, 24 * MIB)
    assert allocator.reserved == 54 * MIB, "the unused 20 MiB were returned"
    with pytest.raises(MemoryLimitError, match="20971520 are free in pieces"):
        allocator.changed(7, 11 * MIB)
