"""Tests that tensor x data parallel layouts compute what a plain single process does: float64, gloo, real text."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.reference import History
from support.training import SCHEDULE, Cell, deviation, reference_history, train_cell

BOUND = 1e-9
# Every layout occurs, and every stage twice. All pairs of small degrees, stages and accumulations are in the cover of
# test_3d_layouts.py, and benchmarks/layout_matrix.py trains samples of all layouts.
CELLS = [
    Cell(tp=1, dp=1, stage=0, accumulation=4),
    Cell(tp=1, dp=1, stage=3),
    Cell(tp=1, dp=2, stage=2),
    Cell(tp=2, dp=1, stage=1, accumulation=4),
    Cell(tp=2, dp=2, stage=0),
    Cell(tp=2, dp=2, stage=3, accumulation=2),
    Cell(tp=1, dp=4, stage=1),
    Cell(tp=4, dp=1, stage=2, accumulation=2),
]
FULL = {"recompute_granularity": "full"}
SLICED = {**FULL, "partition_activations": True}
RECOMPUTED = [
    Cell(tp=1, dp=1, stage=0, settings={**FULL, "contiguous_checkpointing": True}),
    Cell(tp=2, dp=1, stage=1, accumulation=2, settings={**SLICED, "recompute_num_layers": 2}),
    Cell(tp=1, dp=2, stage=2, accumulation=2, settings={**FULL, "checkpoint_in_cpu": True}),
    Cell(
        tp=2, dp=2, stage=3, accumulation=2, settings={**SLICED, "checkpoint_in_cpu": True, "logits_chunk_bytes": 9000}
    ),
    Cell(tp=4, dp=1, stage=2, settings={**SLICED, "contiguous_checkpointing": True, "logits_chunk_bytes": 20000}),
    Cell(tp=1, dp=4, stage=3, settings={**FULL, "recompute_method": "block", "recompute_num_layers": 2}),
    Cell(tp=2, dp=2, stage=0, settings={"recompute_granularity": "selective"}),
]


@pytest.fixture(scope="module")
def whole_schedule(corpus: str) -> History:
    return reference_history(corpus, SCHEDULE)


@pytest.mark.gloo
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_layout_trains_like_one_process(cell: Cell, corpus: str, whole_schedule: History) -> None:
    """The same weights come out of the whole schedule, its warm-up and its decay."""
    assert max(whole_schedule.grad_norms) > 0.5, "clipping is meant to be active"
    assert deviation(train_cell(replace(cell, steps=SCHEDULE), corpus), whole_schedule).worst < BOUND


@pytest.mark.gloo
@pytest.mark.parametrize("cell", RECOMPUTED, ids=str)
def test_recomputing_layouts_train_like_one_process(cell: Cell, corpus: str, reference: History) -> None:
    assert deviation(train_cell(cell, corpus), reference).worst < BOUND


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_wrong_reduction_is_noticed(stage: int, corpus: str, reference: History) -> None:
    cell = Cell(tp=1, dp=2, stage=stage, fault="dp")
    assert deviation(train_cell(cell, corpus), reference).worst > 1e3 * BOUND


def test_reference_is_reproducible(corpus: str, reference: History, tmp_path: Path) -> None:
    again = reference_history(corpus, steps=3)
    assert again.losses == reference.losses[:3]
    assert reference.losses[-1] < reference.losses[0]
