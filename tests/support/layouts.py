"""Lists every layout that megazero's rules allow, draws random ones, and chooses a few that hold all pairs of choices.

A *layout* is a choice in each of the DIMENSIONS.  It is *legal* if the rules between settings find no problem in its
run, and give no notice that one of its settings has no effect.  A *pairwise cover* is a list of legal layouts in which
every two choices that occur together in some legal layout occur together.

Dimensions are tried one after the other, with the rest at the defaults of `Layout`, and a partial layout that is not
legal is dropped: the defaults restrict nothing, so that no other choice in the rest would make it legal.  Every layout
that comes out has itself passed `is_legal`.
"""

import functools
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

from support.configs import make_run
from support.families import FAMILIES
from support.training import SETTINGS, Cell

from megazero.config import derived
from megazero.config.run import FIELDS, RunConfig
from megazero.config.values import ParsedValue
from megazero.rules import moot
from megazero.rules import run as rules

MOST_PROCESSES = 8
GLOBAL_BATCH = 24  # divisible by every dp and by every number of micro-batches here
Grid = Mapping[str, Sequence[Any]]
_SECTIONS = {info.name: info.section for info in FIELDS}

# The order matters: the number of micro-batches comes before the schedules that require a multiple.
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
    "home": ("device", "host", "files"),
}
# {home: the device that offloading names}
_DEVICES = MappingProxyType({"device": "none", "host": "cpu", "files": "nvme"})


@dataclass(frozen=True)
class Layout:
    """One choice in each dimension.

    accumulation: micro-batches of a step.  chunks: model chunks of a pipeline stage.  home: of all that may leave the
    device.
    """

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
    home: str = "device"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def num_layers(self) -> int:
        """The number of layers of the model: one for every chunk, and at least 4."""
        return max(4, self.pp * self.chunks)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run beside its degrees, ZeRO stage and micro-batch size."""
        return {
            "num_layers": self.num_layers,
            "global_batch_size": GLOBAL_BATCH,
            "pipeline_schedule": self.schedule,
            "num_layers_per_virtual_pipeline_stage": _length(self),
            "sequence_parallel": self.sequence_parallel,
            "zero3_reshard_after": self.reshard_after,
            "recompute_granularity": self.recompute,
            "partition_activations": self.partitions_checkpoints,
            "offload_optimizer": _DEVICES[self.home],
            "offload_param": _DEVICES[self.home if self.stage == 3 else "device"],
            "nvme_path": Path(tempfile.gettempdir()) if self.home == "files" else None,
        }

    def cell(self, **changes: Any) -> Cell:
        """Return the layout's training run."""
        degrees: dict[str, Any] = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        return Cell(**degrees, stage=self.stage, accumulation=self.accumulation, settings=self.settings, **changes)

    def __str__(self) -> str:
        """Return the layout as words, such as `tp2 pp2 dp1 m4 1f1b zero3 window`; options that are off are left out."""
        chunks = f"v{self.chunks}" if self.chunks > 1 else ""
        window = "window" if self.reshard_after == "window" else ""
        sequence, sliced = "sp" * self.sequence_parallel, "pa" * self.partitions_checkpoints
        recompute = "" if self.recompute == "none" else self.recompute
        home = "" if self.home == "device" else self.home
        words = (f"tp{self.tp} pp{self.pp} dp{self.dp} m{self.accumulation}", self.schedule, chunks)
        return " ".join(filter(None, (*words, f"zero{self.stage}", window, sequence, recompute, sliced, home)))


def _length(layout: Layout) -> int | None:
    """Return the number of layers of a chunk, or None if a stage has only one chunk."""
    return layout.num_layers // (layout.pp * layout.chunks) if layout.chunks > 1 else None


@functools.cache
def _base() -> RunConfig:
    """Return a run without a layout; on mock data, since rules check no more of a corpus than that its files exist."""
    return make_run(**{**SETTINGS, "mock_data": True})


def run_config(layout: Layout, family: str = "gpt2") -> RunConfig:
    """Return the run of `layout.cell()` on mock data, with the family's model.

    Its micro-batch size is at least 1, however small the batch.
    """
    copies = layout.dp * layout.accumulation
    settings = {
        **FAMILIES[family],
        **layout.settings,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "micro_batch_size": max(1, GLOBAL_BATCH // copies),
        "zero_stage": layout.stage,
    }
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        sections.setdefault(_SECTIONS[name], {})[name] = value
    return replace(_base(), **{name: _section(name, frozenset(changes.items())) for name, changes in sections.items()})


@functools.cache
def _section(name: str, changes: frozenset[tuple[str, Any]]) -> Any:
    """Return a section of the run with these settings; thousands of layouts have a few dozen sections."""
    return replace(getattr(_base(), name), **dict(changes))


@functools.cache
def is_legal(layout: Layout, family: str = "gpt2") -> bool:
    """Return True if megazero's rules give no problem and no notice about the run, and none of its settings is moot.

    A number of micro-batches that does not divide the global batch gives a run with another number, or none.
    """
    config, size = run_config(layout, family), layout.world_size
    if not is_accepted(config, size, layout.settings):
        return False
    return derived.num_micro_batches(config, size) == layout.accumulation


def is_accepted(config: RunConfig, size: int, settings: Mapping[str, Any]) -> bool:
    """Return True if megazero's rules give no problem and no notice about a run, and none of `settings` is moot."""
    given = [ParsedValue(name, value, name) for name, value in settings.items()]
    return not (rules.check(config, size) or rules.costs(config, size) or moot.of_a_run(config, given).problems)


def legal_layouts(grid: Grid = DIMENSIONS, most_processes: int = MOST_PROCESSES) -> Iterator[Layout]:
    """Yield all legal layouts of the grid, in the order of the dimensions' values."""

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
    """Draw a layout from the whole grid, legal or not."""
    return Layout(**{name: generator.choice(values) for name, values in grid.items()})


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(choices: Mapping[str, Any]) -> frozenset[Pair]:
    """Return every pair of choices in two dimensions; `choices` are by dimension."""
    return frozenset(combinations(choices.items(), 2))


def pairs_in(rows: Iterable[Mapping[str, Any]]) -> frozenset[Pair]:
    """Return every pair of choices that some row has, each with a choice in every dimension."""
    return frozenset().union(*map(pairs, rows))


def pairwise_cover(layouts: Sequence[Layout]) -> list[Layout]:
    """Return some of the layouts that together hold every pair that any of the given ones holds.

    The choice is greedy: each time a layout with the most missing pairs, or with somewhat fewer at a much lower cost.
    Then layouts whose pairs the rest hold too are removed, the most costly first.
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
    """Return the layout's pairs as a bit mask; a pair that is not in `bits` gets the next free bit."""
    numbers = (bits.setdefault(pair, len(bits)) for pair in combinations(vars(layout).items(), 2))
    return functools.reduce(int.__or__, (1 << number for number in numbers))


def _cost(layout: Layout) -> int:
    """Estimate the cost of a step on few cores, from processes, passes, and tensor-parallel messages in every layer."""
    return layout.world_size * layout.num_layers * (2 + layout.accumulation) * (1 + layout.tp)
