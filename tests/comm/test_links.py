"""Tests of which bytes leave a node, against the messages that each collective is made of."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import mesh_in_worker, run_ranks
from torch import ones, zeros

from megazero.comm.links import Links
from megazero.comm.metered import sent_bytes
from megazero.parallel.nodes import Nodes

SLICE = 24  # bytes


def crossings(nodes: list[int], rank: int, messages: list[tuple[int, int]]) -> int:
    """Return the bytes of messages (to rank, bytes) that go to another node."""
    return sum(nbytes for to, nbytes in messages if nodes[to] != nodes[rank])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9), st.data())
def test_every_message_of_a_collective(nodes: list[int], data: Any) -> None:
    size = len(nodes)
    rank = data.draw(st.integers(0, size - 1))
    others, after = [other for other in range(size) if other != rank], (rank + 1) % size
    exchange = [(other, SLICE) for other in others]
    ring = [(after, SLICE)] * (size - 1)
    for exchanges in (True, False):
        links = Links(nodes, rank, exchanges=exchanges)
        expected: dict[Any, list[tuple[int, int]]] = {
            "all_gather": exchange if exchanges else ring,
            "reduce_scatter": exchange if exchanges else ring,
            "all_to_all": exchange,
            "all_reduce": ring + ring,
            "scalars": ring + ring,
        }
        for collective, messages in expected.items():
            sent = sent_bytes(collective, SLICE * size, size)
            assert sent == sum(nbytes for _, nbytes in messages)
            assert links.across(collective, sent) == crossings(nodes, rank, messages), collective
        for other in others:
            assert links.across("send", 10, other) == crossings(nodes, rank, [(other, 10)])


def counted(rank: int) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    mesh = mesh_in_worker(rank, pp=2, dp=3, nodes=Nodes((2, 4)), is_late=False)
    axis = mesh.axis("dp")
    piece, whole = ones(6), zeros(18)
    axis.all_gather_into(whole, piece).wait()
    axis.all_reduce(whole).wait()
    stages = mesh.axis("pp")
    if stages.rank == 0:
        stages.send(piece, 1).wait()
    else:
        stages.receive_into(piece, 0).wait()
    return mesh.meter.bytes_by_axis(), mesh.meter.bytes_across_nodes()


@pytest.mark.gloo
def test_what_real_ranks_count() -> None:
    """Nodes of ranks 0, 1 and 2 to 5: the first stage's axis crosses, the second one's not, and two links of stages."""
    results = run_ranks(6, counted)
    for rank, (sent, across) in enumerate(results):
        sends = {"pp": {"send": 24}} if rank < 3 else {}
        assert sent == {"dp": {"all_gather": 48, "all_reduce": 96}, **sends}
        if rank >= 3:
            assert across == {}
            continue
        gathered = {0: 24, 1: 24, 2: 48}[rank]  # to rank 2 alone; from there to both others
        summed = {} if rank == 0 else {"all_reduce": 96}  # the ring's next is on this node, or on another
        of_stages = {"pp": {"send": 24}} if rank < 2 else {}
        assert across == {"dp": {"all_gather": gathered, **summed}, **of_stages}
