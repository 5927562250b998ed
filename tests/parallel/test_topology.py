"""Tests ranks and their groups: literal tables, and laws that hold for any degrees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.each import each

from megazero.parallel.topology import AXES, ENDS, WORLD, Topology, parse_order

orders = st.permutations(AXES).map(tuple)
topologies = st.builds(Topology, tp=st.integers(1, 6), dp=st.integers(1, 6), pp=st.integers(1, 4), order=orders)


@each(
    ("topology", "axis", "groups"),
    [
        (Topology(tp=2, dp=2), "tp", ((0, 1), (2, 3))),
        (Topology(tp=2, dp=2), "dp", ((0, 2), (1, 3))),
        (Topology(tp=2, dp=2), "pp", ((0,), (1,), (2,), (3,))),
        (Topology(tp=2, dp=2), "world", ((0, 1, 2, 3),)),
        (Topology(tp=2, dp=3, pp=2), "tp", ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))),
        (Topology(tp=2, dp=3, pp=2), "dp", ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))),
        (Topology(tp=2, dp=3, pp=2), "pp", ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11))),
        (
            Topology(tp=2, dp=3, pp=2, order=("tp", "dp", "pp")),
            "tp",
            ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11)),
        ),
        (
            Topology(tp=2, dp=3, pp=2, order=("dp", "pp", "tp")),
            "pp",
            ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11)),
        ),
        (Topology(tp=2, dp=3, pp=2, order=("dp", "pp", "tp")), "dp", ((0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11))),
        (Topology(tp=2, pp=3), "ends", ((0, 4), (1, 5))),
        (Topology(dp=2, pp=2), "ends", ((0, 2), (1, 3))),
        (Topology(dp=2, pp=3, order=("dp", "tp", "pp")), "ends", ((0, 2), (3, 5))),
        (Topology(dp=2), "ends", ((0,), (1,))),
        (Topology(), "tp", ((0,),)),
        (Topology(), "world", ((0,),)),
    ],
)
def test_groups(topology: Topology, axis: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert topology.groups(axis) == groups


def test_coordinates_as_a_table() -> None:
    topology = Topology(tp=2, dp=3, pp=2)
    table = [tuple(topology.coordinate(rank, axis) for axis in ("pp", "dp", "tp", "world")) for rank in range(12)]
    assert table == [
        (0, 0, 0, 0),
        (0, 0, 1, 1),
        (0, 1, 0, 2),
        (0, 1, 1, 3),
        (0, 2, 0, 4),
        (0, 2, 1, 5),
        (1, 0, 0, 6),
        (1, 0, 1, 7),
        (1, 1, 0, 8),
        (1, 1, 1, 9),
        (1, 2, 0, 10),
        (1, 2, 1, 11),
    ]


def test_sizes_and_description() -> None:
    topology = Topology(tp=8, dp=64, pp=2)
    sizes = {axis: topology.size(axis) for axis in (*AXES, WORLD)}
    assert sizes == {"pp": 2, "dp": 64, "tp": 8, "world": 1024}
    assert topology.describe() == "pipeline 2 x data 64 x tensor 8 = 1024 ranks"
    with pytest.raises(KeyError):
        topology.size("cp")


def test_orders() -> None:
    """Rank 1's coordinates show the innermost axis, and those of the second half's first rank the outermost."""
    places = {}
    for text in ("pp-dp-tp", "dp-pp-tp", "pp-tp-dp", "tp-pp-dp", "dp-tp-pp", "tp-dp-pp"):
        topology = Topology(tp=2, dp=2, pp=2, order=parse_order(text))
        neighbour = [axis for axis in AXES if topology.coordinate(1, axis)]
        half = [axis for axis in AXES if topology.coordinate(4, axis)]
        places[text] = (half, neighbour)
        assert (half, neighbour) == ([text[:2]], [text[-2:]])
    assert len(places) == 6
    with pytest.raises(AssertionError, match="every axis once"):
        Topology(order=("pp", "dp"))


def test_ends_as_a_table() -> None:
    topology = Topology(tp=2, dp=1, pp=3)
    assert [topology.coordinate(rank, ENDS) for rank in range(6)] == [0, 0, 0, 0, 1, 1]
    assert [topology.group_of(rank, ENDS) for rank in range(6)] == [(0, 4), (1, 5), (2,), (3,), (0, 4), (1, 5)]
    assert (topology.size(ENDS), Topology(dp=3).size(ENDS)) == (2, 1)
    assert [Topology(dp=3).coordinate(rank, ENDS) for rank in range(3)] == [0, 0, 0]
    assert [Topology(dp=3).group_of(rank, ENDS) for rank in range(3)] == [(0,), (1,), (2,)]


@given(topologies)
def test_ends_are_the_ends_of_every_pipeline(topology: Topology) -> None:
    pairs = {(group[0], group[-1]) if topology.pp > 1 else group for group in topology.groups("pp")}
    assert set(topology.groups(ENDS)) == pairs
    in_some = {rank for pair in pairs for rank in pair}
    for rank in range(topology.world_size):
        group = topology.group_of(rank, ENDS)
        assert (group in pairs) if rank in in_some else (group == (rank,))
        if rank in in_some:
            assert group[topology.coordinate(rank, ENDS)] == rank and len(group) == topology.size(ENDS)
        else:
            assert topology.coordinate(rank, ENDS) == 0


@given(topologies)
def test_coordinates_and_ranks_are_a_bijection(topology: Topology) -> None:
    seen = set()
    for rank in range(topology.world_size):
        place = {axis: topology.coordinate(rank, axis) for axis in AXES}
        assert all(0 <= place[axis] < topology.size(axis) for axis in AXES)
        assert topology.rank_of(**place) == rank
        seen.add(tuple(place.values()))
    assert len(seen) == topology.world_size == topology.tp * topology.dp * topology.pp


@given(topologies, st.sampled_from((*AXES, WORLD)))
def test_groups_partition_the_world(topology: Topology, axis: str) -> None:
    groups = topology.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    assert {len(group) for group in groups} == {topology.size(axis)}
    assert list(groups) == sorted(groups, key=lambda group: group[0])
    for group in groups:
        # A rank's place in its group is its coordinate, and along every other axis the group's coordinate is constant.
        assert [topology.coordinate(rank, axis) for rank in group][: len(group)] == (
            list(group) if axis == WORLD else list(range(len(group)))
        )
        if axis != WORLD:
            for other in set(AXES) - {axis}:
                assert len({topology.coordinate(rank, other) for rank in group}) == 1
        for rank in group:
            assert topology.group_of(rank, axis) == group
