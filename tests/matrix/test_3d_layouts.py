"""Tests pipeline x tensor x data parallel layouts, a pairwise cover of the small ones, against one process.

States that leave the device are copied at once, and then again as late as they may be, to memory full of NaN.
`benchmarks/layout_matrix.py` trains samples of all layouts of up to 8 processes.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.layouts import (
    DIMENSIONS,
    GLOBAL_BATCH,
    MOST_PROCESSES,
    Layout,
    any_layout,
    is_legal,
    legal_layouts,
    pairs,
    pairs_in,
    pairwise_cover,
    run_config,
)
from support.reference import History
from support.training import FAULTS, deviation, reference_history, train_cell

from megazero.config import derived

BOUND = 1e-9
STEPS = 3  # within the warm-up; test_float64_layouts.py trains through all of the schedule
GRID = {**DIMENSIONS, "tp": (1, 2), "dp": (1, 2), "pp": (1, 2, 3), "accumulation": (1, 3, 4), "chunks": (1, 2)}
# Two of the degrees at 4; test_families.py has the third, and the other pairs.
LARGE = (
    Layout(pp=2, dp=4, accumulation=3, schedule="zero-bubble", stage=2),
    Layout(tp=2, pp=4, accumulation=3, schedule="1f1b", stage=1, sequence_parallel=True, recompute="selective"),
)
FAULTY = {
    "dp": Layout(dp=2, pp=2, accumulation=4, stage=2),
    "tp": Layout(tp=2, pp=2, accumulation=4),
    "tp, split sequence": Layout(tp=2, pp=2, accumulation=4, sequence_parallel=True),
    "pp, activations": Layout(pp=2, accumulation=4, schedule="zero-bubble"),
    "pp, gradients": Layout(pp=2, accumulation=4, chunks=2),
    "ends": Layout(pp=3, accumulation=3, stage=1),
}

# Settings that the dimensions leave out and that pipelines could break.
FULL = {"recompute_granularity": "full"}
UNTIED = {"untie_embeddings_and_output_weights": True}
WINDOW = {"zero3_reshard_after": "window"}
FURTHER: tuple[tuple[Layout, dict[str, Any]], ...] = (
    (Layout(pp=2, dp=2, accumulation=4, stage=3), {**UNTIED, **WINDOW, "max_live_parameters": 60_000}),
    (Layout(pp=4, accumulation=4, stage=3, schedule="zero-bubble"), {**WINDOW, "pipeline_split": "0,2,2,0"}),
    (Layout(pp=2, accumulation=4, chunks=2, stage=1), {"pipeline_split": "0,2,2,0"}),
    (
        Layout(tp=2, pp=2, accumulation=4, chunks=2, stage=1),
        {**FULL, "partition_activations": True, "contiguous_checkpointing": True, "checkpoint_in_cpu": True},
    ),
    (Layout(pp=2, accumulation=4, stage=1, schedule="zero-bubble"), {**FULL, "contiguous_checkpointing": True}),
    (
        Layout(pp=2, accumulation=4, schedule="gpipe"),
        {**FULL, "contiguous_checkpointing": True, "number_checkpoints": 2},
    ),
    (
        Layout(pp=2, dp=2, accumulation=4, stage=2, chunks=2),
        {"allgather_partitions": False, "overlap_comm": False, "gradient_predivide_factor": 2.0},
    ),
    (Layout(pp=2, dp=2, accumulation=4, stage=1), {"contiguous_gradients": False, "reduce_scatter": False}),
    (
        Layout(pp=2, dp=2, accumulation=4, stage=3, schedule="zero-bubble"),
        {"param_persistence_threshold": 100, "prefetch_bucket_size": 0},
    ),
    (
        Layout(tp=2, pp=2, accumulation=4, sequence_parallel=True, schedule="zero-bubble", stage=2),
        {**FULL, "recompute_method": "block", "recompute_num_layers": 1, "logits_chunk_bytes": 9000},
    ),
    (
        Layout(tp=2, pp=2, accumulation=4, sequence_parallel=True, chunks=2),
        {**UNTIED, **FULL, "checkpoint_in_cpu": True},
    ),
    (Layout(tp=2, pp=3, sequence_parallel=True), {"make_vocab_size_divisible_by": 32}),
)

Reference = Callable[..., History]
SIZES = (1, 2, 3, 4, 6, 8)


@functools.cache
def all_layouts() -> tuple[Layout, ...]:
    """Return the legal layouts of the grid, which take seconds to find: too long for every process that collects."""
    return tuple(legal_layouts(GRID))


@functools.cache
def cover() -> list[Layout]:
    return pairwise_cover(all_layouts())


def steps_of(layout: Layout) -> int:
    """Return the steps to take: the third is the first in which stage 3 gathers after the order of a whole step."""
    return STEPS if layout.stage == 3 else STEPS - 1


@pytest.fixture(scope="module")
def trained_alone(corpus: str) -> Reference:
    """Return a function that trains on one process, by number of layers and steps, and further settings."""
    return functools.cache(
        lambda layers, steps, **settings: reference_history(
            corpus, steps, num_layers=layers, global_batch_size=GLOBAL_BATCH, **settings
        )
    )


@pytest.mark.gloo
@pytest.mark.parametrize("size", SIZES)
def test_layouts_train_like_one_process(size: int, corpus: str, trained_alone: Reference) -> None:
    for layout in (*cover(), *LARGE):
        if layout.world_size != size:
            continue
        reference = trained_alone(layout.num_layers, steps_of(layout))
        assert max(reference.grad_norms) > 0.5, "clipping is meant to be active"
        for copies_late in (False,) if layout.home == "device" else (False, True):
            outcomes = train_cell(layout.cell(steps=steps_of(layout)), corpus, copies_late=copies_late)
            found = deviation(outcomes, reference)
            assert found.worst < BOUND, (str(layout), copies_late, found)


@pytest.mark.gloo
@pytest.mark.parametrize(("layout", "settings"), FURTHER, ids=str)
def test_further_settings(layout: Layout, settings: dict[str, Any], corpus: str, trained_alone: Reference) -> None:
    cell = layout.cell(steps=steps_of(layout))
    outcomes = train_cell(replace(cell, settings={**cell.settings, **settings}), corpus)
    model = {name: settings[name] for name in UNTIED if name in settings}
    found = deviation(outcomes, trained_alone(layout.num_layers, cell.steps, **model))
    assert found.worst < BOUND, found


@pytest.mark.gloo
@pytest.mark.parametrize("fault", FAULTY)
def test_one_wrong_element_is_noticed(fault: str, corpus: str, trained_alone: Reference) -> None:
    layout = FAULTY[fault]
    reference = trained_alone(layout.num_layers, STEPS)
    found = deviation(train_cell(layout.cell(steps=STEPS, fault=fault), corpus), reference)
    assert found.worst > 1e3 * BOUND, found


def test_every_fault_is_tried() -> None:
    assert FAULTY.keys() == FAULTS.keys()


# --- the cover -------------------------------------------------------------------------------------------------------


def test_every_pair_of_choices_is_in_the_cover() -> None:
    wanted, chosen = pairs_in(map(vars, all_layouts())), cover()
    counts = Counter(pair for layout in chosen for pair in pairs(vars(layout)))
    assert counts.keys() == wanted
    assert all(any(counts[pair] == 1 for pair in pairs(vars(layout))) for layout in chosen), "one could be left out"
    for name, values in GRID.items():
        assert {getattr(layout, name) for layout in chosen} == set(values)
    assert {layout.world_size for layout in (*chosen, *LARGE)} == set(SIZES)


def test_nothing_legal_is_left_out() -> None:
    """The list of legal layouts, which is built by a shorter way, holds every legal layout of the grid."""
    known, generator = frozenset(all_layouts()), random.Random(5)
    drawn = {any_layout(generator, GRID) for _ in range(2000)}
    legal = {layout for layout in drawn if layout.world_size <= MOST_PROCESSES and is_legal(layout)}
    assert len(legal) > 30
    assert legal <= known


def test_large_layouts_are_legal() -> None:
    assert all(map(is_legal, LARGE))


def test_the_rules_are_asked_about_the_run_that_is_made() -> None:
    for layout in cover():
        made, asked = layout.cell().config("text"), run_config(layout)
        for section in ("model", "parallel", "zero", "activations", "training", "optimizer"):
            assert getattr(made, section) == getattr(asked, section)
        assert derived.num_micro_batches(made, layout.world_size) == layout.accumulation
