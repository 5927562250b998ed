"""Tests that recomputation, sliced checkpoints, checkpoints on the host and arenas change no bit of the result."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.training import Cell, Outcome, train_cell

OPTIONS: tuple[dict[str, Any], ...] = (
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "full"},
    {"recompute_granularity": "full", "recompute_num_layers": 2, "partition_activations": True},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "contiguous_checkpointing": True},
    {"recompute_granularity": "full", "checkpoint_in_cpu": True},
    {"recompute_granularity": "full", "partition_activations": True, "synchronize_each_layer": True},
    {"recompute_granularity": "full", "partition_activations": True, "contiguous_checkpointing": True},
    {"recompute_granularity": "full", "partition_activations": True, "checkpoint_in_cpu": True},
    {
        "recompute_granularity": "full",
        "partition_activations": True,
        "checkpoint_in_cpu": True,
        "contiguous_checkpointing": True,
        "profile_backward": True,
    },
)
SMALL: dict[str, Any] = {"global_batch_size": 8}
DROPOUT = {**SMALL, "hidden_dropout": 0.1, "attention_dropout": 0.1}
# Layouts with reductions over 4 processes, and one whose slices don't divide evenly.
PLAIN = [
    Cell(tp=tp, dp=dp, stage=stage, accumulation=accumulation, precision=precision, steps=2, settings=DROPOUT)
    for stage, tp, dp, accumulation, precision in (
        (0, 2, 2, 2, "bf16"),
        (1, 4, 1, 1, "fp32"),
        (2, 2, 2, 1, "bf16"),
        (3, 2, 2, 2, "fp32"),
    )
]
# Every option is combined with one stage, and the last, which has the most parts, also with stage 3.
CELLS = [
    (plain, option)
    for plain in PLAIN
    for index, option in enumerate(OPTIONS)
    if index % len(PLAIN) == plain.stage or (option is OPTIONS[-1] and plain.stage == 3)
]


@pytest.fixture(scope="module")
def plain_outcomes(corpus: str) -> dict[str, list[Outcome]]:
    """Return the outcomes of the same layouts without any of the options."""
    return {str(plain): train_cell(plain, corpus) for plain in PLAIN}


@pytest.mark.gloo
@pytest.mark.parametrize(("plain", "option"), CELLS, ids=str)
def test_not_a_bit_changes(
    plain: Cell, option: dict[str, Any], corpus: str, plain_outcomes: dict[str, list[Outcome]]
) -> None:
    expected = plain_outcomes[str(plain)]
    found = train_cell(replace(plain, settings={**DROPOUT, **option}), corpus)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.losses == theirs.losses
        assert ours.grad_norms == theirs.grad_norms
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        weights, references = found[0].full(found[1:], kind), expected[0].full(expected[1:], kind)
        assert weights.keys() == references.keys()
        for name, reference in references.items():
            assert torch.equal(weights[name], reference), f"{kind} of {name}"


@pytest.mark.gloo
def test_dropout_is_on(corpus: str, plain_outcomes: dict[str, list[Outcome]]) -> None:
    """Dropout changes the losses; equal bits would mean little if nothing were random."""
    still = train_cell(replace(PLAIN[0], settings=SMALL), corpus)
    assert still[0].losses != plain_outcomes[str(PLAIN[0])][0].losses
