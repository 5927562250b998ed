"""Tests a run whose global batch grows from step to step, and whose embedding has a rate of its own, in a layout."""

import pytest
from support.training import LR, Cell, deviation, reference_history, train_cell

GROWING = {"rampup_batch_size": ["4", "4", "12"], "global_batch_size": 12, "num_layers": 2}
OWN_RATE = {"decoupled_lr": 3 * LR, "decoupled_min_lr": 3 * LR / 10}
STEPS = 4  # of 4, 4, 8 and 12 samples
SETTINGS = {**GROWING, **OWN_RATE, "pipeline_schedule": "zero-bubble"}


@pytest.mark.gloo
def test_a_layout_trains_like_one_process(corpus: str) -> None:
    cell = Cell(dp=2, pp=2, stage=2, steps=STEPS, accumulation=6, settings=SETTINGS)
    found = deviation(train_cell(cell, corpus), reference_history(corpus, STEPS, **GROWING, **OWN_RATE))
    assert found.worst < 1e-9, found
