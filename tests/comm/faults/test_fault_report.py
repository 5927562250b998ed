"""Tests of the report of a fault, a pure function of the ranks' last heartbeats."""

from collections.abc import Sequence

from support.each import each

from megazero.comm.faults.fault_report import MOST_LINES, Fault, Heartbeat, Waiting, find, ranks_text, report
from megazero.owner import ProcessState

NOW = 1000.0


def beat(rank: int, waits: str = "", *, step: int = 4, peers: dict[int, ProcessState] | None = None) -> Heartbeat:
    """Return a heartbeat of a rank in forward; waits: axis, collective and number, such as "dp all_reduce 7"."""
    axis, collective, number = waits.split() if waits else ("", "", "0")
    waiting = Waiting(axis, collective, int(number), 3.0) if waits else None
    return Heartbeat(
        rank, "node", 100 + rank, NOW - 2, step, 1, "forward", "layers.1", "user.py:7 in f", waiting, peers=peers
    )


def fault(*beats: Heartbeat, silent: Sequence[Heartbeat] = (), world: int = 0, store: str = "") -> Fault:
    everyone = {one.rank: one for one in (*beats, *silent)}
    answered = frozenset(one.rank for one in beats)
    return Fault(world or len(everyone), NOW, everyone, answered, "rank 0: it timed out", store, "faults/rank_*.txt")


def all_ranks(rank: int, axis: str) -> Sequence[int]:
    """Return the members of "tp", which are pairs, or of the world."""
    return range(rank // 2 * 2, rank // 2 * 2 + 2) if axis == "tp" else range(64)


SUM = "dp all_reduce 7"


@each(
    ("given", "ranks", "words"),
    [
        (fault(beat(0, SUM, peers={1: ProcessState.GONE}), silent=[beat(1)]), (1,), "dead"),
        (fault(beat(0, SUM, peers={1: ProcessState.STOPPED}), silent=[beat(1)]), (1,), "stopped"),
        (fault(beat(0, SUM, peers={1: ProcessState.RUNNING}), silent=[beat(1)]), (1,), "native code"),
        (
            fault(
                beat(0, SUM, peers={1: ProcessState.GONE}),
                beat(2, SUM, peers={1: ProcessState.RUNNING}),
                silent=[beat(1)],
            ),
            (1,),
            "dead",
        ),
        (fault(beat(0, SUM), silent=[beat(1)]), (1,), "cut off"),
        (fault(beat(0, SUM), world=2), (1,), "never come"),
        (fault(beat(0, SUM), beat(1)), (1,), "late: in forward, at user.py:7 in f"),
        (fault(beat(0, SUM), beat(1, step=3), beat(2)), (1,), "late"),
        (fault(beat(0, SUM), beat(1, "dp all_gather 7")), (0, 1), "mismatched"),
        (fault(beat(0, SUM), beat(1, "dp all_reduce 8")), (0, 1), "mismatched"),
        (fault(beat(0, SUM), beat(1, "world scalars 2")), (0, 1), "mismatched"),
        (fault(beat(0, SUM), beat(1, SUM)), (0, 1), "link"),
        # Two tensor-parallel pairs that are at different places do not contradict each other.
        (fault(beat(0, "tp all_reduce 7"), beat(1, "tp all_reduce 7"), beat(2, "tp all_reduce 9")), (0, 1, 2), "link"),
    ],
)
def test_the_class_of_a_fault(given: Fault, ranks: tuple[int, ...], words: str) -> None:
    found = find(given, all_ranks)[0]
    assert found.ranks == ranks
    assert words in found.text


def test_every_rank_is_named_once_and_the_report_is_short() -> None:
    waiting = [beat(rank, SUM if rank % 2 else f"tp all_reduce {rank}") for rank in range(40) if rank != 5]
    lines = report(fault(*waiting, silent=[beat(5)]), all_ranks)
    assert len(lines) == MOST_LINES
    assert lines[0] == "fault: rank 5 (host node, process 105): no answer: dead, frozen, or its host is cut off; " + (
        "last heartbeat 2.0s ago"
    )
    assert lines[2] == (
        "  ranks 1, 3, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39: step 4, micro-batch 1, "
        "forward, in layers.1: in all_reduce number 7 on dp, begun 3.0s before"
    )
    assert lines[-3:] == [
        "  and 14 more groups of ranks",
        "noticed by rank 0: it timed out",
        "stacks of all ranks that could write them: faults/rank_*.txt",
    ]


def test_a_store_that_is_silent_comes_first_and_accuses_no_rank_it_hides() -> None:
    store = "host a (node 0), which holds the job's store, does not answer"
    lines = report(fault(beat(1, SUM), world=4, store=store), all_ranks)
    assert lines[0] == f"fault: {store}"
    assert not any("rank 0" in line or "rank 2" in line for line in lines[:2])


def test_heartbeats_travel_as_text() -> None:
    for one in (beat(3, SUM, peers={1: ProcessState.STOPPED}), beat(0)):
        read = Heartbeat.from_json(one.to_json())
        assert (read.rank, read.waiting, read.peers) == (one.rank, one.waiting, one.peers or {})


def test_ranks_in_words() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 5, 6, 9]) == "ranks 0-2, 5-6, 9"
