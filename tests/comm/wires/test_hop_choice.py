"""Tests of the choice between one hop and two: links that are made slow decide it, and all ranks choose the same."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor

from megazero.comm.interface import Communicator, Work
from megazero.comm.mesh import ACROSS_GATHERING, INSIDE_GATHERING, SHARD_GATHERING
from megazero.comm.startup import plain_parts
from megazero.comm.wires.forwarding import ForwardingCommunicator
from megazero.comm.wires.hop_choice import choose_hops
from megazero.comm.wires.shard_group import Wires
from megazero.comm.wires.two_hops import TwoHopCommunicator
from megazero.config.engine_sections import ZeroConfig
from megazero.parallel.nodes import Nodes

AUTO = ZeroConfig(zero_stage=3, hierarchical_collectives="auto")
TWO_OF_TWO = Nodes((2, 2))
DELAY = 0.08  # seconds, beside which loopback is fast


class Slow(ForwardingCommunicator):
    """A communicator whose gathers begin late on one rank."""

    def __init__(self, inner: Communicator, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        time.sleep(self._seconds)
        return super().all_gather_into(output, input, label)

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        time.sleep(self._seconds)
        return super().all_gather_coalesced(outputs, inputs, label)


def choice(rank: int, slow: str, wires: Wires) -> tuple[Wires, str]:
    """Return the choice where the gathers of one group are slow on rank 3."""
    mesh = mesh_in_worker(rank, dp=4, zero=AUTO, nodes=TWO_OF_TWO, is_late=False)
    plain = plain_parts(mesh.topology, mesh.communicators)
    # The mesh has made its choice, so its own communicator of the shard group may take two hops.
    plain[SHARD_GATHERING] = mesh.communicators["dp_gather"]
    plain[slow] = Slow(plain[slow], DELAY if rank == 3 else 0.0)
    return choose_hops(wires, plain, mesh, TWO_OF_TWO)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("slow", "hops", "slowest"),
    [
        (SHARD_GATHERING, "two hops", ""),
        (ACROSS_GATHERING, "one hop", "across nodes 0 1 (ranks 1 3)"),
        (INSIDE_GATHERING, "one hop", "inside node 1 (ranks 2 3)"),
    ],
)
def test_the_faster_is_chosen_on_every_rank(slow: str, hops: str, slowest: str) -> None:
    results = run_ranks(4, choice, slow, Wires(hops_if_faster=True))
    assert all(result == results[0] for result in results)
    wires, line = results[0]
    takes_two = hops == "two hops"
    assert wires == Wires(gathers_in_hops=takes_two, sums_in_hops=takes_two)
    assert line.startswith(f"hierarchical_collectives auto: {hops}, since ")
    assert "/s inside node " in line and "/s across nodes 0 1 (ranks " in line and slowest in line


@pytest.mark.gloo
def test_what_is_asked_for_stays() -> None:
    """A configuration that wants gathers in two hops gets them, however slow they are."""
    wires, _ = run_ranks(4, choice, ACROSS_GATHERING, Wires(gathers_in_hops=True, hops_if_faster=True))[0]
    assert wires == Wires(gathers_in_hops=True)


def made(rank: int, nodes: Nodes | None) -> tuple[str, bool, dict[str, Any]]:
    mesh = mesh_in_worker(rank, dp=4, zero=AUTO, nodes=nodes, is_late=False)
    stacked = mesh.communicators.get(SHARD_GATHERING)
    return mesh.notice, isinstance(stacked, TwoHopCommunicator), mesh.meter.bytes_by_axis()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("nodes", "because"),
    [
        (None, "a shard group is on one node"),
        (Nodes((4,)), "a shard group is on one node"),
        (Nodes((1, 1, 1, 1)), "a shard group has one rank, or unequal numbers, on each of 4 nodes"),
        (Nodes((3, 1)), "a shard group has one rank, or unequal numbers, on each of 2 nodes"),
    ],
    ids=str,
)
def test_nothing_is_measured_where_there_is_one_way(nodes: Nodes | None, because: str) -> None:
    for result in run_ranks(4, made, nodes):
        assert result == (f"hierarchical_collectives auto: one hop, since {because}", False, {})


@pytest.mark.gloo
def test_a_mesh_is_made_as_it_was_chosen() -> None:
    """The mesh has the hops that its notice says, and the measurements are not in the meter."""
    results = run_ranks(4, made, TWO_OF_TWO)
    assert all(result == results[0] for result in results)
    notice, takes_two, counted = results[0]
    assert ("auto: two hops" in notice) == takes_two and counted == {}
