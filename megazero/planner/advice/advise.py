"""An advisor's answer: the fastest layouts that fit, what each limit costs, the smallest cluster, and what binds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megazero.parallel.nodes import Nodes
from megazero.planner.advice.choices import flags
from megazero.planner.advice.search import (
    LIMIT,
    SHORT_LIMIT,
    Candidate,
    Found,
    Limit,
    Search,
    SearchOutcome,
    fastest,
    nearest,
    node_counts,
    smallest,
)
from megazero.planner.hardware import LINKS, Hardware

_MORE_MEMORY = 1.1
_FASTER = 2.0
_MOST_NODES = 16  # times those that there are
_LEAST_GAIN = 0.01


class Gain(NamedTuple):
    """The cost of one limit: what is changed, and the layout and the seconds of a step then."""

    changed: str
    found: Found
    seconds: float


@dataclass(frozen=True)
class Advice:
    """Advice on a run.

    nodes: those that there are.  layouts: how many bounds were computed, in_memory: of these within the memory.
    outcome: the fastest.  closest: where nothing fits, the layout that needs least.  near: of those that fit, the one
    nearest to the given layout, on more nodes if need be.  smallest: of the fewest nodes.
    """

    search: Search
    nodes: Nodes
    layouts: int
    in_memory: int
    outcome: SearchOutcome
    gains: tuple[Gain, ...] = ()
    smallest: Found | None = None
    closest: Found | None = None
    near: Found | None = None

    @property
    def fits(self) -> bool:
        return bool(self.outcome.found)


def advise(search: Search, nodes: Sequence[Nodes], *, limit: Limit = LIMIT) -> Advice:
    """Return the advice on a run.  nodes: the sets of nodes that it may use, the largest first."""
    candidates = [one for each in nodes for one in search.candidates(each)]
    in_memory = sum(one.bound.total <= search.hardware.memory_bytes for one in candidates)
    outcome = fastest(search, candidates, limit=limit)
    count = nodes[0].count
    if outcome.found:
        few = smallest(search, node_counts(count)) if count > 1 else None
        gains = (*_with_memory(search, candidates, outcome.found[0]), *_with_links(search, outcome.found[0]))
        return Advice(search, nodes[0], len(candidates), in_memory, outcome, gains, few)
    closest, near = remedies(search, candidates, nodes[0])
    return Advice(search, nodes[0], len(candidates), in_memory, outcome, closest=closest, near=near)


def remedies(search: Search, candidates: Sequence[Candidate], nodes: Nodes) -> tuple[Found | None, Found | None]:
    """Return the layout that needs least on these nodes, and the nearest to the given one that fits them, or more."""
    near = nearest(search, candidates, search.run.given)
    if near is not None:
        return None, near
    least = sorted(candidates, key=lambda one: (one.bound.total, one.bound.seconds))
    closest = next((Found(*one[:2], found) for one in least if (found := search.measured(*one[:2])) is not None), None)
    ranks, per_node = nodes.world_size, search.hardware.devices_per_node
    more = (count for count in node_counts(_MOST_NODES * nodes.count) if count * per_node > ranks)
    return closest, smallest(search, more)


def _with_memory(search: Search, candidates: Sequence[Candidate], best: Found) -> Iterator[Gain]:
    hardware = search.hardware

    def is_too_large(one: Candidate) -> bool:
        tried = search.tried.get(one[:2])
        return one.bound.total > hardware.memory_bytes or (tried is not None and not tried.fits(hardware))

    above = list(filter(is_too_large, candidates))
    larger = fastest(search.with_memory(_MORE_MEMORY), above, count=1, limit=SHORT_LIMIT).found
    if larger and larger[0].measured.seconds < best.measured.seconds * (1 - _LEAST_GAIN):
        yield Gain(f"{100 * (_MORE_MEMORY - 1):.0f} % more device memory", larger[0], larger[0].measured.seconds)


def _with_links(search: Search, best: Found) -> Iterator[Gain]:
    """Yield what a faster link, or faster products, would give the fastest layout."""
    hardware = search.hardware
    changed: dict[str, Hardware] = {}
    for kind, title in LINKS.items():
        link = hardware.links[kind]
        faster = replace(link, rates=link.rates.times(_FASTER))
        changed[f"links {title} twice as fast"] = replace(hardware, links={**hardware.links, kind: faster})
    matrix = {name: one.times(_FASTER) for name, one in hardware.matrix.items()}
    changed["matrix products twice as fast"] = replace(hardware, matrix=matrix)
    for name, machine in changed.items():
        seconds = best.measured.seconds_on(machine)
        if seconds < best.measured.seconds * (1 - _LEAST_GAIN):
            yield Gain(name, best, seconds)


def to_json(advice: Advice) -> dict[str, Any]:
    """Return all advice, in bytes and seconds."""
    search = advice.search
    optional = {"smallest": advice.smallest, "closest": advice.closest, "nearest": advice.near}
    return {
        "hardware": search.hardware.name,
        "nodes": advice.nodes.count,
        "global_batch_size": search.run.samples,
        "fits": advice.fits,
        "layouts": advice.layouts,
        "bounds_in_memory": advice.in_memory,
        "run_dry": search.runs,
        "not_excluded": advice.outcome.left,
        "device_bytes": search.hardware.memory_bytes,
        "fastest": [found_to_json(search, found) for found in advice.outcome.found],
        "gains": [
            {"changed": gain.changed, "step_seconds": gain.seconds, **found_to_json(search, gain.found)}
            for gain in advice.gains
        ],
        **{name: None if found is None else found_to_json(search, found) for name, found in optional.items()},
    }


def found_to_json(search: Search, found: Found) -> dict[str, Any]:
    """Return a layout that was run dry, with its figures and its words."""
    measured = found.measured
    return {
        "settings": found.choice._asdict(),
        "nodes": found.nodes.count,
        "flags": list(flags(search.run, found.choice)),
        "changes_training": found.choice.rounds,
        "fits": measured.fits(search.hardware),
        "step_seconds": measured.seconds,
        "tokens_per_second": measured.tokens / measured.seconds,
        "mfu": measured.mfu,
        "memory": dict(measured.memory),
        "memory_bytes": measured.total,
        "fullest": {"rank": measured.place[0], "part": measured.place[1], "category": measured.fullest},
        "host_bytes_of_a_node": measured.host_bytes,
        "binding": measured.step.binding,
        "extrapolated": bool(measured.depth or measured.width),
    }
