"""The engine trains a module that combines awkward features as plain PyTorch does."""

import itertools
from collections.abc import Callable

import pytest
import torch
from support.irregular_model import (
    LR,
    EngineRun,
    Options,
    batch,
    full_state,
    loss_of,
    make_engine,
    make_model,
    train_engine,
    train_plain,
)
from support.processes import run_ranks
from torch import nn

from megazero.optim.inner import StepInputs
from megazero.zero.engine import Engine
from megazero.zero.parameters.gathered import GatheredParameters


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    return train_plain()


def runs_of(options: Options) -> list[EngineRun]:
    return run_ranks(options.dp, train_engine, options)


# Every stage with every number of ranks, and both with either number of micro-batches.
CASES = [
    Options(stage=stage, dp=dp, accumulation=accumulation, bucket=bucket, overlap=overlap, units=units)
    for (stage, dp, accumulation), (bucket, overlap, units) in zip(
        [(stage, dp, (1, 3)[(stage + place) % 2]) for stage in range(4) for place, dp in enumerate((1, 2, 4))],
        itertools.cycle(
            [(100, True, True), (1, False, True), (10_000, True, False), (33, False, False), (33, True, True)]
        ),
        strict=False,
    )
]


@pytest.mark.gloo
@pytest.mark.parametrize("options", CASES, ids=str)
def test_awkward_module_trains_like_plain_torch(
    options: Options, plain: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    runs = runs_of(options)
    norms, parameters = plain
    for run in runs:
        torch.testing.assert_close(run.norms, norms, rtol=1e-11, atol=0)
        for name, value in parameters.items():
            torch.testing.assert_close(run.working[name], value, rtol=1e-10, atol=1e-12, msg=name)
    weights = full_state(runs)
    assert weights.keys() == parameters.keys(), "frozen and unused parameters are saved too, tied ones once"
    for name, value in parameters.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-12)
    assert "frozen.weight" not in full_state(runs, "exp_avg")


@pytest.mark.gloo
@pytest.mark.parametrize(("precision", "rtol"), [("fp32", 5e-7), ("bf16", 0)])
def test_stages_agree_but_for_the_rounding_of_an_update(precision: str, rtol: float) -> None:
    """The placement of state does not change how gradients round, given one micro-batch and one reduction algorithm.

    torch's fused AdamW updates the last elements of a range one by one and rounds them unlike those in its vectors, and
    ranges end where partitions do; after five steps the difference is below the precision of bf16.
    """
    outcomes = [runs_of(Options(stage=stage, dp=2, precision=precision)) for stage in (0, 1, 2, 3)]
    for other in outcomes[1:]:
        for mine, theirs in zip(outcomes[0], other, strict=True):
            assert mine.norms[0] == theirs.norms[0]
            torch.testing.assert_close(mine.norms, theirs.norms, rtol=rtol, atol=0)
            for name, value in mine.working.items():
                torch.testing.assert_close(theirs.working[name], value, rtol=rtol, atol=rtol * 1e-2, msg=name)


@pytest.mark.gloo
def test_ranks_hold_the_same_working_parameters() -> None:
    for stage in (0, 1, 2, 3):
        runs = runs_of(Options(stage=stage, dp=4, precision="bf16"))
        for run in runs[1:]:
            assert all(torch.equal(run.working[name], runs[0].working[name]) for name in run.working)


@pytest.mark.gloo
def test_number_of_messages() -> None:
    """A bucket takes a reduce-scatter per reduction, and one all-gather to publish (stage 0: to finish reducing)."""
    buckets = run_ranks(2, count_buckets)[0]
    for stage, reductions in ((0, 1), (1, 1), (2, 3)):
        calls = runs_of(Options(stage=stage, dp=2, accumulation=3))[0].calls
        assert calls == {"reduce_scatter": reductions * buckets, "all_gather": buckets, "all_reduce": 0}


def count_buckets(rank: int) -> int:
    _, engine, _ = make_engine(rank, Options(dp=2))
    engine.close()
    return len(engine.layout.trainable_buckets)


def state_after_reload(rank: int, stage: int) -> bool:
    """Overwrite the wanted state and call `state_loaded`; return True if all working parameters have the new values."""
    model, engine, _ = make_engine(rank, Options(stage=stage, dp=2, precision="bf16"))
    for piece in engine.wanted_state():
        if piece.kind == "weight":
            piece.tensor.fill_(0.5)
    engine.state_loaded()
    with GatheredParameters(model):
        return all(bool((parameter == 0.5).all()) for parameter in model.parameters())


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loaded_state_reaches_working_parameters(stage: int) -> None:
    assert run_ranks(2, state_after_reload, stage) == [True, True]


def leaves_module_as_it_was(rank: int) -> bool:
    model, engine, _ = make_engine(rank, Options(stage=2))
    engine.close()
    x = torch.ones(2, 7, dtype=torch.float64)
    model(x).sum().backward()
    gradient = model.first.weight.grad
    return gradient is not None and bool(gradient.abs().sum() > 0)  # the engine no longer takes the gradient away


@pytest.mark.gloo
def test_close_takes_the_hooks_off() -> None:
    assert run_ranks(1, leaves_module_as_it_was) == [True]


def forward_after(rank: int, stage: int, overwrite: Callable[[nn.Module, Engine], None]) -> list[float]:
    """Change weights after a forward without a backward, which may leave units gathered; run the next forward."""
    model, engine, _ = make_engine(rank, Options(stage=stage, dp=2))
    x, y = batch(0)
    for _ in range(2):
        engine.begin_step()
        engine.backward(loss_of(model, x, y), is_last=True)
        engine.finish_reductions()
        engine.update(StepInputs(LR, torch.ones((), dtype=torch.float64), None))
    model(x)
    overwrite(model, engine)
    with torch.no_grad():
        found = model(x)
    engine.close()
    return found.flatten().tolist()


def load(model: nn.Module, engine: Engine) -> None:
    """Load weights of 0.25."""
    for piece in engine.wanted_state():
        if piece.kind == "weight":
            piece.tensor.fill_(0.25)
    engine.state_loaded()


def write_masters(model: nn.Module, engine: Engine) -> None:
    """Write 0.25 to the master weights of all parameters that are trained."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for piece in engine.pieces(name, "master"):
                piece.tensor.fill_(0.25)
            engine.republish(name)


def plain_forward(*, is_frozen_too: bool) -> list[float]:
    """Return the plain module's output with parameters of 0.25, frozen ones if `is_frozen_too`."""
    plain = make_model()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.requires_grad or is_frozen_too:
                parameter.fill_(0.25)
        return plain(batch(0)[0]).flatten().tolist()


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_loaded_is_what_the_next_forward_reads(stage: int) -> None:
    for found in run_ranks(2, forward_after, stage, load):
        assert found == pytest.approx(plain_forward(is_frozen_too=True), rel=1e-12)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_next_forward_reads_new_master_weights(stage: int) -> None:
    for found in run_ranks(2, forward_after, stage, write_masters):
        assert found == pytest.approx(plain_forward(is_frozen_too=False), rel=1e-12)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_works_may_finish_in_another_order_than_they_began(
    stage: int, plain: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    norms, parameters = plain
    for seed in range(2):
        for run in runs_of(Options(stage=stage, dp=2, accumulation=2, bucket=33, seed=seed)):
            torch.testing.assert_close(run.norms, norms, rtol=1e-11, atol=0)
            for name, value in parameters.items():
                torch.testing.assert_close(run.working[name], value, rtol=1e-10, atol=1e-12, msg=name)
