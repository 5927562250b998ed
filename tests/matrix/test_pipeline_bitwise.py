"""Tests that the order of a pipeline's passes, recomputation and windows change no bit of a run, with dropout on."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layouts import Layout
from support.training import Outcome, train_cell

LAYOUTS = (
    Layout(pp=2, dp=2, accumulation=3, stage=2, schedule="1f1b"),
    Layout(tp=2, pp=2, accumulation=3, stage=1, schedule="1f1b", sequence_parallel=True),
    Layout(pp=2, dp=2, accumulation=3, stage=3, schedule="1f1b"),
)
CHANGES = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "global_batch_size": 12}
FULL = {"recompute_granularity": "full"}
GPIPE, ZERO_BUBBLE = {"pipeline_schedule": "gpipe"}, {"pipeline_schedule": "zero-bubble"}
SELECTIVE = {"recompute_granularity": "selective"}
WINDOW = {**FULL, "zero3_reshard_after": "window", "contiguous_checkpointing": True}
# Every choice is tried in two layouts, the window in the one of stage 3.
CASES: tuple[tuple[Layout, str, tuple[dict[str, Any], ...]], ...] = (
    (LAYOUTS[0], "fp32", (GPIPE, SELECTIVE, {**FULL, **ZERO_BUBBLE})),
    (LAYOUTS[1], "bf16", (ZERO_BUBBLE, SELECTIVE, {**FULL, **ZERO_BUBBLE})),
    (LAYOUTS[2], "bf16", (GPIPE, ZERO_BUBBLE, WINDOW)),
)


def outcomes(layout: Layout, precision: str, corpus: str, **settings: Any) -> list[Outcome]:
    """Train two steps and return every rank's outcome."""
    cell = layout.cell(steps=2, precision=precision)
    return train_cell(replace(cell, settings={**cell.settings, **CHANGES, **settings}), corpus)


@pytest.mark.gloo
@pytest.mark.parametrize(("layout", "precision", "choices"), CASES, ids=str)
def test_not_a_bit_changes(layout: Layout, precision: str, choices: tuple[dict[str, Any], ...], corpus: str) -> None:
    expected = outcomes(layout, precision, corpus)
    for settings in choices:
        found = outcomes(layout, precision, corpus, **settings)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms), settings
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            states, references = found[0].full(found[1:], kind), expected[0].full(expected[1:], kind)
            assert states.keys() == references.keys()
            assert all(torch.equal(states[name], value) for name, value in references.items()), settings


@pytest.mark.gloo
def test_dropout_is_on(corpus: str) -> None:
    """Dropout changes the losses; equal bits would mean little if nothing were random."""
    still = outcomes(LAYOUTS[0], "fp32", corpus, hidden_dropout=0.0, attention_dropout=0.0)
    assert still[0].losses != outcomes(LAYOUTS[0], "fp32", corpus)[0].losses
