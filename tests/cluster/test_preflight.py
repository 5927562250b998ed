"""Tests that preflight names all bad nodes and no others, on invented figures and on real ranks, one of them slow."""

import itertools
from dataclasses import replace

import pytest
import torch
from support.each import each
from support.preflight_jobs import HOUR, survey_job
from torch._C._distributed_c10d import HashStore

from megazero.cluster import preflight
from megazero.cluster.preflight import Board, ClusterNode, Demands, NodeFacts, Survey
from megazero.errors import CollectiveError, TopologyError
from megazero.parallel.launch import Launch

DEMANDS = Demands(gpus=8, bandwidth=10e9, clock_skew=1.0, shared_memory=2**30)
FAST, SLOW = 50e9, 1e9


def nodes(count: int) -> tuple[ClusterNode, ...]:
    return tuple(ClusterNode(f"n{i}", (2 * i, 2 * i + 1), 8, 2**31) for i in range(count))


def measured(count: int, bad: set[int]) -> Survey:
    """Return the survey of a job in which every pair with a bad node is slow, after both rounds of measurements."""

    def figure(pair: tuple[int, int]) -> float:
        return SLOW if bad & set(pair) else FAST

    pairs = {pair: figure(pair) for disjoint in preflight.ring(count) for pair in disjoint}
    again = preflight.retest_rounds(*preflight.split_suspects(pairs, count, DEMANDS.bandwidth))
    pairs |= {pair: figure(pair) for disjoint in again for pair in disjoint}
    inside = dict.fromkeys(range(count), FAST)
    return Survey(nodes(count), (0.0,) * count, inside, pairs, SLOW if bad else FAST)


def given(found: Survey) -> list[str]:
    return [problem.given for problem in preflight.survey_problems(found, DEMANDS)]


@each("count", [1, 2, 3, 4, 7, 25, 64])
def test_a_ring_has_every_neighbour_and_nobody_twice_in_a_round(count: int) -> None:
    rounds = preflight.ring(count)
    edges = {frozenset((i, (i + 1) % count)) for i in range(count)} if count > 1 else set()
    assert sorted(map(sorted, edges)) == sorted(sorted(pair) for disjoint in rounds for pair in disjoint)
    assert len(rounds) <= 3
    for disjoint in rounds:
        members = [number for pair in disjoint for number in pair]
        assert len(members) == len(set(members))


@each("count", [3, 4, 5, 6])
def test_whichever_nodes_are_slow_they_are_named_and_no_others(count: int) -> None:
    """All bad nodes and no others are named if two neighbours are sound; a sound node may lie between bad ones."""
    tried = 0
    for size in range(count - 1):
        for bad in itertools.combinations(range(count), size):
            if all({i, (i + 1) % count} & set(bad) for i in range(count)):
                continue
            tried += 1
            named = [text.split(":")[0] for text in given(measured(count, set(bad)))]
            assert named == [f"n{number}" for number in bad], bad
    assert tried >= count


def test_a_sound_node_between_bad_ones_is_seen_a_second_time() -> None:
    found = measured(6, {1, 3})
    assert preflight.split_suspects(measured(6, set()).pairs, 6, DEMANDS.bandwidth)[0] == []
    assert found.pairs[(2, 3)] == SLOW and found.pairs[(1, 2)] == SLOW
    assert any(2 in pair and figure == FAST for pair, figure in found.pairs.items())
    assert given(found) == [f"n{n}: 1.00 GB/s at best beside another node" for n in (1, 3)]


def test_two_nodes_cannot_be_told_apart() -> None:
    (told,) = given(measured(2, {0}))
    assert told == "no two nodes are fast together: n0 - n1: 1.00 GB/s"


def test_slow_links_switches_and_nodes_within() -> None:
    found = measured(4, set())
    assert given(found) == []
    assert given(replace(found, pairs={**found.pairs, (1, 2): SLOW})) == [
        "n1 and n2: 1.00 GB/s together, both faster beside others"
    ]
    assert given(replace(found, whole=SLOW)) == ["all nodes together: 1.00 GB/s, and no two of them are slow"]
    assert given(replace(found, inside={**found.inside, 3: SLOW}, whole=SLOW)) == [
        "n3: 1.00 GB/s between its own ranks"
    ]


def test_without_a_floor_only_failures_count() -> None:
    anything = replace(DEMANDS, bandwidth=0.0)
    slow = measured(4, {0, 1, 2, 3})
    assert preflight.survey_problems(slow, anything) == []
    failed = replace(slow, pairs={**slow.pairs, (0, 1): 0.0, (3, 0): 0.0})
    (problem,) = preflight.survey_problems(failed, anything)
    assert problem.given.startswith("n0: 0.00 GB/s") and problem.legal.endswith("--exclude=n0)")


def test_the_first_clock_may_be_the_wrong_one() -> None:
    ahead = replace(measured(4, set()), clocks=(0.0, 0.2, 2.5, 0.0))
    assert given(ahead) == ["n2: its clock is +2.500 s off the others'"]
    first = replace(measured(4, set()), clocks=(0.0, -30.0, -30.1, -29.9))
    assert given(first) == ["n0: its clock is +30.000 s off the others'"]


def test_what_a_node_has() -> None:
    found = [problem.given for problem in preflight.node_problems(nodes(3), DEMANDS)]
    assert found == []
    poor = (nodes(1)[0], replace(nodes(2)[1], gpus=7), replace(nodes(3)[2], shared_memory=2**20))
    found = [problem.given for problem in preflight.node_problems(poor, DEMANDS)]
    assert found == ["n1: 7 GPUs", "n2: 1.0 MiB of shared memory free"]


def alone(timeout: float = 0.2) -> Board:
    return Board(HashStore(), 0, timeout)


def test_the_roll_names_absent_ranks_by_their_nodes() -> None:
    board = alone()
    board.post("facts/2", {"node": "b", "gpus": 0, "shared_memory": 1})
    with pytest.raises(TopologyError) as caught:
        preflight.gather_nodes(board, Launch(0, 6, 0), NodeFacts("a", 0, 1), ["a", "b", "c"])
    assert [problem.given.split(" has")[0] for problem in caught.value.problems] == [
        "a: rank 1",
        "b: rank 3",
        "c: rank 4, 5",
    ]
    assert caught.value.problems[1].legal.endswith("--exclude=b)")
    with pytest.raises(TopologyError, match="name is not known: rank 1") as caught:
        preflight.gather_nodes(alone(), Launch(0, 2, 0), NodeFacts("a", 0, 1), [])
    legal = caught.value.problems[0].legal
    assert "exclude" not in legal and legal.startswith("--nodes A,B")


def test_nodes_come_in_the_order_of_ranks_with_the_worst_view() -> None:
    board = alone()
    for rank, (node, gpus) in enumerate([("b", 8), ("b", 7), ("a", 8), ("a", 8)]):
        board.post(f"facts/{rank}", {"node": node, "gpus": gpus, "shared_memory": 10 - rank})
    found = preflight.gather_nodes(board, Launch(0, 4, 0), NodeFacts("b", 8, 10), [])
    assert found == (ClusterNode("b", (0, 1), 7, 9), ClusterNode("a", (2, 3), 8, 7))


def test_rank_0_that_is_silent_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CollectiveError, match="rank 0 has not posted facts"):
        Board(HashStore(), 1, 0.1).gather("facts", 1, [0, 1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(CollectiveError, match=r"127\.0\.0\.1:1 can't be reached"):
        preflight.open_store(Launch(1, 2, 1), 0.5)
    monkeypatch.setenv("MASTER_PORT", "65536")
    with pytest.raises(TopologyError, match="a port is a number from 1 to 65535"):
        preflight.open_store(Launch(1, 2, 1), 0.5)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(TopologyError, match="start with srun or torchrun"):
        preflight.open_store(Launch(1, 2, 1), 0.5)


@pytest.mark.gloo
def test_a_slow_rank_betrays_its_node() -> None:
    replies = survey_job([[0], [1], [2], [3]], slow=[2])
    assert all(reply == replies[0] for reply in replies)
    found, problems = replies[0]
    assert [text.split(":")[0] for text in problems] == ["n2", "n2"]
    assert "its clock is +36" in problems[0] and "beside another node" in problems[1]
    assert found.clocks[1] == pytest.approx(0, abs=1) and found.clocks[2] == pytest.approx(HOUR, abs=1)
    assert found.inside == {} and len(found.pairs) == 5  # four neighbours, and n2 beside a sound node that is not one
    assert all(0 < figure < 2**16 / 0.05 * 1.01 for pair, figure in found.pairs.items() if 2 in pair)
    assert 0 < found.whole < 1.5 * 2**16 / 0.05 * 1.01


@pytest.mark.gloo
def test_nodes_of_several_ranks() -> None:
    found, problems = survey_job([[0, 1], [2, 3]])[3]
    assert problems == []
    assert set(found.inside) == {0, 1} and set(found.pairs) == {(0, 1)} and found.whole > 2e6
    lines = preflight.table(found)
    assert len(lines) == 5 and lines[1].split()[:2] == ["n0", "2"] and "n1 " in lines[1]
    assert lines[3].startswith("slow link: n0 - n1, ")


def test_the_slow_link_is_named() -> None:
    """It is the slowest pair's, beside the slowest of the links inside nodes."""
    found = measured(4, {2})
    assert preflight.slow_link(replace(found, pairs={})) == ""
    assert preflight.slow_link(replace(found, inside={}, pairs={(0, 1): FAST, (3, 2): SLOW})) == "n3 - n2, 1.00 GB/s"
    inside = {0: FAST, 1: 20e9, 2: FAST}
    line = preflight.slow_link(replace(found, inside=inside, pairs={(0, 1): FAST, (3, 2): SLOW}))
    assert line == "n3 - n2, 1.00 GB/s; the slowest inside a node is n1's, 20.00 GB/s, 20 times as fast"
    broken = preflight.slow_link(replace(found, inside=inside, pairs={(0, 1): 0.0}))
    assert broken == "n0 - n1, 0.00 GB/s; the slowest inside a node is n1's, 20.00 GB/s"


def test_bandwidth_counts_what_a_rank_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 4 ranks sends 2 (4 - 1) / 4 times the message: 3 MB for a message of 2 MB, in 10 ms."""
    meter = preflight._Measurements(alone(), torch.device("cpu"), 2_000_000)
    monkeypatch.setattr(meter, "_join", lambda name, ranks: None)
    monkeypatch.setattr(meter, "_time", lambda: 0.01)
    assert meter.round("t", {"crew": [0, 1, 2, 3]}) == {"crew": pytest.approx(3e8)}
    assert alone().gather("t", 3, [0]) == [3]


def test_what_fails_counts_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, ranks: object) -> None:
        raise RuntimeError("connection reset")

    meter = preflight._Measurements(alone(), torch.device("cpu"), 8)
    monkeypatch.setattr(meter, "_join", broken)
    assert meter.round("t", {"mine": [0, 1], "another's": [2, 3]}) == {"mine": 0.0, "another's": 0.0}
