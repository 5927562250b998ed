"""The held-out loss in every layout is the plain reference model's mean over the same samples."""

import pytest
import torch
from support.processes import run_ranks
from support.reference import mean_loss
from support.small_runs import DrawnSamples, core_on_rank, owned_boxes, reference_batch, tiny_run
from support.training import first_weights

from megazero.train.build import batch_layout, step_context
from megazero.train.evaluate import EvaluationSet, evaluate

pytestmark = pytest.mark.gloo

GLOBAL_BATCH = 8
NUM_BATCHES = 3
MASKED = 3


def settings(*, masked: bool, tp: int = 1, dp: int = 1, pp: int = 1) -> dict[str, object]:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": tp > 1 and pp > 1,
        "micro_batch_size": 2,
        "global_batch_size": GLOBAL_BATCH,
        "eod_mask_loss": masked,
        "hidden_dropout": 0.4,  # which an evaluation must not apply
        "attention_dropout": 0.4,
        "zero_stage": 2,
    }


def evaluate_on_rank(
    rank: int, layout: dict[str, int], masked: bool, num_batches: int
) -> tuple[float, float, bool, bool]:
    """Return the losses of two evaluations, if the model is in training mode again, and if its state is unchanged."""
    config = tiny_run(**settings(masked=masked, **layout))
    core = core_on_rank(rank, config, **layout)
    core.model.train()
    before = owned_boxes(core)
    held_out = EvaluationSet(DrawnSamples(), batch_layout(config, core.mesh, MASKED), num_batches)
    losses = [evaluate(step_context(config, core), held_out) for _ in range(2)]
    same = all(torch.equal(a.values, b.values) for a, b in zip(before, owned_boxes(core), strict=True))
    untouched = same and all(parameter.grad is None for parameter in core.model.parameters())
    core.engine.close()
    return losses[0], losses[1], core.model.training, untouched


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("tp", "dp", "pp"), [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 4, 1), (1, 1, 2), (2, 1, 2)]
)
def test_every_layout_gives_the_mean_over_tokens(tp: int, dp: int, pp: int, masked: bool) -> None:
    batch = reference_batch(0, NUM_BATCHES * GLOBAL_BATCH, masked=masked)
    expected = mean_loss(first_weights(tiny_run(**settings(masked=masked))), batch).item()
    results = run_ranks(tp * dp * pp, evaluate_on_rank, {"tp": tp, "dp": dp, "pp": pp}, masked, NUM_BATCHES)
    assert len({loss for loss, _, _, _ in results}) == 1, "ranks disagree"
    for loss, again, training, untouched in results:
        assert abs(loss - expected) < 1e-12 * expected
        assert again == loss
        assert training and untouched


def test_a_mean_of_means_would_be_noticed() -> None:
    """The mask leaves each micro-batch another number of tokens, so that the test above detects a mean of means."""
    weights = first_weights(tiny_run(**settings(masked=True)))
    parts = [mean_loss(weights, reference_batch(first, 2, masked=True)).item() for first in range(0, GLOBAL_BATCH, 2)]
    whole = mean_loss(weights, reference_batch(0, GLOBAL_BATCH, masked=True)).item()
    assert abs(sum(parts) / len(parts) - whole) > 1e-3


def test_nothing_to_evaluate() -> None:
    assert run_ranks(2, evaluate_on_rank, {"dp": 2}, True, 0) == [(0.0, 0.0, True, True)] * 2
