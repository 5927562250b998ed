"""Tests that bf16, fp16 and fp32 stay near the float64 reference, and that fp16 skips on all ranks alike."""

import pytest
from support.reference import History
from support.training import Cell, max_relative, train_cell

# Bounds of the relative error of a loss, and of a gradient norm, over 5 steps: some four times the measured values.
BOUNDS = {"fp32": (1.6e-7, 4.2e-7), "bf16": (9.5e-4, 3.7e-3), "fp16": (1.5e-4, 5.7e-4)}
FP16 = {"initial_loss_scale": 1024.0}


CELLS = [
    Cell(tp=1, dp=2, stage=1, precision="fp32", accumulation=4),
    Cell(tp=2, dp=2, stage=2, precision="fp32"),
    Cell(tp=1, dp=1, stage=0, precision="bf16"),
    Cell(tp=2, dp=2, stage=2, precision="bf16"),
    Cell(tp=1, dp=2, stage=1, precision="bf16", settings={"accumulate_allreduce_grads_in_fp32": True}),
    Cell(tp=1, dp=2, stage=2, precision="fp16", settings=FP16),
    Cell(tp=2, dp=1, stage=0, precision="fp16", accumulation=4, settings=FP16),
]


@pytest.mark.gloo
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_losses_stay_near_the_reference(cell: Cell, corpus: str, reference: History) -> None:
    for outcome in train_cell(cell, corpus):
        loss_error = max_relative(outcome.losses, reference.losses)
        norm_error = max_relative(outcome.grad_norms, reference.grad_norms)
        print(f"{cell}: loss {loss_error:.2e}, norm {norm_error:.2e}")
        loss_bound, norm_bound = BOUNDS[cell.precision]
        assert loss_error < loss_bound
        assert norm_error < norm_bound
        assert not any(outcome.skipped)


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "tp", "dp"), [(0, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_fp16_overflow_skips_the_step_on_every_rank(
    stage: int, tp: int, dp: int, corpus: str, reference: History
) -> None:
    """The scale starts too high, so steps are skipped, on all ranks alike, until the gradients fit."""
    settings = {"initial_loss_scale": 2.0**18, "hysteresis": 1}
    outcomes = train_cell(Cell(tp=tp, dp=dp, stage=stage, precision="fp16", steps=7, settings=settings), corpus)
    skipped = outcomes[0].skipped
    assert skipped[0] and skipped[1] and sum(skipped) < 5
    assert all(outcome.skipped == skipped for outcome in outcomes)
    # The reference's first step has learning rate 0 (warm-up), so its second loss is still that of the initial weights.
    assert outcomes[0].losses[:2] == pytest.approx(reference.losses[:2], rel=2e-3)
    assert outcomes[0].losses[-1] < 0.9 * outcomes[0].losses[0], "after the skips it trains"
