"""Tests leases from an arena: whole slots, room for as many leases as slots, the pool beyond that, and the ledger."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megazero.memory.arena_scratch import ArenaScratch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.lease import Lease
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_interface import NullLedger

CPU = torch.device("cpu")


def scratch_of(num_slots: int, slot_bytes: int = 64) -> tuple[ArenaScratch, FusedBuffers]:
    pool = FusedBuffers(1024, CPU)
    return ArenaScratch(num_slots, slot_bytes, CPU, fallback=pool, ledger=NullLedger()), pool


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_lease_is_a_dense_tensor_in_the_arena(dtype: torch.dtype) -> None:
    scratch, pool = scratch_of(2)
    leases = [scratch.lease(7, dtype), scratch.lease(8, dtype)]
    for number, lease in enumerate(leases):
        assert (lease.tensor.dtype, lease.tensor.is_contiguous()) == (dtype, True)
        assert scratch.contains(lease.tensor)
        lease.tensor.fill_(number)
    assert [set(lease.tensor.tolist()) for lease in leases] == [{0.0}, {1.0}]
    assert pool.num_buffers == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 64), st.integers(0, 7)), max_size=60))
def test_as_many_leases_as_slots_always_fit(history: list[tuple[bool, int, int]]) -> None:
    """Leases of up to a slot never block each other, whatever their sizes and the order in which they are released."""
    scratch, pool = scratch_of(4)
    out: list[Lease] = []
    for takes, numel, which in history:
        if takes and len(out) < 4:
            out.append(scratch.lease(numel, torch.uint8))
            assert scratch.contains(out[-1].tensor)
        elif out:
            out.pop(which % len(out)).release()
    assert (pool.num_buffers, scratch.statistics.failed_requests) == (0, 0)


def test_the_pool_lends_what_finds_no_room() -> None:
    scratch, pool = scratch_of(2)
    first, second, third = (scratch.lease(64, torch.uint8) for _ in range(3))
    assert [scratch.contains(lease.tensor) for lease in (first, second, third)] == [True, True, False]
    assert (pool.num_buffers, scratch.statistics.failed_requests) == (1, 1)
    third.release()
    first.release()
    assert scratch.contains(scratch.lease(3, torch.float64).tensor)
    assert pool.lease(1, torch.uint8).tensor is not None and pool.num_buffers == 1, "it has its own back"


def test_a_larger_lease_takes_several_slots() -> None:
    scratch, _ = scratch_of(3)
    large = scratch.lease(65, torch.uint8)
    assert scratch.statistics.live_bytes == 128
    assert not scratch.contains(scratch.lease(65, torch.uint8).tensor)
    large.release()
    assert scratch.contains(scratch.lease(192, torch.uint8).tensor)


def test_the_ledger_knows_the_arena_from_the_beginning() -> None:
    with Ledger(CPU) as ledger:
        pool = FusedBuffers(128, CPU, ledger=ledger)
        scratch = ArenaScratch(2, 64, CPU, fallback=pool, ledger=ledger)
        assert ledger.live_bytes()["communication_buffers"] == 128
        leases = [scratch.lease(16, torch.float32) for _ in range(3)]
        assert ledger.live_bytes()["communication_buffers"] == 128 + 128
        assert sum(ledger.live_bytes().values()) == 256
        for lease in leases:
            lease.release()
