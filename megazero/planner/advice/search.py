"""The search for the fastest layouts that fit: bounds put all in an order, and dry runs try them until ten are found.

Layouts are taken by their least seconds, times how far bounds of their like were off so far (`expected.py`), and those
first that are expected to fit; one whose least memory is more than the machine has is left out.  Of layouts that differ
in nothing but recomputation and the homes of states, those that save more are slower, so that they are tried only where
others do not fit.  The search ends where no bound is below the tenth time found: then no other layout is faster.  It
also ends after a number of dry runs, or of seconds, and reports how many layouts it has left.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megazero.parallel.nodes import Nodes
from megazero.planner.advice.bounds import Bound, Bounds
from megazero.planner.advice.choices import AdvisedRun, LayoutChoice, choices, legal
from megazero.planner.advice.expected import Expectation
from megazero.planner.advice.shallow import Measured, measure
from megazero.planner.dry.rank import DryJob
from megazero.planner.hardware import Hardware
from megazero.planner.job_plan import DryRuns

SHOWN = 10


class Limit(NamedTuple):
    """The most that a search may run dry: layouts, and seconds of this process."""

    runs: int
    seconds: float

    def begin(self, search: "Search") -> Callable[[], bool]:
        """Return the function that is true once the limit is reached, counted from now."""
        runs, seconds = search.runs + self.runs, time.process_time() + self.seconds
        return lambda: search.runs >= runs or time.process_time() >= seconds


LIMIT, SHORT_LIMIT = Limit(60, 24.0), Limit(6, 6.0)


class Candidate(NamedTuple):
    """A layout on so many nodes, and its bounds."""

    choice: LayoutChoice
    nodes: Nodes
    bound: Bound


class Found(NamedTuple):
    """A layout that has been run dry."""

    choice: LayoutChoice
    nodes: Nodes
    measured: Measured


@dataclass
class Search:
    """A search for layouts of one run on a machine, and all that it has run dry.

    tried: the layouts that a start would take, run dry; None: it refuses them.  report: gets a line before each run.
    samples: their dry runs, which layouts have in part in common.
    """

    run: AdvisedRun
    vocab_size: int
    hardware: Hardware
    report: Callable[[str], None] = lambda line: None
    tried: dict[tuple[LayoutChoice, Nodes], Measured | None] = field(default_factory=dict)
    samples: DryRuns = field(default_factory=DryRuns, repr=False)

    @property
    def runs(self) -> int:
        """The number of layouts that have been run dry."""
        return sum(measured is not None for measured in self.tried.values())

    def candidates(self, nodes: Nodes, *, least: bool = False) -> list[Candidate]:
        """Return all layouts on these nodes with their bounds; least: those alone that need little memory."""
        bounds = Bounds(self.run, self.vocab_size, self.hardware, nodes)
        found = (one for one in choices(self.run, nodes) if not least or _needs_little(one))
        return [Candidate(choice, nodes, bounds.of(choice)) for choice in found]

    def measured(self, choice: LayoutChoice, nodes: Nodes) -> Measured | None:
        """Return what a layout takes; None if a start would refuse it."""
        key = choice, nodes
        if key not in self.tried:
            wanted = legal(self.run, choice, nodes)
            if wanted is not None:
                self.report(f"run dry: {choice.describe()}, {nodes.describe()}")
                job = DryJob(wanted.config, wanted.vocab_size, nodes, is_gpu=self.hardware.device == "cuda")
                self.tried[key] = measure(job, self.hardware, self.samples)
            else:
                self.tried[key] = None
        return self.tried[key]

    def with_memory(self, factor: float) -> "Search":
        """Return the same search for devices with so many times the memory; what was run dry serves both."""
        return replace(self, hardware=replace(self.hardware, memory_bytes=round(self.hardware.memory_bytes * factor)))


class SearchOutcome(NamedTuple):
    """The fastest layouts that fit, the fastest first.  left: candidates whose bounds are below the last one's time."""

    found: tuple[Found, ...]
    left: int


def fastest(
    search: Search, candidates: Iterable[Candidate], *, count: int = SHOWN, limit: Limit = LIMIT
) -> SearchOutcome:
    """Return the `count` fastest layouts that fit, as far as the limit allows.

    Layouts that round what they send are tried last: they are another training.
    """
    has = search.hardware.memory_bytes
    inside = [one for one in candidates if one.bound.total <= has]
    found: list[Found] = []
    left = 0
    end = limit.begin(search)
    for rounds in (False, True):
        left += _take(search, [one for one in inside if one.choice.rounds == rounds], found, count, end)
    return SearchOutcome(tuple(found[:count]), left)


class _Entry(NamedTuple):
    """A candidate in a search.

    key: what it has in common with those that differ from it in what they save alone.  traits: its layout's.
    """

    one: Candidate
    key: tuple[LayoutChoice, int]
    saving: "_Saving"
    traits: tuple[float, ...]


def _entry(one: Candidate) -> _Entry:
    choice = one.choice
    plain = choice._replace(offload_optimizer="none", offload_param="none", recompute_granularity="none")
    return _Entry(one, (plain, one.nodes.count), _saving(choice), choice.traits)


def _take(
    search: Search, candidates: Sequence[Candidate], found: list[Found], count: int, is_over: Callable[[], bool]
) -> int:
    """Add layouts that fit to those found, which are kept in the order of their times; return how many are left."""
    has = search.hardware.memory_bytes
    expectation = Expectation()
    fitting: dict[tuple[LayoutChoice, int], list[_Saving]] = defaultdict(list)
    too_large: dict[tuple[LayoutChoice, int], list[_Saving]] = defaultdict(list)
    left = [_entry(one) for one in candidates]

    def is_settled(each: _Entry) -> bool:
        """Return True if a layout that saves no more fits, or one that saves no less does not."""
        return any(each.saving.covers(other) for other in fitting.get(each.key, ())) or any(
            other.covers(each.saving) for other in too_large.get(each.key, ())
        )

    while True:
        last = found[count - 1].measured.seconds if len(found) >= count else float("inf")
        left = [each for each in left if each.one.bound.seconds <= last and not is_settled(each)]
        if not left or is_over():
            return len(left)
        entry = left.pop(_next(left, expectation, has))
        one = entry.one
        measured = search.measured(one.choice, one.nodes)
        if measured is None:
            continue
        expectation.add(entry.traits, measured.seconds / one.bound.seconds, measured.total / max(one.bound.total, 1))
        if not measured.fits(search.hardware):
            too_large[entry.key].append(entry.saving)
            continue
        fitting[entry.key].append(entry.saving)
        mates = [_entry(Candidate(*each[:2], one.bound)) for each in found]
        needless = [mate.key == entry.key and mate.saving.covers(entry.saving) for mate in mates]
        found[:] = [each for each, is_needless in zip(found, needless, strict=True) if not is_needless]
        found.append(Found(*one[:2], measured))
        found.sort(key=lambda each: each.measured.seconds)


def _next(left: Sequence[_Entry], expectation: Expectation, has: int) -> int:
    """Return the index of the layout to try: of those expected to fit the fastest, and of equals what saves less."""
    factors = expectation.factors([each.traits for each in left])
    bounds = (each.one.bound for each in left)
    expected = [
        (bound.total * memory > has, bound.seconds * seconds)
        for bound, (seconds, memory) in zip(bounds, factors, strict=True)
    ]
    return min(range(len(left)), key=lambda at: (*expected[at], left[at].saving))


class _Saving(NamedTuple):
    """The savings of a layout on a device: the kinds of state elsewhere, and how far it recomputes."""

    homes: int
    recomputed: int

    def covers(self, other: "_Saving") -> bool:
        """Return True if the other one saves no more in any respect."""
        return self.homes >= other.homes and self.recomputed >= other.recomputed


def _saving(choice: LayoutChoice) -> _Saving:
    homes = (choice.offload_optimizer != "none") + (choice.offload_param != "none")
    return _Saving(homes, ("none", "selective", "full").index(choice.recompute_granularity))


def _needs_little(choice: LayoutChoice) -> bool:
    is_plain = choice.pipeline_schedule == "auto" and choice.num_layers_per_virtual_pipeline_stage is None
    return choice.recompute_granularity == "full" and choice.micro_batch_size == 1 and is_plain and not choice.rounds


def nearest(search: Search, candidates: Iterable[Candidate], given: LayoutChoice) -> Found | None:
    """Return a layout that fits and differs least from the given one, of these the fastest; None if none was found."""
    has = search.hardware.memory_bytes
    near = sorted(
        (one for one in candidates if one.bound.total <= has),
        key=lambda one: (one.choice.rounds, one.choice.changes(given), one.bound.seconds),
    )
    is_over = SHORT_LIMIT.begin(search)
    for one in near:
        if is_over():
            break
        measured = search.measured(one.choice, one.nodes)
        if measured is not None and measured.fits(search.hardware):
            return Found(*one[:2], measured)
    return None


def smallest(search: Search, counts: Iterable[int]) -> Found | None:
    """Return the fastest layout found that fits the fewest of these numbers of nodes; None if there is none.

    A number is passed over if no layout's least memory fits, or none of the first tried, which need least.
    """
    has = search.hardware.memory_bytes
    is_over = SHORT_LIMIT.begin(search)
    for count in counts:
        nodes = Nodes((search.hardware.devices_per_node,) * count)
        fitting = [one for one in search.candidates(nodes, least=True) if one.bound.total <= has]
        fitting.sort(key=lambda one: (one.bound.total, one.bound.seconds))
        for one in fitting[:2]:
            if is_over():
                return None
            measured = search.measured(one.choice, one.nodes)
            if measured is not None and measured.fits(search.hardware):
                faster = fastest(search, search.candidates(nodes), count=1, limit=SHORT_LIMIT).found
                return min((Found(*one[:2], measured), *faster), key=lambda each: each.measured.seconds)
    return None


def node_counts(most: int) -> Iterator[int]:
    """Yield numbers of nodes in growing steps: all up to 8, then about an eighth more each time, up to `most`."""
    count = 1
    while count <= most:
        yield count
        count += max(count // 8, 1)
