"""Tests events around steps: gathering without writing, errors in the middle, a second engine, empty parameters."""

from typing import Any

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.state.access import safe_get_full_fp32_param

STAGES = (0, 1, 2, 3)


def make_model() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def engine_of(model: nn.Module, zero_stage: int, *, mesh: Any = None, optimizer: Any = None, **more: Any) -> Any:
    zero = {"zero_stage": zero_stage, **more.pop("zero", {})}
    config = {"zero": zero, "precision": {"precision": "fp32"}, **more}
    if optimizer is None:
        config["optimizer"] = {"type": "AdamW", "lr": 1e-3}
    return megazero.initialize(model, config, mesh=mesh or mesh_in_worker(0), optimizer=optimizer)


def loss_of(engine: DataParallelEngine, factor: float = 1.0) -> Tensor:
    x = torch.linspace(-1, 1, 20).view(4, 5).to(next(engine.module.parameters()).dtype)
    return engine(x).float().square().mean() * factor


def train(engine: DataParallelEngine, steps: int = 3) -> float:
    for _ in range(steps):
        engine.backward(loss_of(engine))
        engine.step()
    return float(engine.get_global_grad_norm() or 0.0)


def masters(model: nn.Module) -> list[Tensor]:
    return [value for p in model.parameters() if (value := safe_get_full_fp32_param(p)) is not None]


def untouched_on_rank(rank: int, stage: int) -> None:
    model = make_model()
    mesh = mesh_in_worker(rank, dp=2)
    engine = engine_of(model, stage, mesh=mesh, precision={"precision": "bf16"})
    train(engine)
    before = masters(model)
    with megazero.zero.GatheredParameters(model, modifier_rank=0):
        pass
    model.apply(lambda module: None)
    assert all(map(torch.equal, masters(model), before)), "what bf16 cannot hold is still there"
    with megazero.zero.GatheredParameters(model, modifier_rank=1), torch.no_grad():
        if rank == 1:
            model[0].weight[0, 0] = 0.5
    after = masters(model)
    assert after[0][0, 0] == 0.5 and torch.equal(after[0].flatten()[1:], before[0].flatten()[1:])
    engine.close()


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_a_block_that_writes_nothing_changes_nothing(stage: int) -> None:
    run_ranks(2, untouched_on_rank, stage)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise FloatingPointError("on purpose")


def after_a_failure(rank: int, stage: int) -> tuple[float, float]:
    norms = []
    for fails in (False, True):
        model = make_model()
        engine = engine_of(model, stage)
        if fails:
            hook = model[0].register_forward_hook(lambda module, inputs, output: Fails.apply(output))
            with pytest.raises(FloatingPointError):
                engine.backward(loss_of(engine))
            hook.remove()
        norms.append(train(engine, 1))
        engine.close()
    return norms[0], norms[1]


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_failed_does_not_count(stage: int) -> None:
    ((straight, failed_before),) = run_ranks(1, after_a_failure, stage)
    assert failed_before == straight


def overflows_on_the_wire(rank: int) -> tuple[bool, bool]:
    model = make_model()
    config = {"zero": {"communication_data_type": "fp16"}, "precision": {"precision": "bf16"}}
    engine = engine_of(model, 2, mesh=mesh_in_worker(rank, dp=2), **config)
    engine.backward(loss_of(engine, 1e8))
    engine.step()
    finite = all(bool(torch.isfinite(value).all()) for value in masters(model))
    engine.close()
    return engine.was_step_applied(), finite


@pytest.mark.gloo
def test_gradients_that_overflow_on_the_wire_skip_the_step() -> None:
    assert run_ranks(2, overflows_on_the_wire) == [(False, True)] * 2


def one_engine_after_the_other(rank: int) -> tuple[float, float]:
    model = make_model()
    wide = {"precision": "bf16", "accumulate_allreduce_grads_in_fp32": True}
    engine = engine_of(model, 0, precision=wide)
    train(engine)
    engine.close()
    assert all(parameter.grad is None for parameter in model.parameters())
    fresh = make_model().bfloat16()
    fresh.load_state_dict(model.state_dict())
    narrow = {"precision": "bf16"}
    return train(engine_of(model, 0, precision=narrow)), train(engine_of(fresh, 0, precision=narrow))


@pytest.mark.gloo
def test_a_closed_engine_leaves_an_ordinary_model() -> None:
    ((again, fresh),) = run_ranks(1, one_engine_after_the_other)
    assert again == fresh


class WithNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.nothing.sum()


def without_elements(rank: int, stage: int, contiguous: bool) -> tuple[float, float]:
    zero = {"contiguous_gradients": contiguous}
    return train(engine_of(WithNothing(), stage, zero=zero)), train(engine_of(make_model(), stage, zero=zero))


@pytest.mark.gloo
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_elements(stage: int, contiguous: bool) -> None:
    ((found, expected),) = run_ranks(1, without_elements, stage, contiguous)
    assert found == pytest.approx(expected, rel=1e-6)


def norm_of_some(rank: int, stage: int) -> tuple[float, float]:
    model, plain = make_model(), make_model()
    engine = engine_of(model, stage, optimizer=torch.optim.SGD(model[2].parameters(), lr=1e-3))
    found = train(engine, 1)
    x = torch.linspace(-1, 1, 20).view(4, 5)
    plain(x).square().mean().backward()
    return found, float(nn.utils.get_total_norm([p.grad for p in plain[2].parameters() if p.grad is not None]))


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 3])
def test_the_norm_is_that_of_what_the_optimizer_was_given(stage: int) -> None:
    ((found, expected),) = run_ranks(1, norm_of_some, stage)
    assert found == pytest.approx(expected, rel=1e-5)
