"""Tests the pool of constant-size buffers: how many it makes, which it lends again, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.each import each

from megazero.memory.fused_buffers import BufferLease, FusedBuffers

CPU = torch.device("cpu")


@each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_a_lease_is_a_dense_tensor_of_the_size_asked_for(dtype: torch.dtype) -> None:
    pool = FusedBuffers(64, CPU)
    lease = pool.lease(7, dtype)
    assert (lease.tensor.shape, lease.tensor.dtype, lease.tensor.device) == ((7,), dtype, CPU)
    assert lease.tensor.is_contiguous()
    lease.tensor.copy_(torch.arange(7))
    assert lease.tensor.tolist() == list(range(7))


def test_leases_that_are_out_at_once_share_nothing() -> None:
    pool = FusedBuffers(32, CPU)
    leases = [pool.lease(8, torch.float32) for _ in range(3)]
    for number, lease in enumerate(leases):
        lease.tensor.fill_(number)
    assert [set(lease.tensor.tolist()) for lease in leases] == [{0.0}, {1.0}, {2.0}]


def test_a_returned_buffer_is_used_again_whatever_the_dtype() -> None:
    pool = FusedBuffers(32, CPU)
    first = pool.lease(8, torch.float32)
    address = first.tensor.data_ptr()
    first.release()
    second = pool.lease(4, torch.float64)
    assert second.tensor.data_ptr() == address
    assert (pool.num_buffers, pool.total_bytes) == (1, 32)


def test_the_pool_is_as_large_as_the_most_that_were_out_at_once() -> None:
    pool = FusedBuffers(16, CPU)
    assert (pool.num_buffers, pool.total_bytes) == (0, 0)
    for count in (2, 3, 1, 3):
        leases = [pool.lease(4, torch.float32) for _ in range(count)]
        for lease in leases:
            lease.release()
    assert (pool.num_buffers, pool.total_bytes) == (3, 48)


@given(st.lists(st.booleans(), max_size=60))
def test_any_history_of_leases(takes: list[bool]) -> None:
    """True leases, False returns the oldest lease; the pool has as many buffers as leases at the peak, and no more."""
    pool = FusedBuffers(8, CPU)
    out: list[BufferLease] = []
    most = 0
    for take in takes:
        if take:
            out.append(pool.lease(8, torch.uint8))
        elif out:
            out.pop(0).release()
        most = max(most, len(out))
        assert pool.num_buffers == most
        assert len({lease.tensor.data_ptr() for lease in out}) == len(out)


def test_with_gives_the_buffer_back_even_after_an_error() -> None:
    pool = FusedBuffers(16, CPU)
    with pytest.raises(ZeroDivisionError), pool.lease(2, torch.float32) as tensor:
        assert tensor.shape == (2,)
        raise ZeroDivisionError
    pool.resize(8)  # possible only while no buffer is leased


def test_resize_makes_new_buffers_and_waits_for_none_to_be_out() -> None:
    pool = FusedBuffers(0, CPU)
    pool.resize(16)
    lease = pool.lease(16, torch.uint8)
    with pytest.raises(AssertionError, match="only while none is leased"):
        pool.resize(32)
    lease.release()
    pool.resize(32)
    assert (pool.num_buffers, pool.buffer_bytes) == (0, 32)
    assert pool.lease(32, torch.uint8).tensor.numel() == 32


def test_more_than_a_buffer_holds_is_refused() -> None:
    pool = FusedBuffers(16, CPU)
    pool.lease(8, torch.float16).release()
    with pytest.raises(AssertionError, match="18 bytes leased from buffers of 16"):
        pool.lease(9, torch.float16)
    assert pool.num_buffers == 1


def test_a_buffer_is_released_once() -> None:
    lease = FusedBuffers(16, CPU).lease(1, torch.uint8)
    lease.release()
    with pytest.raises(AssertionError, match="released once"):
        lease.release()


def test_an_empty_pool_lends_nothing_but_empty_tensors() -> None:
    assert FusedBuffers(0, CPU).lease(0, torch.float64).tensor.shape == (0,)
