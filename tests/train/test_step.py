"""Tests of a training step: the divisor of the loss, skipped steps, stopping, and equal reports on all ranks."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from support.processes import run_ranks
from support.reference import History, Recipe, train
from support.small_runs import EOD, DrawnSamples, core_on_rank, owned_boxes, reference_batch, tiny_run
from support.training import Saved, assemble, first_weights, max_relative, weight_errors
from torch import Tensor

from megazero.config.run import RunConfig
from megazero.data.loader import BatchLoader, MicroBatch, StepBatch, build_step_batch
from megazero.train.build import batch_layout, step_context
from megazero.train.components import RunComponents
from megazero.train.context import StepContext
from megazero.train.step import StepControls, StepReport, training_step
from megazero.zero.step import first_overflow

GLOBAL_BATCH = 8
LR = 1e-2
STEPS = 3
BOUND = 1e-9


class Outcome(NamedTuple):
    """A rank's reports as lists of figures, the state it owns at the end, and the parameter named for an overflow.

    The figures leave out the index of the rank's own first overflow.
    """

    reports: list[list[float]]
    saved: list[Saved]
    blamed: str = ""


def config_of(*, tp: int = 1, dp: int = 1, stage: int = 0, accumulation: int = 1, **settings: Any) -> RunConfig:
    return tiny_run(
        **{
            "tensor_model_parallel_size": tp,
            "zero_stage": stage,
            "micro_batch_size": GLOBAL_BATCH // (dp * accumulation),
            "global_batch_size": GLOBAL_BATCH,
            "clip_grad": 0.5,
            "weight_decay": 0.1,
            **settings,
        }
    )


def figures(report: StepReport) -> list[float]:
    """Return the figures that all ranks have in common."""
    values: list[float] = torch.stack(report[:4]).tolist()
    return values


def full(outcomes: list[Outcome], kind: str = "weight") -> dict[str, Tensor]:
    return assemble(piece for outcome in outcomes for piece in outcome.saved if piece.kind == kind)


# --- the divisor ------------------------------------------------------------------------------------------------------


def train_masked(rank: int, layout: dict[str, int]) -> Outcome:
    """Take some steps on samples whose mask leaves a different number of tokens in each micro-batch."""
    config = config_of(**layout, eod_mask_loss=True)
    core = core_on_rank(rank, config, tp=layout.get("tp", 1), dp=layout.get("dp", 1))
    parts = step_context(config, core)
    with BatchLoader(DrawnSamples(), batch_layout(config, core.mesh, EOD), prefetch=0) as loader:
        reports = [training_step(parts, next(loader), StepControls(LR, 1.0)) for _ in range(STEPS)]
    core.engine.close()
    return Outcome([figures(report) for report in reports], owned_boxes(core))


def masked_reference() -> History:
    batches = [reference_batch(step * GLOBAL_BATCH, GLOBAL_BATCH, masked=True) for step in range(STEPS)]
    return train(first_weights(config_of()), batches, Recipe(lambda step: LR, weight_decay=0.1, max_norm=0.5))


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "accumulation": 2, "stage": 0},
        {"dp": 2, "accumulation": 2, "stage": 1},
        {"dp": 2, "accumulation": 2, "stage": 2},
        {"dp": 2, "accumulation": 2, "stage": 3},
        {"tp": 2, "dp": 2, "stage": 2},
        {"accumulation": 4},
    ],
    ids=str,
)
def test_the_loss_is_divided_by_the_tokens_that_count_in_the_global_batch(layout: dict[str, int]) -> None:
    expected = masked_reference()
    assert min(expected.grad_norms) > 0.5, "clipping is meant to be active"
    outcomes = run_ranks(layout.get("tp", 1) * layout.get("dp", 1), train_masked, layout)
    for outcome in outcomes:
        assert outcome.reports == outcomes[0].reports, "all ranks report the same"
        losses, norms, *_ = zip(*outcome.reports, strict=True)
        assert max_relative(losses, expected.losses) < BOUND
        assert max_relative(norms, expected.grad_norms) < BOUND
    assert max(weight_errors(full(outcomes), expected.weights, LR).values()) < BOUND


def test_the_mask_matters() -> None:
    unmasked = [reference_batch(step * GLOBAL_BATCH, GLOBAL_BATCH, masked=False) for step in range(STEPS)]
    other = train(first_weights(config_of()), unmasked, Recipe(lambda step: LR, weight_decay=0.1, max_norm=0.5))
    assert max_relative(other.losses, masked_reference().losses) > 1e-3


def one_rank(**settings: Any) -> tuple[RunComponents, StepContext, StepBatch]:
    """Build a model in this process alone, its step context and the first batch."""
    config = config_of(**settings)
    core = core_on_rank(0, config)
    batch = build_step_batch(DrawnSamples(), 0, batch_layout(config, core.mesh, None))
    return core, step_context(config, core), batch


def weights(core: RunComponents) -> dict[str, Tensor]:
    return assemble(box for box in owned_boxes(core) if box.kind == "weight")


def test_a_batch_without_a_token_that_counts_only_decays() -> None:
    core, parts, batch = one_rank(weight_decay=0.5)
    before = weights(core)
    silent = [MicroBatch(m.first_sample, m.tokens, m.labels, torch.zeros(m.tokens.shape)) for m in batch.micro_batches]
    report = training_step(parts, StepBatch(0, silent), StepControls(LR, 1.0))
    assert figures(report) == [0.0] * 4
    for name, value in weights(core).items():
        decays = not name.endswith("bias") and "norm" not in name
        torch.testing.assert_close(value, before[name] * (1 - LR * 0.5 * decays), rtol=1e-14, atol=0)


def test_the_loss_scale_is_taken_out_again() -> None:
    """A loss scale that is a power of two changes no bit of a float64 run."""
    results = []
    for scale in (1.0, 2.0**20):
        core, parts, batch = one_rank()
        results.append((figures(training_step(parts, batch, StepControls(LR, scale))), weights(core)))
    (plain, plain_weights), (scaled, scaled_weights) = results
    assert plain == scaled
    assert all(torch.equal(value, scaled_weights[name]) for name, value in plain_weights.items())


# --- skipping ---------------------------------------------------------------------------------------------------------


def overflow_once(rank: int, layout: dict[str, int], guilty: tuple[int, str] | None) -> Outcome:
    """Take two fp16 steps; before them, with `guilty`, one in which that rank's gradient of a parameter is infinite."""
    config = config_of(**layout, precision="fp16")
    core = core_on_rank(rank, config, tp=layout.get("tp", 1), dp=layout.get("dp", 1))
    parts = step_context(config, core)
    batch = build_step_batch(DrawnSamples(), 0, batch_layout(config, core.mesh, None))
    reports = []
    if guilty is not None:
        hook = core.model.get_parameter(guilty[1]).register_hook(
            lambda grad: grad * torch.inf if rank == guilty[0] else grad
        )
        reports.append(training_step(parts, batch, StepControls(LR, 64.0)))
        hook.remove()
    reports += [training_step(parts, batch, StepControls(LR, 64.0)) for _ in range(2)]
    blamed = first_overflow(core.engine, int(reports[0].overflow)) if reports[0].skipped else ""
    core.engine.close()
    return Outcome([figures(report) for report in reports], owned_boxes(core), blamed)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("layout", "guilty"),
    [
        ({"dp": 2, "stage": 0}, (1, "layers.1.mlp.up.weight")),
        ({"dp": 2, "stage": 1}, (0, "layers.0.attention.qkv.bias")),
        ({"dp": 2, "stage": 2}, (1, "layers.1.mlp.up.weight")),
        ({"dp": 2, "stage": 2, "accumulation": 2}, (1, "final_norm.bias")),
        ({"tp": 2, "stage": 1}, (1, "layers.1.mlp.down.weight")),
        ({"tp": 2, "stage": 1}, (1, "final_norm.weight")),  # rank 0's copy counts
    ],
    ids=str,
)
def test_an_overflow_anywhere_skips_the_step_everywhere(layout: dict[str, int], guilty: tuple[int, str]) -> None:
    skipping = run_ranks(2, overflow_once, layout, guilty)
    straight = run_ranks(2, overflow_once, layout, None)
    for outcome in skipping:
        loss, norm, _, skipped = outcome.reports[0]
        assert (outcome.blamed, skipped) == (guilty[1], 1.0)
        assert not math.isfinite(norm)
        assert loss == straight[0].reports[0][0], "the loss itself was finite"
        # Later steps are what they would have been without the skipped one.
        assert outcome.reports[1:] == straight[0].reports
        assert [row[3] for row in outcome.reports[1:]] == [0.0, 0.0]
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        after, expected = full(skipping, kind), full(straight, kind)
        assert all(torch.equal(value, expected[name]) for name, value in after.items())


def test_the_first_of_several_is_blamed() -> None:
    core, parts, batch = one_rank(precision="fp16")
    for name in ("layers.1.input_norm.weight", "layers.0.mlp.up.weight", "final_norm.weight"):
        core.model.get_parameter(name).register_hook(lambda grad: grad * torch.nan)
    report = training_step(parts, batch, StepControls(LR, 1.0))
    assert core.engine.parameter_name(int(report.overflow)) == "layers.0.mlp.up.weight"


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_formats_skip_every_step_from_a_bad_one_on_if_they_check(
    precision: str, optimizer: str, checks: bool
) -> None:
    """A GPU has begun the step behind a bad one before the host reads the bad one's figures, so that one is skipped."""
    core, parts, batch = one_rank(
        precision=precision, optimizer=optimizer, weight_decay=0.0, check_for_nan_in_loss_and_grad=checks
    )
    before = weights(core)
    hook = core.model.get_parameter("final_norm.weight").register_hook(lambda grad: grad * torch.nan)
    bad = training_step(parts, batch, StepControls(LR, 1.0))
    hook.remove()
    good = training_step(parts, batch, StepControls(LR, 1.0))
    assert bad.grad_norm.isnan() and (good.grad_norm.isfinite() or not checks)
    assert [bad.skipped.item(), good.skipped.item()] == [float(checks)] * 2
    same = [torch.equal(value, before[name]) for name, value in weights(core).items()]
    assert all(same) if checks else not any(same)


def test_a_loss_that_is_not_finite_skips_the_step_though_gradients_are_finite() -> None:
    core, parts, batch = one_rank(precision="fp32")
    core.model.head.register_forward_hook(lambda _module, _inputs, loss: loss + (torch.nan - loss).detach())
    report = training_step(parts, batch, StepControls(LR, 1.0))
    assert report.grad_norm.isfinite() and report.loss.isnan() and report.skipped.item() == 1.0


# --- stopping ---------------------------------------------------------------------------------------------------------


def wish(rank: int, who: tuple[int, ...]) -> list[float]:
    config = config_of(dp=2)
    core = core_on_rank(rank, config, dp=2)
    batch = build_step_batch(DrawnSamples(), 0, batch_layout(config, core.mesh, None))
    report = training_step(step_context(config, core), batch, StepControls(LR, 1.0, stop=rank in who))
    core.engine.close()
    return figures(report)


@pytest.mark.gloo
@pytest.mark.parametrize("who", [(), (1,), (0, 1)])
def test_every_rank_learns_how_many_wish_to_stop(who: tuple[int, ...]) -> None:
    results = run_ranks(2, wish, who)
    assert [result[2] for result in results] == [len(who)] * 2
    assert results[0] == results[1]
