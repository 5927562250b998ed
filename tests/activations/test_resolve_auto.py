"""Tests of settling "auto" switches by measurements on real processes: all ranks decide the same."""

import math

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks

from megazero.activations.decision import CheckpointSizes, Decision, Switch
from megazero.activations.resolve_auto import measure, resolve_switches
from megazero.comm.mesh import Mesh
from megazero.comm.startup import make_mesh
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology

CPU = torch.device("cpu")
SMALL = CheckpointSizes(2, 2, 16, 32, 4)
HUGE = 1 << 50  # no machine sends a pebibyte in the time that copies of SMALL take


def alone() -> Mesh:
    return make_mesh(Topology(tp=1, dp=1), 0, CPU, FusedBuffers(0, CPU))


def test_one_process_needs_neither() -> None:
    decision = resolve_switches(alone(), SMALL, num_micro_batches=4, data_parallel_bytes=0)
    assert (decision.partition, decision.in_cpu) == (False, False)
    assert len(decision.reasons) == 2
    speeds = measure(alone(), checkpoint_bytes=1 << 20, data_parallel_bytes=0)
    assert (speeds.tensor_parallel, speeds.data_parallel) == (math.inf, math.inf) and 0 < speeds.host < 1e13


def test_what_was_said_is_not_measured() -> None:
    mesh = alone()
    mesh.meter.record("dp", "all_gather", 5)
    decision = resolve_switches(
        mesh, SMALL, num_micro_batches=1, data_parallel_bytes=HUGE, partition=True, in_cpu=False
    )
    assert decision == Decision(True, False, ())
    assert mesh.meter.bytes_by_axis() == {"dp": {"all_gather": 5}}  # a measurement would have reset the meter


def settled(
    rank: int, tp: int, dp: int, data_parallel_bytes: int, asked: tuple[Switch, Switch]
) -> tuple[Decision, dict[str, dict[str, int]]]:
    mesh = mesh_in_worker(rank, tp=tp, dp=dp)
    decision = resolve_switches(
        mesh,
        SMALL,
        num_micro_batches=3,
        data_parallel_bytes=data_parallel_bytes,
        partition=asked[0],
        in_cpu=asked[1],
    )
    return decision, mesh.meter.bytes_by_axis()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("tp", "dp", "data_parallel_bytes", "asked", "expected"),
    [
        (2, 2, HUGE, ("auto", "auto"), (True, True)),
        (4, 1, 0, ("auto", "auto"), (False, False)),
        (1, 4, HUGE, ("auto", "auto"), (False, True)),
        (2, 2, HUGE, ("auto", False), (True, False)),
        (2, 2, 0, (True, "auto"), (True, False)),
    ],
)
def test_ranks_settle_the_same(
    tp: int, dp: int, data_parallel_bytes: int, asked: tuple[Switch, Switch], expected: tuple[bool, bool]
) -> None:
    first, *others = run_ranks(4, settled, tp, dp, data_parallel_bytes, asked)
    assert all(other == first for other in others)  # their reasons, which hold measured figures, are equal too
    decision, counted = first
    assert (decision.partition, decision.in_cpu) == expected
    assert len(decision.reasons) == asked.count("auto")
    assert counted == {}


@pytest.mark.gloo
def test_ranks_settle_the_same_where_it_is_close() -> None:
    """Ranks agree even when costs and gains are of the same order, whichever decision that gives."""
    for data_parallel_bytes in (1 << 14, 1 << 16, 1 << 18):
        first, *others = run_ranks(4, settled, 2, 2, data_parallel_bytes, ("auto", "auto"))
        assert all(other == first for other in others)
