"""Tests nodes: the ranks on each, the groups that cross nodes, and messages on tensor parallelism across them."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.each import each

from megazero.errors import Problem
from megazero.parallel.nodes import Nodes, crossing_groups, parse_tasks_per_node, problems_of_placement, shortened
from megazero.parallel.topology import Topology, parse_order


def test_where_ranks_are() -> None:
    nodes = Nodes((3, 1, 2))
    assert nodes.count == 3
    assert [nodes.of(rank) for rank in range(6)] == [0, 0, 0, 1, 2, 2]
    assert [list(nodes.ranks(node)) for node in range(3)] == [[0, 1, 2], [3], [4, 5]]
    assert nodes.touched_by((5, 0, 1)) == (0, 2)


@each(
    ("sizes", "text"),
    [
        ((1,), "1 node of 1 rank"),
        ((8,), "1 node of 8 ranks"),
        ((8, 8), "2 nodes of 8 ranks"),
        ((1, 1, 1), "3 nodes of 1 rank"),
        ((8, 8, 4), "3 nodes of 8(x2),4 ranks"),
        ((1, 8), "2 nodes of 1,8 ranks"),
    ],
)
def test_description(sizes: tuple[int, ...], text: str) -> None:
    assert Nodes(sizes).describe() == text


@each(
    ("text", "sizes"),
    [("8", (8,)), ("8(x2),4", (8, 8, 4)), ("1,2(x3),1", (1, 2, 2, 2, 1)), ("16(x3)", (16, 16, 16))],
)
def test_tasks_per_node(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_tasks_per_node(text) == sizes


@each("text", ["", "eight", "8(2)", "8,", "0", "-1", "8 (x2)", "4(x0)"])
def test_no_tasks_per_node(text: str) -> None:
    with pytest.raises(ValueError, match="tasks per node"):
        parse_tasks_per_node(text)


@each(
    ("numbers", "text"),
    [
        ((7,), "7"),
        ((0, 1, 2, 3), "0 1 2 3"),
        ((4, 5, 6, 7, 8), "4-8"),
        ((0, 2, 4, 6, 8), "0 2 4 6 8"),
        ((0, 8, 16, 24, 32, 40), "0 8 16 ... 40"),
    ],
)
def test_many_numbers_are_shortened(numbers: tuple[int, ...], text: str) -> None:
    assert shortened(numbers) == text


@each(
    ("topology", "sizes", "axis", "groups"),
    [
        (Topology(tp=2, dp=2, pp=2), (4, 4), "tp", ()),
        (Topology(tp=2, dp=2, pp=2), (4, 4), "dp", ()),
        (Topology(tp=2, dp=2, pp=2), (4, 4), "pp", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (Topology(tp=2, dp=2, pp=2), (3, 5), "tp", ((2, 3),)),
        (Topology(tp=2, dp=2, pp=2), (8,), "world", ()),
        (Topology(tp=2, dp=2, pp=2), (7, 1), "world", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        (Topology(tp=2, dp=2, order=("pp", "tp", "dp")), (2, 2), "tp", ((0, 2), (1, 3))),
        (Topology(pp=3, dp=2), (4, 2), "ends", ((0, 4), (1, 5))),
    ],
)
def test_crossing(topology: Topology, sizes: tuple[int, ...], axis: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert crossing_groups(topology, axis, Nodes(sizes)) == groups


def only(topology: Topology, *sizes: int) -> Problem:
    (problem,) = problems_of_placement(topology, Nodes(sizes), allowed=False)
    assert list(problems_of_placement(topology, Nodes(sizes), allowed=True)) == []
    return problem


@each(
    ("topology", "sizes", "given", "legal"),
    [
        (
            Topology(tp=16),
            (8, 8),
            "--tensor-model-parallel-size 16 --rank-order pp-dp-tp on 2 nodes of 8 ranks: ranks 0-15 are a group, on"
            " nodes 0 1",
            "--tensor-model-parallel-size 8, --allow-tensor-parallel-across-nodes",
        ),
        (
            Topology(tp=4, dp=3),
            (6, 6),
            "--tensor-model-parallel-size 4 --rank-order pp-dp-tp on 2 nodes of 6 ranks: ranks 4 5 6 7 are a group, on"
            " nodes 0 1",
            "--tensor-model-parallel-size 2, --allow-tensor-parallel-across-nodes",
        ),
        (
            Topology(tp=2, dp=2, pp=2, order=("tp", "pp", "dp")),
            (4, 4),
            "--tensor-model-parallel-size 2 --rank-order tp-pp-dp on 2 nodes of 4 ranks: ranks 0 4 are a group, on"
            " nodes 0 1",
            "--tensor-model-parallel-size 1, --rank-order pp-dp-tp, --allow-tensor-parallel-across-nodes",
        ),
        (
            Topology(tp=3, dp=3, order=("pp", "tp", "dp")),
            (4, 5),
            "--tensor-model-parallel-size 3 --rank-order pp-tp-dp on 2 nodes of 4,5 ranks: ranks 0 3 6 are a group, on"
            " nodes 0 1",
            "--tensor-model-parallel-size 1, --allow-tensor-parallel-across-nodes",
        ),
    ],
)
def test_tensor_parallelism_across_nodes(topology: Topology, sizes: tuple[int, ...], given: str, legal: str) -> None:
    problem = only(topology, *sizes)
    assert (problem.given, problem.legal) == (given, legal)
    assert "inside one node" in problem.rule and "tens of times slower" in problem.rule


orders = st.permutations(("pp", "dp", "tp")).map(tuple)
topologies = st.builds(Topology, tp=st.integers(1, 6), dp=st.integers(1, 4), pp=st.integers(1, 3), order=orders)


@given(topologies, st.data())
def test_what_is_called_legal_is(topology: Topology, data: st.DataObject) -> None:
    cuts = data.draw(st.sets(st.integers(1, max(topology.world_size - 1, 1)), max_size=4))
    edges = [0, *sorted(cut for cut in cuts if cut < topology.world_size), topology.world_size]
    nodes = Nodes(tuple(end - start for start, end in itertools.pairwise(edges)))
    for problem in problems_of_placement(topology, nodes, allowed=False):
        *remedies, last = problem.legal.split(", ")
        assert last == "--allow-tensor-parallel-across-nodes" and remedies
        for remedy in remedies:
            flag, value = remedy.split()
            if flag == "--rank-order":
                mended = dataclasses.replace(topology, order=parse_order(value))
            else:
                degree = int(value)
                mended = dataclasses.replace(topology, tp=degree, dp=topology.dp * topology.tp // degree)
            assert mended.world_size == topology.world_size
            assert list(problems_of_placement(mended, nodes, allowed=False)) == []


def test_nodes_without_ranks_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        Nodes(())
    with pytest.raises(AssertionError):
        Nodes((4, 0))
