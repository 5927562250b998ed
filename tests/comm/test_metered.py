"""Tests of the meter: counted bytes are those that a rank of a ring sends, and counting changes no result."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.processes import mesh_in_worker, run_ranks

from megazero.comm.interface import Collective
from megazero.comm.local import LocalCommunicator
from megazero.comm.metered import Count, Meter, MeteredCommunicator, sent_bytes

NUMEL = 12  # elements of one rank's slice


def ring_bytes(collective: str, nbytes: int, size: int) -> Fraction:
    """Return the bytes that a rank of a ring sends for a whole tensor of `nbytes`, counted hop by hop."""
    piece = Fraction(nbytes, size)
    hops = size - 1
    return {
        "all_gather": piece * hops,
        "reduce_scatter": piece * hops,
        "all_to_all": piece * hops,
        "all_reduce": piece * hops + piece * hops,
        "scalars": piece * hops + piece * hops,
        "broadcast": Fraction(nbytes if hops else 0),
        "send": Fraction(nbytes if hops else 0),
    }[collective]


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "scalars", "send"]),
    st.integers(0, 10**6),
    st.integers(1, 64),
)
def test_formulas(collective: Collective, piece: int, size: int) -> None:
    assert sent_bytes(collective, piece * size, size) == ring_bytes(collective, piece * size, size)


def test_paper_figures() -> None:
    """All-reduce sends 2 Psi, reduce-scatter and all-gather Psi each, times (Nd - 1) / Nd (ZeRO, section 7.1)."""
    psi, ranks = 1_000_000, 4
    assert sent_bytes("all_reduce", psi, ranks) == 1_500_000
    assert sent_bytes("reduce_scatter", psi, ranks) + sent_bytes("all_gather", psi, ranks) == 1_500_000


def test_figures_that_do_not_divide_are_rounded_down_per_half() -> None:
    assert sent_bytes("scalars", 8, 3) == 2 * 5
    assert sent_bytes("all_reduce", 8, 1024) == 2 * 7


def every_collective(
    rank: int, size: int, dtype: torch.dtype
) -> tuple[dict[str, dict[str, int]], list[int], list[Any]]:
    """Call each collective over a data-parallel axis, all-reduce twice; return bytes by axis, calls and results."""
    mesh = mesh_in_worker(rank, dp=size)
    axis = mesh.axis("dp")
    assert (axis.size, axis.rank) == (size, rank)
    whole, piece = torch.ones(size * NUMEL, dtype=dtype), torch.ones(NUMEL, dtype=dtype)
    gathered, reduced = torch.zeros_like(whole), torch.zeros_like(piece)
    axis.all_gather_into(gathered, piece).wait()
    axis.reduce_scatter_into(reduced, whole).wait()
    exchanged = torch.zeros_like(whole)
    axis.all_to_all_into(exchanged, whole).wait()
    for _ in range(2):
        axis.all_reduce(whole, "max").wait()
    total = torch.ones(2 * size, dtype=torch.float64)
    axis.all_reduce_scalars(total).wait()
    sent = torch.full((NUMEL,), rank + 1, dtype=dtype)
    axis.broadcast(sent, size - 1).wait()
    axis.barrier()
    names: list[Collective] = ["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "scalars", "broadcast"]
    calls = [mesh.meter.count("dp", name).calls for name in names]
    results = [tensor.unique().tolist() for tensor in (gathered, reduced, exchanged, whole, total, sent)]
    return mesh.meter.bytes_by_axis(), calls, results


@pytest.mark.gloo
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_real_ranks_count(size: int, dtype: torch.dtype) -> None:
    whole = size * NUMEL * dtype.itemsize
    expected = {
        "all_gather": ring_bytes("all_gather", whole, size),
        "reduce_scatter": ring_bytes("reduce_scatter", whole, size),
        "all_to_all": ring_bytes("all_to_all", whole, size),
        "all_reduce": 2 * ring_bytes("all_reduce", whole, size),
        "scalars": ring_bytes("scalars", 2 * size * 8, size),
        "broadcast": ring_bytes("broadcast", NUMEL * dtype.itemsize, size),
    }
    for nbytes, calls, results in run_ranks(size, every_collective, size, dtype):
        assert nbytes == {"dp": expected}
        assert calls == [1, 1, 1, 2, 1, 1]
        assert results == [[1.0], [size], [1.0], [1.0], [size], [size]]


def two_axes(rank: int) -> dict[str, dict[str, int]]:
    mesh = mesh_in_worker(rank, tp=2, dp=2)
    mesh.axis("tp").all_reduce(torch.zeros(4, dtype=torch.float32)).wait()
    mesh.axis("dp").all_reduce(torch.zeros(8, dtype=torch.float32)).wait()
    mesh.world.all_reduce_scalars(torch.zeros(4, dtype=torch.float32)).wait()
    mesh.axis("pp").all_reduce(torch.zeros(4, dtype=torch.float32)).wait()
    return mesh.meter.bytes_by_axis()


@pytest.mark.gloo
def test_axes_are_counted_apart() -> None:
    expected = {
        "tp": {"all_reduce": 16},
        "dp": {"all_reduce": 32},
        "world": {"scalars": 24},
        "pp": {"all_reduce": 0},
    }
    assert run_ranks(4, two_axes) == [expected] * 4


def test_the_meter_adds_up_until_it_is_reset() -> None:
    meter = Meter()
    assert meter.count("dp", "broadcast") == Count(0, 0)
    assert meter.bytes_by_axis() == {}, "asking is not counting"
    meter.record("dp", "broadcast", 5)
    meter.record("dp", "broadcast", 7)
    meter.record("tp", "scalars", 1)
    assert meter.count("dp", "broadcast") == Count(2, 12)
    assert meter.bytes_by_axis() == {"dp": {"broadcast": 12}, "tp": {"scalars": 1}}
    meter.reset()
    assert meter.bytes_by_axis() == {} and meter.count("dp", "broadcast") == Count()


def test_a_table_taken_earlier_stays_as_it_was() -> None:
    meter = Meter()
    meter.record("dp", "broadcast", 5)
    taken = meter.bytes_by_axis()
    meter.record("dp", "broadcast", 5)
    meter.reset()
    assert taken == {"dp": {"broadcast": 5}}


def test_one_rank_sends_nothing() -> None:
    meter = Meter()
    alone = MeteredCommunicator(LocalCommunicator(), "dp", meter)
    tensor = torch.arange(3.0)
    alone.all_reduce(tensor).wait()
    alone.all_gather_into(torch.empty(3), tensor).wait()
    alone.broadcast(tensor, 0).wait()
    assert meter.bytes_by_axis() == {"dp": {"all_gather": 0, "all_reduce": 0, "broadcast": 0}}
    assert tensor.tolist() == [0, 1, 2]
