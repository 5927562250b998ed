"""Tests agreement of pipeline stages: about an overflow on one of them, the norm, and the matrix that two hold."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from support.processes import run_ranks
from support.small_runs import DrawnSamples, core_on_rank, owned_boxes, tiny_run
from support.training import Saved, assemble
from torch import Tensor

from megazero.config.run import RunConfig
from megazero.data.loader import build_step_batch
from megazero.train.build import batch_layout, step_context
from megazero.train.step import StepControls, StepReport, training_step
from megazero.zero.parameters.gathered import GatheredParameters
from megazero.zero.step import first_overflow

GLOBAL_BATCH = 8
LR = 1e-2
WORDS = "embedding.word.weight"
Degrees = dict[str, int]  # tp, dp, pp
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def config_of(degrees: Degrees, stage: int, **settings: Any) -> RunConfig:
    """Return a configuration of two micro-batches a step, with a clipping threshold that takes effect."""
    return tiny_run(
        **{
            "num_layers": 4,
            "tensor_model_parallel_size": degrees.get("tp", 1),
            "pipeline_model_parallel_size": degrees.get("pp", 1),
            "zero_stage": stage,
            "micro_batch_size": GLOBAL_BATCH // (2 * degrees.get("dp", 1)),
            "global_batch_size": GLOBAL_BATCH,
            "clip_grad": 0.5,
            "weight_decay": 0.1,
            **settings,
        }
    )


def size_of(degrees: Degrees) -> int:
    return math.prod(degrees.values())


# --- overflow --------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """One rank's reports as lists of figures, its owned state at the end, and the parameter blamed for an overflow."""

    reports: list[list[float]]
    saved: list[Saved]
    blamed: str = ""


def figures(report: StepReport) -> list[float]:
    """Return the figures that all ranks have in common."""
    values: list[float] = torch.stack(report[:-1]).tolist()
    return values


def overflow_once(
    rank: int, degrees: Degrees, settings: dict[str, Any], guilty: tuple[int, str] | None, steps: int = 2
) -> Outcome:
    """Take fp16 steps on the same batch, after one in which a parameter's gradient is infinite on one rank only."""
    config = config_of(degrees, **{"stage": 0, "precision": "fp16", **settings})
    core = core_on_rank(rank, config, **degrees)
    parts = step_context(config, core)
    batch = build_step_batch(DrawnSamples(), 0, batch_layout(config, core.mesh, None))
    reports, blamed = [], ""
    if guilty is not None:
        hooks = []
        if rank == guilty[0]:
            hooks.append(core.model.get_parameter(guilty[1]).register_hook(lambda grad: grad * torch.inf))
        reports.append(training_step(parts, batch, StepControls(LR, 64.0)))
        for hook in hooks:
            hook.remove()
        blamed = first_overflow(core.engine, int(reports[0].overflow))
    reports += [training_step(parts, batch, StepControls(LR, 64.0)) for _ in range(steps)]
    core.engine.close()
    return Outcome([figures(report) for report in reports], owned_boxes(core), blamed)


def full(outcomes: list[Outcome], kind: str) -> dict[str, Tensor]:
    return assemble(piece for outcome in outcomes for piece in outcome.saved if piece.kind == kind)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("degrees", "settings", "guilty"),
    [
        ({"pp": 2}, {}, (1, "final_norm.weight")),
        ({"pp": 2}, {}, (0, "embedding.position.weight")),
        ({"pp": 2}, {"num_layers_per_virtual_pipeline_stage": 1}, (1, "layers.1.mlp.up.weight")),
        ({"pp": 2, "dp": 2}, {"stage": 1}, (1, "layers.0.attention.qkv.weight")),
        ({"pp": 2, "tp": 2}, {"sequence_parallel": True}, (2, "layers.3.post_attention_norm.weight")),
        ({"pp": 2, "dp": 2}, {"stage": 2}, (2, WORDS)),  # the head's copy, on the last stage
        ({"pp": 4}, {"pipeline_schedule": "gpipe"}, (2, "layers.2.mlp.down.bias")),
        ({"pp": 2, "dp": 2}, {"stage": 3}, (3, "layers.3.mlp.up.weight")),
    ],
    ids=str,
)
def test_an_overflow_on_one_stage_skips_the_step_on_all(
    degrees: Degrees, settings: dict[str, Any], guilty: tuple[int, str]
) -> None:
    skipping = run_ranks(size_of(degrees), overflow_once, degrees, settings, guilty)
    straight = run_ranks(size_of(degrees), overflow_once, degrees, settings, None)
    for outcome in skipping:
        loss, norm, _, skipped, *_ = outcome.reports[0]
        assert (outcome.blamed, skipped) == (guilty[1], 1.0)
        assert not math.isfinite(norm)
        assert loss == straight[0].reports[0][0], "the loss itself was finite"
        # The steps after the skipped one are those of a run without it.
        assert outcome.reports[1:] == straight[0].reports
        assert [row[3] for row in outcome.reports[1:]] == [0.0, 0.0]
    for kind in KINDS:
        after, expected = full(skipping, kind), full(straight, kind)
        assert all(torch.equal(value, expected[name]) for name, value in after.items())


def too_high_once(rank: int, degrees: Degrees, settings: dict[str, Any], scale: float) -> Outcome:
    """Take one step with this loss scale, then two with one that fits."""
    config = config_of(degrees, **{"stage": 1, "precision": "fp16", **settings})
    core = core_on_rank(rank, config, **degrees)
    parts = step_context(config, core)
    batch = build_step_batch(DrawnSamples(), 0, batch_layout(config, core.mesh, None))
    reports = [training_step(parts, batch, StepControls(LR, value)) for value in (scale, 64.0, 64.0)]
    blamed = first_overflow(core.engine, int(reports[0].overflow)) if reports[0].skipped else ""
    core.engine.close()
    return Outcome([figures(report) for report in reports], owned_boxes(core), blamed)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_schedule": "zero-bubble"},
        {"num_layers_per_virtual_pipeline_stage": 1},
        {"pipeline_schedule": "zero-bubble", "stage": 3, "zero3_reshard_after": "window"},
    ],
    ids=str,
)
def test_a_scale_that_is_too_high_skips_everywhere(settings: dict[str, Any]) -> None:
    """All ranks skip the step, also where weight gradients are made later than input gradients."""
    degrees = {"pp": 2, "tp": 2}
    outcomes = run_ranks(4, too_high_once, degrees, settings, 2.0**40)
    fitting = run_ranks(4, too_high_once, degrees, settings, 64.0)
    for outcome in outcomes:
        assert [row[3] for row in outcome.reports] == [1.0, 0.0, 0.0]
        assert outcome.reports[1:] == fitting[0].reports[:2], "the skipped step has changed nothing"
        assert outcome.blamed == outcomes[0].blamed != ""


@pytest.mark.gloo
def test_every_rank_reports_the_same_to_the_bit() -> None:
    degrees = {"pp": 2, "tp": 2, "dp": 2}
    outcomes = run_ranks(8, overflow_once, degrees, {"stage": 3, "precision": "fp16"}, None, 3)
    assert all(outcome.reports == outcomes[0].reports for outcome in outcomes)
    assert len({row[1] for row in outcomes[0].reports}) == 3, "norms do change"


# --- the tied embedding ----------------------------------------------------------------------------------------------


class Copy(NamedTuple):
    """A rank's copy of the tied matrix after a step: its working values, and the state that the rank owns, by kind."""

    working: Tensor
    state: dict[str, list[tuple[int, int, Tensor]]]


def copies_on_rank(rank: int, degrees: Degrees, settings: dict[str, Any]) -> list[Copy]:
    """Return the first and the last stage's copy after each of three steps; other stages return none."""
    config = config_of(degrees, **settings)
    core = core_on_rank(rank, config, **degrees)
    parts, layout = step_context(config, core), batch_layout(config, core.mesh, None)
    copies = []
    for step in range(3):
        batch = build_step_batch(DrawnSamples(), step * GLOBAL_BATCH, layout)
        training_step(parts, batch, StepControls(LR, 1.0))
        with GatheredParameters(core.model):
            if core.mesh.coordinate("pp") not in (0, degrees["pp"] - 1):
                continue
            working = core.model.get_parameter(WORDS).detach().clone()
        state: dict[str, list[tuple[int, int, Tensor]]] = {}
        for piece in core.engine.wanted_state():
            if piece.spec.name == WORDS:
                state.setdefault(piece.kind, []).append((piece.start, piece.stop, piece.tensor.clone()))
        copies.append(Copy(working, state))
    core.engine.close()
    return copies


def same(one: Copy, other: Copy) -> bool:
    """Return True if the two copies are equal to the bit."""
    pairs = [(one.working, other.working)]
    for kind in KINDS:
        for (start, stop, ours), (begin, end, theirs) in zip(one.state[kind], other.state[kind], strict=True):
            assert (start, stop) == (begin, end)
            pairs.append((ours, theirs))
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        ({"pp": 2, "dp": 2}, {"stage": 0, "precision": "bf16"}),
        ({"pp": 2, "dp": 2}, {"stage": 1, "precision": "fp32", "num_layers_per_virtual_pipeline_stage": 1}),
        ({"pp": 2, "dp": 2}, {"stage": 2, "precision": "bf16"}),
        ({"pp": 2, "dp": 2}, {"stage": 3, "precision": "fp32"}),
        ({"pp": 4}, {"stage": 1, "precision": "bf16", "pipeline_schedule": "zero-bubble"}),
        ({"pp": 2, "tp": 2}, {"stage": 2, "precision": "fp32", "sequence_parallel": True}),
    ],
    ids=str,
)
def test_tied_copies_stay_the_same_bits(degrees: Degrees, settings: dict[str, Any]) -> None:
    """Weights, masters and moments of both copies are equal to the bit after each of three steps."""
    size = size_of(degrees)
    ranks = run_ranks(size, copies_on_rank, degrees, settings)
    a_stage = size // degrees["pp"]
    for first, last in zip(ranks[:a_stage], ranks[-a_stage:], strict=True):
        assert len(first) == len(last) == 3
        assert all(same(one, other) for one, other in zip(first, last, strict=True))
        assert not torch.equal(first[0].working, first[-1].working), "it trains"
        assert {piece.dtype for _, _, piece in first[0].state["weight"]} == {torch.float32}
