"""Tests a run whose global batch grows from step to step against one process that takes the same samples."""

import pytest
from support.training import Cell, deviation, reference_history, train_cell

GROWING = {"rampup_batch_size": ["4", "4", "12"], "global_batch_size": 12, "num_layers": 2}
STEPS = 4  # of 4, 4, 8 and 12 samples
CELL = Cell(dp=2, pp=2, stage=2, steps=STEPS, accumulation=6, settings={**GROWING, "pipeline_schedule": "zero-bubble"})


@pytest.mark.gloo
def test_a_layout_follows_the_ramp(corpus: str) -> None:
    found = deviation(train_cell(CELL, corpus), reference_history(corpus, STEPS, **GROWING))
    assert found.worst < 1e-9, found
