"""Names the ranks that are slower than others, by the time that each takes itself in every step.

A step takes all ranks equally long, since they wait for each other.  A rank's *own time* is what is left of it without
those waits: the time for its batch, and that for computing.  It is compared with the median of the other ranks that do
the same work, those of its pipeline stage.  Stages may have different work, so a rank that has a stage to itself is
compared with what it took in the first steps itself, at the pace that the other ranks go at now.  A rank is *slow* once
it has taken over 1.3 times as long in 20 steps in a row, and no longer slow once it has not in 20 in a row.

Ranks exchange their times at log intervals only, at most once in 20 steps.  On a GPU the host does not wait where the
device does, so that it cannot separate own time from waiting, and nothing is exchanged.
"""

import socket
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megazero.comm.mesh import Mesh, gather_json_on_first

FACTOR = 1.3
STEPS = 20


class OwnTime(NamedTuple):
    """The seconds of a step that a rank spent on its own: waiting for its batch, and computing."""

    data: float
    computing: float

    @property
    def total(self) -> float:
        return self.data + self.computing


@dataclass(frozen=True)
class Standing:
    """The standing of one rank after some steps.

    streak: the steps in a row that contradict `is_slow`; own, usual, data_excess: sums over them of the rank's own
    seconds, of the other ranks' median, and of the seconds by which it waited longer for data than their median.
    """

    is_slow: bool = False
    streak: int = 0
    own: float = 0.0
    usual: float = 0.0
    data_excess: float = 0.0

    def after_step(self, mine: OwnTime, others: Sequence[OwnTime]) -> "Standing":
        """Return the standing after one more step."""
        usual = statistics.median(time.total for time in others)
        if (mine.total > FACTOR * usual) == self.is_slow:
            return Standing(self.is_slow)
        excess = mine.data - statistics.median(time.data for time in others)
        return Standing(
            self.is_slow, self.streak + 1, self.own + mine.total, self.usual + usual, self.data_excess + excess
        )

    @property
    def changes(self) -> bool:
        """True if the rank has become slow by now, or has recovered."""
        return self.streak >= STEPS

    def describe(self, before: str, usual: str) -> str:
        """Return what has changed, as the end of a sentence about the rank.

        before: the words for `OwnTime.data`.  usual: those for what it was compared with.
        """
        factor = self.own / self.usual if self.usual > 0 else float("inf")
        if self.is_slow:
            return f"is no longer slow: {factor:.2f} times {usual} over {self.streak} steps"
        part = before if 2 * self.data_excess > self.own - self.usual else "forward, backward and update"
        return f"is slow: {factor:.2f} times {usual} over {self.streak} steps, spent on {part}"


class Change(NamedTuple):
    """A rank's standing after a step, numbered in the table, that makes it slow or no longer slow."""

    step: int
    rank: int
    standing: Standing


def judge(
    standings: Sequence[Standing],
    table: Sequence[Sequence[OwnTime]],
    peers: Sequence[Sequence[int]],
    first: Sequence[OwnTime],
) -> tuple[list[Standing], list[Change]]:
    """Return the ranks' standings after the table's steps, [step][rank], and what has changed in them.

    peers: the other ranks with which each rank is compared, none for one that is compared with itself.  first: what
    each rank took in a step at first (`medians`).
    """
    now, changes = list(standings), []
    for step, times in enumerate(table):
        for rank, others in enumerate(peers):
            like = [times[other] for other in others] or [_at_pace(rank, times, first)]
            now[rank] = now[rank].after_step(times[rank], like)
            if now[rank].changes:
                changes.append(Change(step, rank, now[rank]))
                now[rank] = Standing(not now[rank].is_slow)
    return now, changes


def medians(table: Sequence[Sequence[OwnTime]]) -> list[OwnTime]:
    """Return the median time of every rank over the table's steps."""
    return [OwnTime(*map(statistics.median, zip(*times, strict=True))) for times in zip(*table, strict=True)]


def _at_pace(rank: int, times: Sequence[OwnTime], first: Sequence[OwnTime]) -> OwnTime:
    """Return what a rank took at first, as much longer as the median of the other ranks takes now."""
    pairs = [pair for other, pair in enumerate(zip(times, first, strict=True)) if other != rank]
    others = [now.total / then.total for now, then in pairs if then.total > 0]
    pace = statistics.median(others) if others else 1.0
    return OwnTime(first[rank].data * pace, first[rank].computing * pace)


class StragglerReport:
    """The comparison of one job's ranks, which each of them makes."""

    def __init__(self, mesh: Mesh, *, log_interval: int, before: str = "its data") -> None:
        """Exchange times at every log interval, or every few of them where those have less than 20 steps.

        before: the words for what a rank does in `OwnTime.data`, before it computes.
        """
        self._mesh = mesh
        self._before = before
        self._interval = log_interval * -(-STEPS // log_interval)
        self._is_on = mesh.device.type == "cpu" and mesh.topology.world_size > 1
        self._steps: list[OwnTime] = []
        self._first: list[OwnTime] = []
        self._standings = [Standing()] * mesh.topology.world_size
        self._peers = [_peers(mesh, rank) for rank in range(mesh.topology.world_size)]

    def step(self, iteration: int, mine: OwnTime) -> Iterator[str]:
        """Take this rank's time of a step; yield, on rank 0, a line for every rank that has become slow, or recovered.

        A collective call every `_interval` iterations.
        """
        if not self._is_on:
            return
        self._steps.append(mine)
        if iteration % self._interval:
            return
        rows = gather_json_on_first(self._mesh, [socket.gethostname(), *self._steps])
        first = iteration - len(self._steps) + 1
        self._steps = []
        if not rows:
            return
        hosts = [row[0] for row in rows]
        table = [[OwnTime(*times) for times in step] for step in zip(*(row[1:] for row in rows), strict=True)]
        self._first = self._first or medians(table)
        self._standings, changes = judge(self._standings, table, self._peers, self._first)
        for step, rank, standing in changes:
            change = standing.describe(self._before, self._usual(rank))
            yield f"iteration {first + step}: rank {rank} on {hosts[rank]} {change}"

    def _usual(self, rank: int) -> str:
        """Return the words for what a rank is compared with."""
        if self._mesh.topology.pp == 1:
            return "the others' time"
        if self._peers[rank]:
            return "the time of the others of its pipeline stage"
        return "its own time in the first steps, at the other stages' pace,"


def _peers(mesh: Mesh, rank: int) -> list[int]:
    """Return the other ranks of the same pipeline stage."""
    topology = mesh.topology
    stage = topology.coordinate(rank, "pp")
    others = (other for other in range(topology.world_size) if other != rank)
    return [other for other in others if topology.coordinate(other, "pp") == stage]
