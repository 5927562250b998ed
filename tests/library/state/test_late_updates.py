"""Tests of late updates as a user of an engine sees them, beside plain PyTorch that applies each gradient late."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.state.access import safe_get_full_fp32_param, safe_set_full_fp32_param
from megazero.optim.inner import Elementwise, FusedAdamW
from megazero.zero.parameters.gathered import GatheredParameters

WIDTH, SAMPLES, AT_ONCE, RATE = 12, 8, 1, 0.02


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()


def make_optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1)


def make_engine(stage: int, *, own_optimizer: bool = True, mesh: Any = None, **zero: Any) -> DataParallelEngine:
    zero = {"zero_stage": stage, "reduce_bucket_size": 64, "offload_optimizer": "cpu", **zero}
    zero |= {"delayed_parameter_update": True, "delayed_parameter_update_start": AT_ONCE}
    model, config = make_model(), {"zero": zero, "precision": {"precision": "fp64"}}
    if own_optimizer:
        return megazero.initialize(model, config, optimizer=make_optimizer(model.parameters()), mesh=mesh)
    optimizer = {"type": "AdamW", "lr": RATE, "params": {"weight_decay": 0.1}}
    return megazero.initialize(model, {**config, "optimizer": optimizer}, mesh=mesh)


@contextmanager
def slow_updates() -> Iterator[None]:
    """Let every update of a run take longer than a forward."""

    def slowed(update: Callable[..., None]) -> Callable[..., None]:
        def wait_first(*args: Any, **options: Any) -> None:
            time.sleep(0.004)
            update(*args, **options)

        return wait_first

    with (
        patch.object(Elementwise, "update", slowed(Elementwise.update)),
        patch.object(FusedAdamW, "update", slowed(FusedAdamW.update)),
    ):
        yield


def batch_of(step: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


class Plain:
    """The training in plain PyTorch: two copies of the weights, of which `live` follows `masters` a step late."""

    def __init__(self) -> None:
        self.live, self.masters = make_model(), make_model()
        self.optimizer = make_optimizer(self.masters.parameters())
        self.late: dict[str, Tensor] = {}
        self.steps = 0

    def step(self) -> float:
        loss = self.live(batch_of(self.steps)).square().mean()
        gradients = torch.autograd.grad(loss, list(self.live.parameters()))
        for master, gradient in zip(self.masters.parameters(), gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()
        self.steps += 1
        if self.steps > AT_ONCE:
            if self.late:
                self.live.load_state_dict(self.late)
            self.late = copy.deepcopy(self.masters.state_dict())
        else:
            self.live.load_state_dict(self.masters.state_dict())
        return loss.item()

    def publish(self) -> None:
        self.live.load_state_dict(self.masters.state_dict())


def step_of(engine: DataParallelEngine, step: int) -> float:
    dp = engine.mesh.axis("dp")
    loss = engine(batch_of(step).chunk(dp.size)[dp.rank]).square().mean()
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dp.all_reduce(total).wait()
    return total.item() / dp.size


def close(ours: list[float], theirs: list[float]) -> None:
    assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("own_optimizer", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rate_that_changes_between_two_steps_is_that_of_its_gradients(stage: int, own_optimizer: bool) -> None:
    plain, engine = Plain(), make_engine(stage, own_optimizer=own_optimizer)
    ours, theirs = [], []
    with slow_updates():
        for step in range(6):
            ours.append(step_of(engine, step))
            theirs.append(plain.step())
            for group in (*engine.optimizer.param_groups, *plain.optimizer.param_groups):
                group["lr"] *= 0.5
    close(ours, theirs)
    first, _ = engine.module.parameters(), plain.late
    master = safe_get_full_fp32_param(next(iter(first)))
    assert master is not None and torch.allclose(master.double(), next(plain.masters.parameters()), rtol=1e-9, atol=0)
    engine.close()


@pytest.mark.parametrize("stage", [1, 2])
def test_what_a_user_writes_between_two_steps_counts_at_once(stage: int) -> None:
    plain, engine = Plain(), make_engine(stage)
    ours, theirs = [], []
    with slow_updates():
        for step in range(6):
            if step == 3:
                for name in ("0.weight", "2.bias"):
                    with torch.no_grad():
                        written = engine.module.get_parameter(name).mul_(0.5).add_(1.0).clone()
                        for weights in (plain.live, plain.masters):
                            weights.get_parameter(name).copy_(written)
                    plain.late[name] = written
            ours.append(step_of(engine, step))
            theirs.append(plain.step())
    close(ours, theirs)
    engine.close()


def change_values(rank: int, stage: int) -> list[list[float]]:
    """Train, and change values through the doors for that; return the losses of the engine, and of plain PyTorch."""
    plain, engine = Plain(), make_engine(stage, mesh=mesh_in_worker(rank, dp=2))
    ours, theirs = [], []
    with slow_updates():
        for step in range(8):
            if step == 3:
                with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                    engine.module.get_parameter("2.bias").data.add_(1.0)
                plain.publish()  # whoever looks at parameters sees all updates
                plain.late = {}
                for weights in (plain.live, plain.masters):
                    weights.get_parameter("2.bias").data.add_(1.0)
                plain.late = copy.deepcopy(plain.masters.state_dict())
            if step == 5:
                parameter = engine.module.get_parameter("0.weight")
                master = safe_get_full_fp32_param(parameter)
                assert master is not None
                theirs_now = plain.masters.get_parameter("0.weight").detach()
                assert torch.allclose(master.double(), theirs_now, rtol=1e-6)
            ours.append(step_of(engine, step))
            theirs.append(plain.step())
    engine.close()
    return [ours, theirs]


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [2, 3])
def test_values_are_read_and_changed(stage: int) -> None:
    for ours, theirs in run_ranks(2, change_values, stage):
        close(ours, theirs)


def test_a_master_weight_that_is_set_is_published() -> None:
    engine = make_engine(2)
    with slow_updates():
        for step in range(3):
            step_of(engine, step)
        parameter = engine.module.get_parameter("2.bias")
        safe_set_full_fp32_param(parameter, torch.full((1,), 0.75, dtype=torch.float64))
        assert parameter.item() == 0.75
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_dict_has_all_updates_and_training_goes_on_from_them(stage: int) -> None:
    plain, engine = Plain(), make_engine(stage)
    ours, theirs = [], []
    with slow_updates():
        for step in range(6):
            if step in (3, 4):
                plain.publish()
                plain.late = {}
                state = engine.state_dict()
                for name, master in plain.masters.state_dict().items():
                    assert torch.allclose(state[name], master, rtol=1e-9, atol=0)
                if step == 4:
                    engine.load_state_dict(state)
            ours.append(step_of(engine, step))
            theirs.append(plain.step())
    close(ours, theirs)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_saved_training_goes_on_to_the_bit(stage: int, tmp_path: Path) -> None:
    with slow_updates():
        first = make_engine(stage)
        for step in range(4):
            step_of(first, step)
        first.save_checkpoint(tmp_path)
        ours = [step_of(first, step) for step in range(4, 8)]
        second = make_engine(stage)
        second.load_checkpoint(tmp_path)
        theirs = [step_of(second, step) for step in range(4, 8)]
    assert ours == theirs
    assert torch.equal(first.state_dict()["0.weight"], second.state_dict()["0.weight"])
    first.close()
    second.close()


class Failing(torch.optim.SGD):
    """An optimizer that fails at one learning rate."""

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["lr"] == 0.5:
            raise ArithmeticError("the learning rate is 0.5")
        return super().step(closure)


def test_a_late_update_that_fails_ends_the_next_step() -> None:
    model = make_model()
    zero = {"zero_stage": 1, "offload_optimizer": "cpu", "delayed_parameter_update": True}
    zero |= {"delayed_parameter_update_start": 0}
    config = {"zero": zero, "precision": {"precision": "fp64"}}
    engine = megazero.initialize(model, config, optimizer=Failing(model.parameters(), lr=0.1))
    step_of(engine, 0)
    engine.optimizer.param_groups[0]["lr"] = 0.5
    step_of(engine, 1)
    with pytest.raises(ArithmeticError, match=r"rate is 0\.5"):
        step_of(engine, 2)
    engine.close()
