"""A slow rank is named once, with the part that is slow, and again when it has recovered."""

import socket
import time
from itertools import pairwise

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks

from megazero.report.stragglers import STEPS, Change, OwnTime, Standing, StragglerReport, judge, medians

USUAL = OwnTime(0.01, 0.99)
SLOW = OwnTime(0.01, 1.31)
STARVED = OwnTime(0.5, 0.99)
Table = list[list[OwnTime]]


def alone_slow(slow: OwnTime, steps: int, ranks: int = 4) -> Table:
    """Return a table in which rank 2, or the last of fewer ranks, is slow."""
    return [[slow if rank == min(2, ranks - 1) else USUAL for rank in range(ranks)] for _ in range(steps)]


def told(table: Table, cuts: tuple[int, ...] = (), peers: list[list[int]] | None = None) -> list[tuple[int, int, str]]:
    """Return step, rank and text of all changes; cuts: steps before which the table is handed over in parts."""
    ranks = len(table[0])
    peers = peers or [[other for other in range(ranks) if other != rank] for rank in range(ranks)]
    standings, found, bounds = [Standing()] * ranks, [], [0, *cuts, len(table)]
    for start, stop in pairwise(bounds):
        standings, changes = judge(standings, table[start:stop], peers, medians(table[:STEPS]))
        found += [Change(start + step, rank, standing) for step, rank, standing in changes]
    return [(step, rank, standing.describe("its data", "the others' time")) for step, rank, standing in found]


@each("ranks", [2, 3, 4])
@each("cuts", [(), (7, 19), (20,)], ids=str)
def test_named_once_and_again_when_recovered(cuts: tuple[int, ...], ranks: int) -> None:
    table = alone_slow(SLOW, 50, ranks) + alone_slow(USUAL, 50, ranks)
    slow, recovered = told(table, cuts)
    rank = min(2, ranks - 1)
    text = "is slow: 1.32 times the others' time over 20 steps, spent on forward, backward and update"
    assert slow == (STEPS - 1, rank, text)
    assert recovered == (50 + STEPS - 1, rank, "is no longer slow: 1.00 times the others' time over 20 steps")


def test_waiting_for_data_is_told_apart() -> None:
    assert told(alone_slow(STARVED, 20))[0][2].endswith("spent on its data")


def test_neither_nineteen_steps_nor_less_than_the_factor_is_slow() -> None:
    assert told((alone_slow(SLOW, STEPS - 1) + alone_slow(USUAL, 1)) * 3) == []
    assert told(alone_slow(OwnTime(0.01, 1.28), 60)) == []


def test_a_short_relapse_is_no_recovery() -> None:
    assert len(told(alone_slow(SLOW, 30) + alone_slow(USUAL, 19) + alone_slow(SLOW, 30))) == 1


def test_a_stage_with_more_work_is_not_slow() -> None:
    """Ranks that have a stage each are compared with their own first steps, at the pace of the others."""
    stages = [USUAL, OwnTime(0.0, 3.0), OwnTime(0.02, 1.5)]
    usual = [stages] * 40
    twice = [[OwnTime(2 * time.data, 2 * time.computing) for time in stages]] * 40
    assert told(usual + twice + usual, peers=[[], [], []]) == []
    last_is_late = [[*stages[:2], OwnTime(0.02, 3.02)]] * 20
    assert told(usual + last_is_late, peers=[[], [], []]) == [
        (59, 2, "is slow: 2.00 times the others' time over 20 steps, spent on forward, backward and update")
    ]
    last_starves = [[*stages[:2], OwnTime(1.52, 1.5)]] * 20
    assert told(usual + last_starves, peers=[[], [], []])[0][2].endswith("spent on its data")


def job(rank: int, pp: int) -> tuple[list[str], float]:
    """Return the lines of a job of four ranks, of which rank 1 is slow, and this rank's wait for it."""
    mesh = mesh_in_worker(rank, dp=4 // pp, pp=pp, is_late=False)
    report, own = StragglerReport(mesh, log_interval=12), SLOW if rank == 1 else USUAL
    lines = [line for iteration in range(1, 49) for line in report.step(iteration, own)]
    mesh.world.all_reduce(torch.ones(8)).wait()
    before = mesh.meter.waited_seconds
    time.sleep(0.4 if rank == 1 else 0.0)
    mesh.world.all_reduce(torch.ones(8)).wait()
    return lines, mesh.meter.waited_seconds - before


@pytest.mark.gloo
@pytest.mark.parametrize("pp", [1, 2])
def test_four_ranks_of_which_one_is_slow(pp: int) -> None:
    found = run_ranks(4, job, pp)
    host = socket.gethostname()
    (line,), *others = [lines for lines, _ in found]
    assert line.startswith(f"iteration 20: rank 1 on {host} is slow: 1.32 times the ")
    assert ("of the others of its pipeline stage over" in line) == (pp > 1)
    assert others == [[], [], []], "rank 0 alone has the times of all"
    assert all(waited > 0.2 for rank, (_, waited) in enumerate(found) if rank != 1), "a wait is not own time"


def test_one_rank_compares_itself_with_none() -> None:
    assert list(StragglerReport(mesh_in_worker(0), log_interval=1).step(20, USUAL)) == []
