"""Tests of measured bandwidth: all ranks get the slowest rank's figure, and the traffic is not in the meter."""

import math
import time

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks

from megazero.comm.bandwidth import axis_bandwidth, minimum_over_ranks
from megazero.comm.mesh import Mesh
from megazero.comm.startup import make_mesh
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology

CPU = torch.device("cpu")


def alone() -> Mesh:
    return make_mesh(Topology(tp=1, dp=1), 0, CPU, FusedBuffers(0, CPU))


def test_alone_there_is_nothing_to_send() -> None:
    assert axis_bandwidth(alone(), "tp", 1000) == math.inf
    assert minimum_over_ranks(alone(), 2.5) == 2.5


def measured(rank: int, nbytes: int) -> tuple[float, float, float, dict[str, dict[str, int]]]:
    mesh = mesh_in_worker(rank, tp=2, dp=2)
    figures = axis_bandwidth(mesh, "tp", nbytes), axis_bandwidth(mesh, "dp", nbytes)
    return (*figures, minimum_over_ranks(mesh, 7.0 + (rank - 2) ** 2), mesh.meter.bytes_by_axis())


@pytest.mark.gloo
@pytest.mark.parametrize("nbytes", [0, 1001, 1 << 20])
def test_all_ranks_have_the_same_figures(nbytes: int) -> None:
    first, *others = run_ranks(4, measured, nbytes)
    assert all(other == first for other in others)
    tp, dp, least, counted = first
    assert 0 < tp < 1e12 and 0 < dp < 1e12
    assert (least, counted) == (7.0, {})


class SlowAxis:
    """A communicator whose gathers take `seconds` longer."""

    def __init__(self, mesh: Mesh, seconds: float) -> None:
        self._inner = mesh.axis("dp")
        self._seconds = seconds
        self.size, self.rank = self._inner.size, self._inner.rank

    def all_gather_into(self, output: torch.Tensor, input: torch.Tensor) -> object:
        time.sleep(self._seconds)
        return self._inner.all_gather_into(output, input)


def measured_slowly(rank: int) -> float:
    mesh = mesh_in_worker(rank, dp=2)
    slow = SlowAxis(mesh, 0.05 if rank == 1 else 0.0)
    communicators = {**mesh.communicators, "dp": slow}
    slowed = Mesh(mesh.topology, mesh.rank, mesh.device, communicators, mesh.meter)
    return axis_bandwidth(slowed, "dp", 1 << 16)


@pytest.mark.gloo
def test_bytes_are_those_a_rank_sends_over_the_slowest_ranks_time() -> None:
    first, second = run_ranks(2, measured_slowly)
    assert first == second
    # Half of 64 KiB in 50 ms or, because gloo takes some time too, up to 300 ms.
    assert (1 << 15) / 0.3 < first <= (1 << 15) / 0.05
