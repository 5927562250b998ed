"""The report of a fault: from the last sign of life of every rank, which one is missing or late, and why.

Everything here is a pure function of what the monitors have collected (`monitor.py`).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from megazero.owner import ProcessState
from megazero.units import format_duration

MOST_LINES = 12
_MOST_NAMED = 4  # lines of culprits; the other lines are for groups of ranks
Members = Callable[[int, str], Sequence[int]]  # the ranks that rank R meets on an axis


class Waiting(NamedTuple):
    """The collective that a rank waits for, and for how many seconds it has been in flight."""

    axis: str
    collective: str
    number: int
    seconds: float


@dataclass(frozen=True)
class Heartbeat:
    """The position of a rank at a time (seconds since 1970).

    where: file, line and function that its main thread is in.  ended: True if it has left the job by itself.
    peers: the states that it saw of the other processes of its host, by rank.
    """

    rank: int
    host: str
    pid: int
    time: float
    step: int = 0
    micro_batch: int = 0
    activity: str = "start-up"
    unit: str = ""
    where: str = ""
    waiting: Waiting | None = None
    ended: bool = False
    peers: Mapping[int, ProcessState] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        read: dict[str, Any] = json.loads(text)
        waiting, peers = read.pop("waiting"), read.pop("peers") or {}
        seen = {int(rank): ProcessState(state) for rank, state in peers.items()}
        return cls(**read, waiting=None if waiting is None else Waiting(*waiting), peers=seen)

    @property
    def position(self) -> str:
        """The words for step, micro-batch, activity and unit."""
        in_step = self.activity in ("forward", "backward")
        parts = [f"step {self.step}" if self.step else "", f"micro-batch {self.micro_batch}" if in_step else ""]
        parts += [self.activity, f"in {self.unit}" if in_step and self.unit else ""]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Fault:
    """A fault, and where every rank was when it became known.

    beats: the newest heartbeat of every rank that has ever had one.  answered: the ranks that wrote theirs after the
    fault.  noticed: the rank and the error by which the fault became known.  store: what is wrong with the job's
    store, "" if it answers.  stacks: the files of the ranks' stacks.
    """

    world_size: int
    time: float
    beats: Mapping[int, Heartbeat]
    answered: frozenset[int]
    noticed: str
    store: str = ""
    stacks: str = ""

    def process(self, rank: int) -> ProcessState:
        """Return the state of a rank's process, as the ranks on its host saw it."""
        seen = [beat.peers[rank] for beat in self.beats.values() if beat.peers and rank in beat.peers]
        known = [state for state in seen if state is not ProcessState.UNSEEN]
        if ProcessState.GONE in known:  # other ranks may have looked before it ended
            return ProcessState.GONE
        return known[-1] if known else ProcessState.UNSEEN


class Diagnosis(NamedTuple):
    """Ranks that are missing or late, and the likely class of the fault, in words."""

    ranks: tuple[int, ...]
    text: str


def find(fault: Fault, members: Members) -> list[Diagnosis]:
    """Return who is missing or late, and the likely class, the surest first.

    What has ended, stopped or fallen silent comes before what is late, that before collectives that do not match,
    and a link is suspected only if every rank answers and all wait for the same.
    """
    silent = [rank for rank in range(fault.world_size) if rank not in fault.answered]
    findings = [found for rank in silent if (found := _missing(rank, fault)) is not None]
    if findings:
        return sorted(findings, key=lambda found: "no answer" in found.text)
    beats = [fault.beats[rank] for rank in sorted(fault.answered)]
    late = [beat for beat in beats if beat.waiting is None]
    if late and len(late) < len(beats):
        behind = [beat for beat in late if beat.step == min(other.step for other in late)]
        return [Diagnosis((beat.rank,), f"late: in {beat.activity}, at {beat.where}") for beat in behind]
    if pair := mismatch(beats, members):
        first, second = pair
        text = f"mismatched collectives: {_wait(first)} and {_wait(second)} never meet"
        return [Diagnosis((first.rank, second.rank), text)]
    if beats and not late:
        return [
            Diagnosis(tuple(beat.rank for beat in beats), "slow or broken link: all wait for the same, and all run")
        ]
    return []


def _missing(rank: int, fault: Fault) -> Diagnosis | None:
    beat, process = fault.beats.get(rank), fault.process(rank)
    if beat is None:
        return None if fault.store else Diagnosis((rank,), "has never come")
    if beat.ended:
        return Diagnosis((rank,), "has left the job by itself, before the others")
    if process is ProcessState.GONE:
        return Diagnosis((rank,), "dead: its process is gone (killed, out of memory, or crashed)")
    if process is ProcessState.STOPPED:
        return Diagnosis((rank,), "stopped: its process is suspended (SIGSTOP, a debugger, a frozen container)")
    if process is ProcessState.RUNNING:
        return Diagnosis((rank,), "no answer, though its process runs: in native code, or without a processor")
    return None if fault.store else Diagnosis((rank,), "no answer: dead, frozen, or its host is cut off")


def mismatch(beats: Sequence[Heartbeat], members: Members) -> tuple[Heartbeat, Heartbeat] | None:
    """Return two ranks that wait for each other in different collectives, or None."""
    waiting: dict[tuple[str, str, int, tuple[int, ...]], Heartbeat] = {}
    for beat in beats:
        if beat.waiting is not None and beat.waiting.collective not in ("send", "receive"):
            axis, collective, number, _ = beat.waiting
            waiting.setdefault((axis, collective, number, tuple(members(beat.rank, axis))), beat)
    different = list(waiting.items())
    for index, ((_, _, _, group), first) in enumerate(different):
        for (_, _, _, other), second in different[index + 1 :]:
            if second.rank in group and first.rank in other:
                return first, second
    return None


def report(fault: Fault, members: Members) -> list[str]:
    """Return the lines to print, at most MOST_LINES."""
    findings = find(fault, members)
    lines = [f"fault: {fault.store}"] if fault.store else []
    for found in findings[:_MOST_NAMED]:
        lines.append(("fault: " if not lines else "  and: ") + _named(found, fault))
    if len(findings) > _MOST_NAMED:
        more = [rank for found in findings[_MOST_NAMED:] for rank in found.ranks]
        lines.append(f"  and: {ranks_text(more)} likewise")
    lines = lines or ["fault: a collective failed, and no rank is missing"]
    closing = [f"noticed by {fault.noticed}"] if fault.noticed else []
    closing += [f"stacks of all ranks that could write them: {fault.stacks}"] if fault.stacks else []
    rows = list(_rows(fault))
    room = MOST_LINES - len(lines) - len(closing)
    if len(rows) > room:
        rows = [*rows[: room - 1], f"  and {len(rows) - room + 1} more groups of ranks"]
    return [*lines, *rows, *closing]


def _named(found: Diagnosis, fault: Fault) -> str:
    """Return the text of a finding: ranks, host and process, class, and age of the last heartbeat."""
    if len(found.ranks) > 1 or found.ranks[0] not in fault.beats:
        return f"{ranks_text(found.ranks)}: {found.text}"
    beat = fault.beats[found.ranks[0]]
    age = (
        ""
        if beat.rank in fault.answered
        else f"; last heartbeat {format_duration(max(fault.time - beat.time, 0.0))} ago"
    )
    return f"rank {beat.rank} (host {beat.host}, process {beat.pid}): {found.text}{age}"


def _rows(fault: Fault) -> Iterator[str]:
    """Yield a line for every group of ranks that are in the same place."""
    groups: dict[str, list[Heartbeat]] = {}
    for rank in sorted(fault.beats):
        beat = fault.beats[rank]
        groups.setdefault(f"{beat.position}: {_wait(beat, named=False)}", []).append(beat)
    for place, beats in groups.items():
        longest = max(beat.waiting.seconds if beat.waiting else 0.0 for beat in beats)
        since = f", begun {format_duration(longest)} before" if longest else ""
        yield f"  {ranks_text(beat.rank for beat in beats)}: {place}{since}"


def _wait(beat: Heartbeat, *, named: bool = True) -> str:
    who = f"rank {beat.rank} " if named else ""
    if beat.waiting is None:
        return f"{who}at {beat.where}" if beat.where else f"{who}running"
    axis, collective, number, _ = beat.waiting
    return f"{who}in {collective} number {number} on {axis}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 0-6, 9"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    several = len(spans) > 1 or len(spans[0]) > 1
    return f"rank{'s' * several} " + ", ".join("-".join(map(str, span)) for span in spans)
