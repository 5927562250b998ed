"""Tests the search on layouts whose times and bytes are made by a formula, against trying all of them."""

import itertools
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from megazero.parallel.nodes import Nodes
from megazero.planner.advice.bounds import Bound
from megazero.planner.advice.choices import LayoutChoice
from megazero.planner.advice.search import Candidate, Limit, Search, fastest, nearest, node_counts
from megazero.planner.machines import MACHINES

ONE = Nodes((8,))
GB = 10**9


@dataclass(frozen=True)
class Made:
    """The figures of a made-up layout."""

    seconds: float
    total: int

    def fits(self, hardware: Any) -> bool:
        return bool(self.total <= hardware.memory_bytes)


class MadeSearch(Search):
    """A search whose layouts have made-up figures; what has none is refused."""

    def measured(self, choice: LayoutChoice, nodes: Nodes) -> Any:
        figures: Any = made(choice)
        self.tried[choice, nodes] = figures
        return figures


@cache
def made(choice: LayoutChoice) -> Made | None:
    """Return figures of a layout: recomputation and host memory save bytes and cost time."""
    drawn = random.Random(str((choice.tensor_model_parallel_size, choice.micro_batch_size, choice.zero_stage)))
    seconds, total = drawn.uniform(1, 3), drawn.uniform(60, 200) * GB
    seconds *= {"none": 1.0, "selective": 1.1, "full": 1.3}[choice.recompute_granularity]
    total *= {"none": 1.0, "selective": 0.9, "full": 0.5}[choice.recompute_granularity]
    if choice.offload_optimizer == "cpu":
        seconds, total = 2 * seconds, total - 20 * GB
    return None if choice.tensor_model_parallel_size == 5 else Made(seconds, round(total))


@cache
def candidates(seed: int) -> list[Candidate]:
    drawn = random.Random(seed)
    found = []
    for tensor in range(1, 8):
        for micro in (1, 2):
            for stage in (1, 2):
                share = drawn.uniform(0.5, 1.0)
                for recomputed in ("none", "selective", "full"):
                    for home in ("none", "cpu"):
                        choice = LayoutChoice(
                            tensor,
                            zero_stage=stage,
                            micro_batch_size=micro,
                            recompute_granularity=recomputed,
                            offload_optimizer=home,
                        )
                        real = made(choice) or Made(2.0, GB)
                        found.append(Candidate(choice, ONE, Bound({"": int(real.total * share)}, real.seconds * share)))
    return found


def search() -> MadeSearch:
    run: Any = None
    return MadeSearch(run, 100, MACHINES["dgx-h100"])


@cache
def best_of_all(memory: int) -> list[float]:
    """Return the times of the layouts that fit but for those beside which one fits that saves no more."""
    fitting = [one.choice for one in candidates(0) if (real := made(one.choice)) is not None and real.total <= memory]
    saved = ("none", "cpu"), ("none", "selective", "full")

    def saves_more(choice: LayoutChoice, other: LayoutChoice) -> bool:
        pairs = [(one.offload_optimizer, one.recompute_granularity) for one in (choice, other)]
        alike = choice._replace(offload_optimizer="", recompute_granularity="") == other._replace(
            offload_optimizer="", recompute_granularity=""
        )
        places = [[kinds.index(value) for kinds, value in zip(saved, pair, strict=True)] for pair in pairs]
        return alike and pairs[0] != pairs[1] and all(a >= b for a, b in zip(*places, strict=True))

    left = [one for one in fitting if not any(saves_more(one, other) for other in fitting)]
    return sorted(figures.seconds for one in left if (figures := made(one)) is not None)


def test_the_fastest_are_those_of_trying_all() -> None:
    for seed in range(20):
        for count in (1, 5, 10):
            own = search()
            outcome = fastest(own, candidates(seed), count=count)
            assert outcome.left == 0
            assert [one.measured.seconds for one in outcome.found] == best_of_all(80 * GB)[:count]
            assert own.runs < len(candidates(seed))


def test_what_a_limit_leaves_is_told() -> None:
    own = search()
    outcome = fastest(own, candidates(1), count=10, limit=Limit(3, 1e9))
    assert own.runs == 3 and outcome.left > 50
    assert fastest(search(), candidates(1), limit=Limit(9, 0.0)).found == ()


def test_more_memory_serves_the_same_dry_runs() -> None:
    own = search()
    fastest(own, candidates(2), count=1)
    larger = own.with_memory(2.0)
    assert larger.tried is own.tried and larger.hardware.memory_bytes == 2 * own.hardware.memory_bytes
    found = fastest(larger, candidates(2), count=1).found
    assert found[0].measured.seconds == best_of_all(160 * GB)[0]


def test_the_nearest_differs_least() -> None:
    given = LayoutChoice(3, zero_stage=1, micro_batch_size=1)
    real = made(given)
    assert real is not None
    found = nearest(search(), candidates(3), given)
    assert found is not None and found.measured.fits(MACHINES["dgx-h100"])
    for one in candidates(3):
        other = made(one.choice)
        if other is not None and other.total <= 80 * GB and one.bound.total <= 80 * GB:
            assert one.choice.changes(given) >= found.choice.changes(given)


def test_numbers_of_nodes_grow() -> None:
    assert list(node_counts(12)) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    counts = list(node_counts(1000))
    assert counts[-1] <= 1000 and len(counts) < 60
    assert all(after - before <= max(before // 8, 1) for before, after in itertools.pairwise(counts))
