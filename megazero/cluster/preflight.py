"""Tests of the nodes of a job before it trains: GPUs, clocks, shared memory, and the bandwidth of all-reduces.

One slow node slows all of them down, so each is measured apart.  Nodes form a *ring*; the ranks of two neighbours, a
*pair*, all-reduce together while other pairs do the same.  One fast pair *clears* both its nodes.  Nodes that no pair
clears are *suspects*; they are measured again, each beside a cleared one, so that a sound node between two bad ones is
not blamed.  Figures are exchanged through the job's store, so that a failure of the network can be reported.

Bandwidths are those of the bytes that each rank sends, 2 (n - 1) / n of the message over n ranks, in bytes a second.
"""

import json
import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from megazero.errors import CollectiveError, Problem, TopologyError
from megazero.parallel.launch import Launch
from megazero.units import format_bytes

_SHARED_MEMORY = Path("/dev/shm")
_REPETITIONS = 5
_CLOSING_SECONDS = 10.0
_LAST_PORT = 65535
_UNKNOWN_NODE = "a node whose name is not known"
_GB = 1e9
_FAILURE = 1.0  # bytes a second; what failed counts as 0

Pair = tuple[int, int]  # numbers of two nodes


@dataclass(frozen=True)
class Demands:
    """The requirements for a node.

    gpus:          exact number of GPUs.
    bandwidth:     least bytes a second; 0 requires only that no all-reduce fails.
    clock_skew:    most seconds that its clock may be off.
    shared_memory: least free bytes.
    """

    gpus: int
    bandwidth: float
    clock_skew: float
    shared_memory: int


@dataclass(frozen=True)
class NodeFacts:
    """One rank's figures of the node it is on."""

    node: str
    gpus: int
    shared_memory: int  # free bytes


@dataclass(frozen=True)
class ClusterNode:
    """A node and its ranks; figures are the worst of its ranks' figures."""

    name: str
    ranks: tuple[int, ...]
    gpus: int
    shared_memory: int


@dataclass(frozen=True)
class Survey:
    """The measurements of all nodes.

    clocks: seconds that a node's clock is ahead of the first one's.
    inside: bytes a second within a node; missing where it has one rank.
    pairs:  bytes a second over two nodes together; 0 where it failed.
    whole:  the same over all ranks.
    """

    nodes: tuple[ClusterNode, ...]
    clocks: tuple[float, ...]
    inside: Mapping[int, float]
    pairs: Mapping[Pair, float]
    whole: float


def own_facts(node: str) -> NodeFacts:
    """Measure the GPUs and the free shared memory of this rank's node."""
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.exists() else 0
    return NodeFacts(node, torch.cuda.device_count(), free)


def open_store(launch: Launch, timeout: float) -> Store:
    """Open the job's store, at rank 0, MASTER_ADDR and MASTER_PORT, without waiting for all ranks."""
    if launch.world_size == 1:
        return HashStore()
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
        given = f"MASTER_ADDR {host!r}, MASTER_PORT {port!r}"
        rule = f"ranks find each other by them; a port is a number from 1 to {_LAST_PORT}"
        raise TopologyError(Problem(given, rule, "start with srun or torchrun"))
    limit = timedelta(seconds=timeout)
    try:
        return TCPStore(host, int(port), None, launch.rank == 0, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        raise CollectiveError(
            Problem(f"rank {launch.rank}: {host}:{port} can't be reached", str(error).split("\n")[0])
        ) from None


class Board:
    """An exchange of figures between ranks: rank 0 collects them and posts the collection for all."""

    def __init__(self, store: Store, rank: int, timeout: float) -> None:
        """Exchange figures through the job's store; timeout: the seconds that a rank may be late."""
        self.store = store
        self.rank = rank
        self.timeout = timeout

    def gather(self, topic: str, mine: Any, ranks: Sequence[int]) -> list[Any]:
        """Return the figures that each of `ranks` posted, None for those that are too late; every rank calls it."""
        if self.rank in ranks:
            self.post(f"{topic}/{self.rank}", mine)
        if self.rank == 0:
            end = time.monotonic() + self.timeout
            self.post(topic, [self.find(f"{topic}/{rank}", end - time.monotonic()) for rank in ranks])
        found = self.find(topic, 2 * self.timeout)
        if found is None:
            raise CollectiveError(f"rank {self.rank}: rank 0 has not posted {topic}")
        return list(found)

    def post(self, topic: str, figures: Any) -> None:
        """Post figures under a topic of their own."""
        self.store.set(topic, json.dumps(figures))

    def find(self, topic: str, timeout: float) -> Any:
        """Return the figures under the topic; None when none have arrived in time."""
        try:
            self.store.wait([topic], timedelta(seconds=max(timeout, 0.001)))
            return json.loads(self.store.get(topic))
        except RuntimeError:
            return None

    def close(self, world_size: int) -> None:
        """Wait, on rank 0, which holds the store, until the other ranks have read it, but not for long."""
        num_closed = self.store.add("closed", 1)
        end = time.monotonic() + _CLOSING_SECONDS
        while self.rank == 0 and num_closed < world_size and time.monotonic() < end:
            time.sleep(0.05)
            num_closed = self.store.add("closed", 0)


def gather_nodes(board: Board, launch: Launch, facts: NodeFacts, names: Sequence[str]) -> tuple[ClusterNode, ...]:
    """Return the nodes in the order of their ranks.

    names: the nodes of the job, if known, with equally many ranks each; they name the nodes of absent ranks.  Raises
    TopologyError, on all ranks, when ranks are absent.
    """
    gathered = board.gather("facts", asdict(facts), range(launch.world_size))
    absent = [rank for rank, found in enumerate(gathered) if found is None]
    if absent:
        where = [_expected_node(rank, launch.world_size, names) for rank in absent]
        raise TopologyError(
            *(
                Problem(
                    f"{node}: rank {_listed(rank for rank, at in zip(absent, where, strict=True) if at == node)}"
                    f" has not reported within {board.timeout:.0f} s",
                    "every rank reaches rank 0 before anything is measured",
                    _leave_out(node),
                )
                for node in dict.fromkeys(where)
            )
        )
    seen: dict[str, list[tuple[int, NodeFacts]]] = {}
    for rank, found in enumerate(gathered):
        seen.setdefault(found["node"], []).append((rank, NodeFacts(**found)))
    return tuple(
        ClusterNode(
            name,
            tuple(rank for rank, _ in views),
            min(view.gpus for _, view in views),
            min(view.shared_memory for _, view in views),
        )
        for name, views in seen.items()
    )


def survey(board: Board, nodes: tuple[ClusterNode, ...], device: torch.device, demands: Demands, nbytes: int) -> Survey:
    """Measure clocks and bandwidths with messages of `nbytes`; every rank of the job calls it.

    torch's default process group must not exist: each group of ranks makes it for itself, and destroys it.
    """
    clocks = _compare_clocks(board, nodes)
    everyone = sorted(rank for node in nodes for rank in node.ranks)
    groups: dict[str, Sequence[int]] = {
        f"inside/{number}": node.ranks for number, node in enumerate(nodes) if len(node.ranks) > 1
    }
    meter = _Measurements(board, device, nbytes)
    inside = {int(topic.rpartition("/")[2]): figure for topic, figure in meter.round("inside", groups).items()}
    pairs: dict[Pair, float] = {}
    for number, disjoint in enumerate(ring(len(nodes))):
        pairs |= meter.pairs(f"pairs/{number}", disjoint, nodes)
    suspects, cleared = split_suspects(pairs, len(nodes), max(demands.bandwidth, _FAILURE))
    for number, disjoint in enumerate(retest_rounds(suspects, cleared)):
        pairs |= meter.pairs(f"again/{number}", disjoint, nodes)
    whole = meter.round("whole", {"whole/all": everyone} if len(everyone) > 1 else {})
    return Survey(nodes, clocks, inside, pairs, whole.get("whole/all", float("inf")))


def ring(count: int) -> list[list[Pair]]:
    """Return pairs of neighbours in a ring of `count` nodes, in rounds; no node is in two pairs of a round."""
    edges = [(number, (number + 1) % count) for number in range(count if count > 2 else count - 1)]
    last = edges[-1:] if count % 2 and count > 2 else []  # an odd ring's last node would be in two pairs of a round
    rest = edges[: len(edges) - len(last)]
    return [pairs for pairs in (rest[0::2], rest[1::2], last) if pairs]


def split_suspects(pairs: Mapping[Pair, float], count: int, floor: float) -> tuple[list[int], list[int]]:
    """Return (suspects, cleared): nodes without and with a pair that reaches the floor; a single node is neither."""
    best = {number: max(found) for number in range(count) if (found := _figures_of(pairs, number))}
    return [n for n, figure in best.items() if figure < floor], [n for n, figure in best.items() if figure >= floor]


def retest_rounds(suspects: Sequence[int], cleared: Sequence[int]) -> list[list[Pair]]:
    """Pair every suspect with a cleared node, in rounds; no rounds when none is cleared."""
    if not cleared:
        return []
    step = len(cleared)
    return [list(zip(cleared, suspects[start : start + step], strict=False)) for start in range(0, len(suspects), step)]


def node_problems(nodes: Sequence[ClusterNode], demands: Demands) -> list[Problem]:
    """Return the problems of nodes' GPUs and memory; nothing can be measured while GPUs are missing."""
    problems = []
    for node in nodes:
        if node.gpus != demands.gpus:
            rule = f"every node has {demands.gpus} GPUs (--gpus-per-node)"
            problems.append(Problem(f"{node.name}: {node.gpus} GPUs", rule, _leave_out(node.name)))
        if node.shared_memory < demands.shared_memory:
            given = f"{node.name}: {format_bytes(node.shared_memory)} of shared memory free"
            rule = f"at least {format_bytes(demands.shared_memory)} (--min-shared-memory)"
            problems.append(Problem(given, rule, f"clear {_SHARED_MEMORY} there, or {_leave_out(node.name)}"))
    return problems


def survey_problems(found: Survey, demands: Demands) -> list[Problem]:
    """Return the problems of the measurements, with the names of the nodes where they are."""
    return _clock_problems(found, demands.clock_skew) + _bandwidth_problems(found, demands.bandwidth)


def _clock_problems(found: Survey, limit: float) -> list[Problem]:
    """Compare clocks with their median, since the first node's may be the wrong one."""
    middle = statistics.median_low(found.clocks)
    return [
        Problem(
            f"{node.name}: its clock is {clock - middle:+.3f} s off the others'",
            f"clocks differ by at most {limit:g} s (--max-clock-skew)",
            f"set it (chronyc makestep), or {_leave_out(node.name)}",
        )
        for node, clock in zip(found.nodes, found.clocks, strict=True)
        if abs(clock - middle) > limit
    ]


def _bandwidth_problems(found: Survey, floor: float) -> list[Problem]:
    names = [node.name for node in found.nodes]
    rule = f"all-reduces reach {floor / _GB:g} GB/s (--min-bandwidth)" if floor else "all-reduces complete"
    floor = max(floor, _FAILURE)
    suspects, cleared = split_suspects(found.pairs, len(names), floor)
    inside = [
        Problem(f"{names[number]}: {_rate(figure)} between its own ranks", rule, _leave_out(names[number]))
        for number, figure in found.inside.items()
        if figure < floor
    ]
    if suspects and not cleared:
        listed = ", ".join(f"{names[a]} - {names[b]}: {_rate(figure)}" for (a, b), figure in found.pairs.items())
        given = f"no two nodes are fast together: {listed}"
        return [*inside, Problem(given, rule, "check the network (NCCL_DEBUG=INFO), or each of them")]
    slow = [
        Problem(
            f"{names[number]}: {_rate(max(_figures_of(found.pairs, number)))} at best beside another node",
            rule,
            _leave_out(names[number]),
        )
        for number in suspects
    ]
    links = [
        Problem(f"{names[a]} and {names[b]}: {_rate(figure)} together, both faster beside others", rule)
        for (a, b), figure in found.pairs.items()
        if figure < floor and a in cleared and b in cleared
    ]
    if found.whole < floor and not (inside or slow or links):
        given = f"all nodes together: {_rate(found.whole)}, and no two of them are slow"
        return [Problem(given, rule, "check the switches between them")]
    return inside + slow + links


def table(found: Survey) -> list[str]:
    """Format the survey as lines, a node each; bandwidths in GB/s."""
    width = max(4, *(len(node.name) for node in found.nodes))
    lines = [f"{'node':<{width}}  ranks  GPUs  free shm    clock (s)  inside  with neighbours"]
    for number, node in enumerate(found.nodes):
        beside = ", ".join(
            f"{found.nodes[b if a == number else a].name} {figure / _GB:.2f}"
            for (a, b), figure in found.pairs.items()
            if number in (a, b)
        )
        inside = f"{found.inside[number] / _GB:.2f}" if number in found.inside else "-"
        lines.append(
            f"{node.name:<{width}}  {len(node.ranks):>5}  {node.gpus:>4}  {format_bytes(node.shared_memory):>10}"
            f"  {found.clocks[number]:>+9.3f}  {inside:>6}  {beside or '-'}"
        )
    lines += [f"slow link: {line}"] if (line := slow_link(found)) else []
    return [*lines, f"all ranks together: {_rate(found.whole)}"] if found.pairs or found.inside else lines


def slow_link(found: Survey) -> str:
    """Return the slowest link between two nodes beside the slowest inside one, as text; "" where none is across."""
    if not found.pairs:
        return ""
    (a, b), across = min(found.pairs.items(), key=lambda item: item[1])
    text = f"{found.nodes[a].name} - {found.nodes[b].name}, {_rate(across)}"
    if not found.inside:
        return text
    node, inside = min(found.inside.items(), key=lambda item: item[1])
    times = f", {inside / across:.0f} times as fast" if across else ""
    return f"{text}; the slowest inside a node is {found.nodes[node].name}'s, {_rate(inside)}{times}"


class _Measurements:
    """All-reduces of groups of ranks, whose figures are the same on every rank."""

    def __init__(self, board: Board, device: torch.device, nbytes: int) -> None:
        self._board = board
        self._device = device
        self._message = torch.zeros(max(nbytes // 4, 1), dtype=torch.float32, device=device)

    def pairs(self, topic: str, disjoint: Sequence[Pair], nodes: Sequence[ClusterNode]) -> dict[Pair, float]:
        """Return the bytes a second of pairs that have no node in common."""
        groups = {f"{topic}/{a}-{b}": sorted((*nodes[a].ranks, *nodes[b].ranks)) for a, b in disjoint}
        return dict(zip(disjoint, self.round(topic, groups).values(), strict=True))

    def round(self, topic: str, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """Return the bytes a second of each group, all at once; 0 where a group failed."""
        mine = next((self._try(name, ranks) for name, ranks in groups.items() if self._board.rank in ranks), None)
        figures = self._board.gather(topic, mine, [ranks[0] for ranks in groups.values()])
        return {name: figure or 0.0 for name, figure in zip(groups, figures, strict=True)}

    def _try(self, name: str, ranks: Sequence[int]) -> float:
        try:
            self._join(name, ranks)
            seconds = self._time()
        except RuntimeError:
            return 0.0
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return 2 * (len(ranks) - 1) / len(ranks) * self._message.nbytes / seconds

    def _join(self, name: str, ranks: Sequence[int]) -> None:
        """Make the group, and no other ranks, the default process group, so that groups fail independently."""
        on_gpu = self._device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore(name, self._board.store),
            rank=ranks.index(self._board.rank),
            world_size=len(ranks),
            timeout=timedelta(seconds=self._board.timeout / 2),  # rank 0 waits longer for the figure
            device_id=self._device if on_gpu else None,
        )

    def _time(self) -> float:
        """Return the median seconds of an all-reduce; the first one of all makes connections."""
        seconds = []
        for _ in range(1 + _REPETITIONS):
            start = time.perf_counter()
            dist.all_reduce(self._message)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:])


def _compare_clocks(board: Board, nodes: Sequence[ClusterNode]) -> tuple[float, ...]:
    """Return the seconds that each node is ahead of the first, from the shortest of a few round trips."""
    figures = [0.0]
    for number, node in enumerate(nodes[1:], 1):
        trips = [_round_trip(board, f"clock/{number}/{trip}", node.ranks[0]) for trip in range(_REPETITIONS)]
        figures.append(min(trips)[1])
    return tuple(board.gather("clocks", figures, [0])[0])


def _round_trip(board: Board, topic: str, other: int) -> tuple[float, float]:
    """Return (seconds there and back, seconds that the other's clock is ahead), on rank 0."""
    if board.rank == other:
        board.find(topic, board.timeout)
        board.post(f"{topic}/back", time.time())
    if board.rank != 0:
        return 0.0, 0.0
    start = time.time()
    board.post(topic, None)
    answer = board.find(f"{topic}/back", board.timeout)
    end = time.time()
    if answer is None:
        raise CollectiveError(f"rank {other} has stopped responding")
    return end - start, answer - (start + end) / 2


def _figures_of(pairs: Mapping[Pair, float], number: int) -> list[float]:
    return [figure for pair, figure in pairs.items() if number in pair]


def _expected_node(rank: int, world_size: int, names: Sequence[str]) -> str:
    return names[rank * len(names) // world_size] if names else _UNKNOWN_NODE


def _listed(ranks: Any) -> str:
    return ", ".join(map(str, ranks))


def _rate(figure: float) -> str:
    return f"{figure / _GB:.2f} GB/s"


def _leave_out(name: str) -> str:
    if name == _UNKNOWN_NODE:
        return "--nodes A,B names the job's nodes in the order of ranks, and so the one that is absent"
    return f"leave the node out (sbatch --exclude={name})"
