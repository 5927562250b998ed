"""Every layout that the project's own rules allow, some of them drawn, and a few that hold all pairs of choices.  Pure.

A *layout* is a choice in each of the DIMENSIONS.  It is *legal* if the rules between settings find no problem in the
run it makes, and have no notice that one of its settings does nothing.  A *pairwise cover* is a list of legal layouts
in which every two choices that go together in some legal layout go together.

Dimensions are tried one after the other, with the rest at the defaults of `Layout`, and what is not legal is not
carried on: defaults stand back, so that what they don't make legal nothing does.  `is_legal` itself is asked about all
that comes out.
"""

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from support.configs import make_run
from support.training import SETTINGS, Cell

from megazero.config import derived
from megazero.config.run import FIELDS, RunConfig
from megazero.config.values import ParsedValue
from megazero.rules import moot
from megazero.rules import run as rules

MOST_PROCESSES = 8
GLOBAL_BATCH = 24  # divides by every number of copies and micro-batches here
Grid = Mapping[str, Sequence[Any]]
_SECTIONS = {info.name: info.section for info in FIELDS}

# The order matters: the number of micro-batches comes before the schedules that ask for a multiple.
DIMENSIONS: Grid = {
    "tp": (1, 2, 3, 4, 6),
    "pp": (1, 2, 3, 4),
    "dp": (1, 2, 3, 4, 6, 8),
    "accumulation": (1, 3, 4, 6),
    "chunks": (1, 2, 3),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble"),
    "stage": (0, 1, 2, 3),
    "reshard_after": ("microbatch", "window"),
    "sequence_parallel": (False, True),
    "recompute": ("none", "selective", "full"),
    "partitions_checkpoints": (False, True),
}


@dataclass(frozen=True)
class Layout:
    """One choice in each dimension; accumulation: micro-batches of a step, chunks: of a pipeline stage."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    accumulation: int = 1
    chunks: int = 1
    schedule: str = "auto"
    stage: int = 0
    reshard_after: str = "microbatch"
    sequence_parallel: bool = False
    recompute: str = "none"
    partitions_checkpoints: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def num_layers(self) -> int:
        """Of the model it trains: enough for every chunk, and 4 at least."""
        return max(4, self.pp * self.chunks)

    @property
    def settings(self) -> dict[str, Any]:
        """What a run is told beside degrees, ZeRO stage and micro-batches."""
        return {
            "num_layers": self.num_layers,
            "global_batch_size": GLOBAL_BATCH,
            "pipeline_schedule": self.schedule,
            "num_layers_per_virtual_pipeline_stage": _length(self),
            "sequence_parallel": self.sequence_parallel,
            "zero3_reshard_after": self.reshard_after,
            "recompute_granularity": self.recompute,
            "partition_activations": self.partitions_checkpoints,
        }

    def cell(self, **changes: Any) -> Cell:
        """The training run."""
        degrees: dict[str, Any] = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        return Cell(**degrees, stage=self.stage, accumulation=self.accumulation, settings=self.settings, **changes)

    def __str__(self) -> str:
        """`tp2 pp2 dp1 m4 1f1b zero3 window`: what it has, and of options that may be left out those that are on."""
        chunks = f"v{self.chunks}" if self.chunks > 1 else ""
        window = "window" if self.reshard_after == "window" else ""
        sequence, sliced = "sp" * self.sequence_parallel, "pa" * self.partitions_checkpoints
        recompute = "" if self.recompute == "none" else self.recompute
        words = (f"tp{self.tp} pp{self.pp} dp{self.dp} m{self.accumulation}", self.schedule, chunks)
        return " ".join(filter(None, (*words, f"zero{self.stage}", window, sequence, recompute, sliced)))


def _length(layout: Layout) -> int | None:
    """Layers of a chunk, where there are several of them."""
    return layout.num_layers // (layout.pp * layout.chunks) if layout.chunks > 1 else None


@functools.cache
def _base() -> RunConfig:
    """A run's settings, but for the layout; of a corpus the rules only ask whether its files are there."""
    return make_run(**{**SETTINGS, "mock_data": True})


def run_config(layout: Layout) -> RunConfig:
    """The run of `layout.cell()`, on mock data; micro-batches of a sample where the global batch has too few."""
    copies = layout.dp * layout.accumulation
    settings = {
        **layout.settings,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "micro_batch_size": max(1, GLOBAL_BATCH // copies),
        "zero_stage": layout.stage,
    }
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        sections.setdefault(_SECTIONS[name], {})[name] = value
    base = _base()
    return replace(base, **{name: replace(getattr(base, name), **section) for name, section in sections.items()})


@functools.cache
def is_legal(layout: Layout) -> bool:
    """Whether the project's rules have nothing against the run, no notice about it, and no setting in it is moot.

    A number of micro-batches that doesn't divide the global batch makes a run with another number, or none.
    """
    config, size = run_config(layout), layout.world_size
    given = [ParsedValue(name, value, name) for name, value in layout.settings.items()]
    if rules.check(config, size) or rules.advice(config, size) or moot.of_a_run(config, given).problems:
        return False
    return derived.num_micro_batches(config, size) == layout.accumulation


def legal_layouts(grid: Grid = DIMENSIONS, most_processes: int = MOST_PROCESSES) -> Iterator[Layout]:
    """All of them, in the order of the dimensions' values."""

    def carry_on(layout: Layout, names: Sequence[str]) -> Iterator[Layout]:
        if not names:
            yield layout
            return
        for value in grid[names[0]]:
            longer = replace(layout, **{names[0]: value})
            if longer.world_size <= most_processes and is_legal(longer):
                yield from carry_on(longer, names[1:])

    return carry_on(Layout(), tuple(grid))


def any_layout(generator: random.Random, grid: Grid = DIMENSIONS) -> Layout:
    """One of the whole grid, legal or not."""
    return Layout(**{name: generator.choice(values) for name, values in grid.items()})


def pairs(layout: Layout) -> frozenset[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two of its choices."""
    return frozenset(combinations(vars(layout).items(), 2))


def pairwise_cover(layouts: Sequence[Layout]) -> list[Layout]:
    """Some of the layouts that have among them every pair that any of them has.

    Greedy: always a layout with most pairs that are still missing, or somewhat fewer at much less cost; then those go
    that the rest make up for, the dearest first.
    """
    bits: dict[Any, int] = {}
    masks = [_mask(layout, bits) for layout in layouts]
    order = sorted(range(len(layouts)), key=lambda index: _cost(layouts[index]))
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        best = max(order, key=lambda index: (masks[index] & missing).bit_count() ** 4 / _cost(layouts[index]))
        chosen.append(best)
        missing &= ~masks[best]
    for index in sorted(chosen, key=lambda index: _cost(layouts[index]), reverse=True):
        others = [other for other in chosen if other != index]
        if functools.reduce(int.__or__, (masks[other] for other in others)).bit_count() == len(bits):
            chosen = others
    return sorted((layouts[index] for index in chosen), key=lambda layout: (layout.world_size, _cost(layout)))


def _mask(layout: Layout, bits: dict[Any, int]) -> int:
    """Its pairs as bits, which are given out in the order in which pairs are met."""
    numbers = (bits.setdefault(pair, len(bits)) for pair in combinations(vars(layout).items(), 2))
    return functools.reduce(int.__or__, (1 << number for number in numbers))


def _cost(layout: Layout) -> int:
    """What a step takes on few cores, roughly: processes, passes, and tensor-parallel messages in every layer."""
    return layout.world_size * layout.num_layers * (2 + layout.accumulation) * (1 + layout.tp)
