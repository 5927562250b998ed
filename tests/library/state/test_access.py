"""Tests full and local access to weights, gradients and optimizer state against plain torch."""

from typing import Any, NamedTuple

import pytest
import torch
from support.irregular_model import LR, SETTINGS, Awkward, Options, batch, loss_of, make_engine, make_model, take_step
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.errors import UsageError
from megazero.library.module.units import choose_units
from megazero.library.partitioned_init.init import Init
from megazero.library.state.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.inner import Elementwise
from megazero.optim.torch_optimizer import TorchOptimizer
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.parameters.gathered import GatheredParameters
from megazero.zero.plan import resolve

DP, STEPS = 3, 3
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Seen(NamedTuple):
    """The full weight, gradient and optimizer state of one parameter; None where there is none."""

    weight: Tensor | None
    gradient: Tensor | None
    exp_avg: Tensor | None
    exp_avg_sq: Tensor | None


def look(parameter: nn.Parameter) -> Seen:
    moments = (safe_get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq"))
    return Seen(safe_get_full_fp32_param(parameter), safe_get_full_grad(parameter), *moments)


def backward(rank: int, model: nn.Module, engine: Engine, step: int, *, is_last: bool = True) -> None:
    dtype = next(model.parameters()).dtype
    x, y = (part.chunk(DP)[rank] for part in batch(step, dtype))
    engine.backward(loss_of(model, x, y), is_last=is_last)


def watch(rank: int, stage: int) -> list[dict[str, Seen]]:
    """Return the full values of every parameter after the backward of each step, and after the last update."""
    model, engine, _ = make_engine(rank, Options(stage=stage, dp=DP))
    found = []
    for step in range(STEPS):
        engine.begin_step()
        backward(rank, model, engine, step)
        found.append({name: look(parameter) for name, parameter in model.named_parameters()})
        take_step(engine)
    engine.begin_step()
    found.append({name: look(parameter) for name, parameter in model.named_parameters()})
    return found


def watch_plain() -> list[dict[str, Seen]]:
    model = make_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)

    def seen(parameter: nn.Parameter, *, has_gradient: bool = True) -> Seen:
        if not parameter.requires_grad:
            return Seen(None, None, None, None)
        zero = torch.zeros_like(parameter)
        state = optimizer.state.get(parameter, {"exp_avg": zero, "exp_avg_sq": zero})
        kept = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        weight, gradient, *moments = (None if value is None else value.detach().clone() for value in kept)
        return Seen(weight, gradient if has_gradient else None, *moments)

    found = []
    for step in range(STEPS):
        for p in trained:
            p.grad = torch.zeros_like(p)
        loss_of(model, *batch(step)).backward()
        found.append({name: seen(p) for name, p in model.named_parameters()})
        optimizer.step()
    found.append({name: seen(p, has_gradient=False) for name, p in model.named_parameters()})
    return found


@pytest.mark.gloo
@STAGES
def test_everything_is_what_plain_torch_has(stage: int) -> None:
    expected = watch_plain()
    for found in run_ranks(DP, watch, stage):
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert ours.keys() == theirs.keys()
            for name, seen in theirs.items():
                for kind, value in seen._asdict().items():
                    mine = getattr(ours[name], kind)
                    assert (mine is None) == (value is None), (step, name, kind)
                    if value is not None:
                        torch.testing.assert_close(mine, value, rtol=1e-10, atol=1e-13, msg=f"{step} {name} {kind}")


def when_there_are_gradients(rank: int, stage: int) -> list[bool]:
    model, engine, _ = make_engine(rank, Options(stage=stage, dp=DP))
    parameter, found = model.first.weight, []

    def note() -> None:
        found.append(safe_get_full_grad(parameter) is not None)
        assert engine.has_gradients == (safe_get_local_grad(parameter) is not None)

    note()
    engine.begin_step()
    backward(rank, model, engine, 0, is_last=False)
    note()
    backward(rank, model, engine, 1)
    note()
    whole = safe_get_full_grad(parameter)
    engine.gradient_scale = 0.25
    scaled = safe_get_full_grad(parameter)
    assert whole is not None and scaled is not None and torch.equal(scaled, whole / 4)
    take_step(engine)
    engine.begin_step()
    note()
    engine.ensure_parameters()
    return found


@pytest.mark.gloo
@STAGES
def test_gradients_are_there_from_the_first_backward_on(stage: int) -> None:
    assert run_ranks(DP, when_there_are_gradients, stage) == [[False, True, True, False]] * DP


# --- setting values ----------------------------------------------------------------------------------------------


def values_for(parameter: nn.Parameter, seed: int) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def set_everything(rank: int, stage: int, precision: str) -> list[Tensor]:
    """Set all values, read them, and take a step with them; return a matrix and a parameter of one element after it."""
    model, engine, _ = make_engine(rank, Options(stage=stage, dp=DP, precision=precision))
    engine.begin_step()
    backward(rank, model, engine, 0)
    engine.gradient_scale = 0.5
    for seed, parameter in enumerate((model.middle.weight, model.scale)):
        value = values_for(parameter, seed)
        safe_set_full_fp32_param(parameter, value)
        safe_set_full_grad(parameter, value * 2)
        safe_set_full_optimizer_state(parameter, value * 3, "exp_avg")
        safe_set_full_optimizer_state(parameter, value.square(), "exp_avg_sq")
        seen, master = look(parameter), engine.plan.optimizer.dtype
        assert all(kept is not None and kept.dtype == master for kept in seen)
        for kept, expected in zip(seen, (value, value * 2, value * 3, value.square()), strict=True):
            close = {"rtol": 1e-2, "atol": 1e-2} if precision == "bf16" else {"rtol": 1e-15, "atol": 0.0}
            torch.testing.assert_close(kept, expected.to(master), **close)
        with GatheredParameters([parameter]):
            assert torch.equal(parameter, value.to(master).to(parameter.dtype)), "working follows master"
    engine.gradient_scale = 1.0
    take_step(engine)
    after = [safe_get_full_fp32_param(parameter) for parameter in (model.middle.weight, model.scale)]
    engine.ensure_parameters()
    return [value for value in after if value is not None]


def step_plain() -> list[Tensor]:
    """Compute the same step by its formula; gradients are kept before they are scaled."""
    model, found = make_model(), []
    for seed, parameter in enumerate((model.middle.weight, model.scale)):
        value = values_for(parameter, seed)
        gradient = value * 2 / 0.5
        decayed = value * (1 - LR * SETTINGS.weight_decay) if parameter.ndim > 1 else value
        first = SETTINGS.beta1 * value * 3 + (1 - SETTINGS.beta1) * gradient
        second = SETTINGS.beta2 * value.square() + (1 - SETTINGS.beta2) * gradient.square()
        corrected = (second / (1 - SETTINGS.beta2)).sqrt() + SETTINGS.eps
        found.append(decayed - LR * first / (1 - SETTINGS.beta1) / corrected)
    return found


@pytest.mark.gloo
@STAGES
def test_what_is_set_is_what_the_next_step_starts_from(stage: int) -> None:
    for found in run_ranks(DP, set_everything, stage, "fp64"):
        for mine, expected in zip(found, step_plain(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-13)
    run_ranks(DP, set_everything, stage, "bf16")


# --- local forms -------------------------------------------------------------------------------------------------


def set_locally(rank: int, stage: int) -> tuple[int, dict[str, int]]:
    """Double all values piece by piece; return the elements that the rank owns, and the collectives of a full read."""
    model, engine, _ = make_engine(rank, Options(stage=stage, dp=DP))
    mesh = mesh_in_worker(rank, dp=DP)
    engine.begin_step()
    backward(rank, model, engine, 0)
    parameter = model.first.weight
    safe_set_full_optimizer_state(parameter, values_for(parameter, 1), "exp_avg")
    engine.gradient_scale = 0.5
    before = look(parameter)
    mesh.meter.reset()
    weight, gradient = safe_get_local_fp32_param(parameter), safe_get_local_grad(parameter)
    moment = safe_get_local_optimizer_state(parameter, "exp_avg")
    assert weight is not None and gradient is not None and moment is not None
    assert weight.shape == gradient.shape == moment.shape == (weight.numel(),)
    assert mesh.meter.bytes_by_axis() == {}
    owned = [(piece.start, piece.stop) for piece in engine.pieces("first.weight", "master")]
    assert before.gradient is not None
    expected = [before.gradient.view(-1)[start:stop] for start, stop in owned]
    assert torch.equal(gradient, torch.cat([gradient[:0], *expected]))
    safe_set_local_fp32_param(parameter, weight * 2)
    safe_set_local_grad(parameter, gradient * 2)
    safe_set_local_optimizer_state(parameter, moment * 2, "exp_avg")
    mesh.meter.reset()
    after = look(parameter)
    for kept, doubled in zip(before[:3], after[:3], strict=True):
        assert kept is not None and doubled is not None and torch.equal(doubled, kept * 2)
    traffic = {kind: mesh.meter.count("dp", kind).calls for kind in ("all_reduce", "scalars", "all_gather")}
    with GatheredParameters([parameter]):
        assert torch.equal(parameter, after.weight)
    with pytest.raises(UsageError, match=r"a value of shape \(1000,\) for the master of parameter first.weight"):
        safe_set_local_fp32_param(parameter, torch.ones(1000))
    return weight.numel(), traffic


@pytest.mark.gloo
@STAGES
def test_local_forms(stage: int) -> None:
    results = run_ranks(DP, set_locally, stage)
    owned = [numel for numel, _ in results]
    assert owned == [91] * DP if stage == 0 else sum(owned) == 91 and max(owned) < 91
    for _, traffic in results:
        messages = {"all_reduce": 4, "scalars": 2} if stage else {"all_reduce": 0, "scalars": 0}
        assert traffic == {**messages, "all_gather": 0}


# --- other optimizers --------------------------------------------------------------------------------------------


def momentum(rank: int, stage: int) -> list[str]:
    """Access the momentum of SGD, kept from its first step on; one group has no momentum, one parameter no group."""
    mesh = mesh_in_worker(rank, dp=DP)
    model = make_model()
    groups = [
        {"params": [model.first.weight, model.middle.weight], "momentum": 0.9},
        {"params": [model.last.weight]},
    ]
    inner = Elementwise(TorchOptimizer(torch.optim.SGD(groups, lr=0.1)))
    zero = ZeroConfig(zero_stage=stage, reduce_bucket_size=100)
    plan, buffers = resolve(zero, PrecisionConfig(precision="fp64")), FusedBuffers(0, mesh.device)
    engine = Engine(model, choose_units(model), plan, mesh=mesh, buffers=buffers, settings=EngineSettings(zero, inner))
    buffers.resize(engine.largest_buffer_bytes)
    key, refusals = "momentum_buffer", []

    def refused(call: Any, *arguments: Any) -> None:
        with pytest.raises(UsageError) as error:
            call(*arguments)
        refusals.append(str(error.value))

    weight = model.first.weight
    assert safe_get_full_optimizer_state(weight, key) is None
    if stage == 0:  # in other stages a rank may own nothing of it, and then misses nothing
        assert safe_get_local_optimizer_state(weight, key) is None
    refused(safe_set_full_optimizer_state, weight, torch.zeros(weight.shape, dtype=torch.float64), key)
    engine.begin_step()
    backward(rank, model, engine, 0)
    gradient = safe_get_full_grad(weight)
    take_step(engine, lr=0.1)
    found = safe_get_full_optimizer_state(weight, key)
    assert found is not None and gradient is not None and torch.equal(found, gradient)
    safe_set_full_optimizer_state(weight, gradient * 3, key)
    found = safe_get_full_optimizer_state(weight, key)
    assert found is not None and torch.equal(found, gradient * 3)
    refused(safe_get_full_optimizer_state, weight, "exp_avg")
    refused(safe_get_full_optimizer_state, model.last.weight, key)
    refused(safe_get_full_optimizer_state, model.first.bias, key)
    assert safe_get_full_optimizer_state(model.frozen.weight, key) is None
    engine.ensure_parameters()
    return refusals


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_state_of_other_optimizers(stage: int) -> None:
    for too_early, unknown, without, not_updated in run_ranks(DP, momentum, stage):
        assert "setting the momentum_buffer of parameter first.weight" in too_early
        assert "'exp_avg' of parameter first.weight" in unknown and "legal: momentum_buffer" in unknown
        assert "last.weight" in without and "none at all" in without
        assert "first.bias" in not_updated and "none at all" in not_updated


# --- mistakes ----------------------------------------------------------------------------------------------------


def mistakes(rank: int) -> list[str]:
    model, engine, _ = make_engine(rank, Options(stage=3))
    engine.begin_step()
    with Init():
        kept = nn.Linear(2, 2).weight
    found = []
    for call, *arguments in (
        (safe_get_full_fp32_param, Awkward().scale),
        (safe_get_full_grad, kept),
        (safe_set_full_fp32_param, model.scale, torch.ones(2)),
        (safe_set_full_fp32_param, model.frozen.bias, torch.ones(11)),
        (safe_set_full_grad, model.scale, torch.ones(1)),
        (safe_set_local_optimizer_state, model.scale, torch.ones(1), "step"),
    ):
        with pytest.raises(UsageError) as error:
            call(*arguments)
        found.append(str(error.value))
    return found


@pytest.mark.gloo
def test_mistakes() -> None:
    expected = [
        ("shape (1,) without an engine", "megazero.initialize"),
        ("shape (2, 2) without an engine",),
        ("shape (2,) for the master of parameter scale", "legal: (1,)"),
        ("setting the master of parameter frozen.bias", "frozen"),
        ("setting the gradient of parameter scale", "last backward"),
        ("optimizer state 'step' of parameter scale", "exp_avg, exp_avg_sq"),
    ]
    (found,) = run_ranks(1, mistakes)
    for message, parts in zip(found, expected, strict=True):
        assert all(part in message for part in parts), message
