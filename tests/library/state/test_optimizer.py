"""Tests that an engine's optimizer is a torch optimizer to user code: options that act, and a state that is whole."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import megazero
from megazero.errors import UsageError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.zero.parameters.gathered import GatheredParameters

OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9},
    "NAdam": {},
    "ASGD": {"t0": 1.0},
}
LR, SAMPLES = 0.05, 8


def make() -> nn.Sequential:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1))
    model[2].requires_grad_(False)
    return model.double()


def config(stage: int, kind: str = "AdamW", precision: str = "fp64", **more: Any) -> dict[str, Any]:
    zero = {"zero_stage": stage, "reduce_bucket_size": 20}
    optimizer = {"type": kind, "lr": LR, "params": OPTIONS[kind]}
    return {"zero": zero, "precision": {"precision": precision}, "optimizer": optimizer, **more}


def in_groups(model: nn.Module, kind: str) -> Optimizer:
    """Return an optimizer of two param groups with different rates, and with frozen parameters."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "lr": 0.03}, {"params": parameters[1::2]}]
    made: Optimizer = getattr(torch.optim, kind)(groups, lr=LR, foreach=False, **OPTIONS[kind])
    return made


def engine_of(stage: int, kind: str = "AdamW", *, given: bool = False, mesh: Any = None) -> DataParallelEngine:
    model = make()
    settings = config(stage, kind)
    if given:
        del settings["optimizer"]
    return megazero.initialize(model, settings, mesh=mesh, optimizer=in_groups(model, kind) if given else None)


def plain_of(kind: str = "AdamW", *, given: bool = False) -> tuple[nn.Module, Optimizer]:
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    made: Optimizer = getattr(torch.optim, kind)(trained, lr=LR, foreach=False, **OPTIONS[kind])
    return model, in_groups(model, kind) if given else made


def batch_of(step: int, dp: Any = None) -> Tensor:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x if dp is None else x.chunk(dp.size)[dp.rank]


def train(engine: DataParallelEngine, *steps: int) -> None:
    dp = engine.mesh.axis("dp")
    for step in steps:
        engine.backward(engine(batch_of(step, dp)).square().mean())
        engine.step()


def train_plain(model: nn.Module, optimizer: Optimizer, *steps: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch_of(step)).square().mean().backward()
        optimizer.step()


def weights(engine: DataParallelEngine) -> dict[str, Tensor]:
    with GatheredParameters(engine.module):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def close(found: Any, expected: Any, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol / 1000, check_dtype=False)


def same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        assert found["state"][number].keys() == entries.keys()
        for name, value in entries.items():
            close(torch.as_tensor(found["state"][number][name]), torch.as_tensor(value))
    assert [g["params"] for g in found["param_groups"]] == [g["params"] for g in expected["param_groups"]]


# --- the state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("stage", "kind"), [(0, "AdamW"), (1, "SGD"), (2, "NAdam"), (3, "AdamW"), (3, "ASGD")])
def test_the_state_is_that_of_plain_torch_and_goes_both_ways(stage: int, kind: str, given: bool) -> None:
    """What was trained goes on from the other one's state as if it had been trained there."""
    engine, (model, optimizer) = engine_of(stage, kind, given=given), plain_of(kind, given=given)
    assert engine.optimizer.state_dict()["state"] == {} and isinstance(engine.optimizer, Optimizer)
    train(engine, 0, 1, 2)
    train_plain(model, optimizer, 0, 1, 2)
    saved, expected = copy.deepcopy(engine.optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    same_state(saved, expected)
    names = {name: value.clone() for name, value in engine.state_dict().items()}

    other, (twin, twin_optimizer) = engine_of((stage + 2) % 4, kind, given=given), plain_of(kind, given=given)
    other.load_state_dict(model.state_dict())
    other.optimizer.load_state_dict(expected)
    twin.load_state_dict(names)
    twin_optimizer.load_state_dict(saved)
    train(engine, 3, 4)
    train(other, 3, 4)
    train_plain(twin, twin_optimizer, 3, 4)
    close(weights(other), weights(engine))
    # torch casts NAdam's product of momenta to the parameters' format when it loads, and goes on in that.
    rtol = 1e-6 if kind == "NAdam" else 1e-9
    close(weights(other), {name: p.detach() for name, p in twin.named_parameters()}, rtol)


def state_on_rank(rank: int, stage: int, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    mesh = mesh_in_worker(rank, dp=2)
    engine = engine_of(stage, kind, given=True, mesh=mesh)
    train(engine, 0, 1)
    saved, named = engine.optimizer.state_dict(), engine.state_dict()
    other = engine_of(3 - stage, kind, given=True, mesh=mesh)
    other.load_state_dict(named)
    other.optimizer.load_state_dict(saved)
    train(other, 2)
    found = weights(other)
    engine.close()
    other.close()
    return copy.deepcopy(saved), found


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "kind"), [(3, "AdamW"), (2, "ASGD"), (0, "AdamW")])
def test_ranks_gather_the_state_and_take_their_parts(stage: int, kind: str) -> None:
    model, optimizer = plain_of(kind, given=True)
    train_plain(model, optimizer, 0, 1)
    expected = copy.deepcopy(optimizer.state_dict())
    train_plain(model, optimizer, 2)
    for saved, found in run_ranks(2, state_on_rank, stage, kind):
        same_state(saved, expected)
        close(found, {name: p.detach() for name, p in model.named_parameters()})


def test_an_empty_state_is_that_of_a_new_optimizer() -> None:
    for kind, given in (("AdamW", False), ("NAdam", True)):
        engine, fresh = engine_of(1, kind, given=given), engine_of(1, kind, given=given)
        empty = copy.deepcopy(engine.optimizer.state_dict())
        train(engine, 0, 1)
        fresh.load_state_dict(engine.state_dict())
        engine.optimizer.load_state_dict(empty)
        assert engine.optimizer.state_dict()["state"] == {}
        train(engine, 2)
        train(fresh, 2)
        close(weights(engine), weights(fresh))


class Skipping(nn.Module):
    """A model of which one layer is used in some steps only, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.uses_other = True

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x)) if self.uses_other else self.one(x)


def skipping(rank: int, kind: str, stage: int, folder: str) -> None:
    """A layer that steps leave alone has its own count of steps, which every way of resuming keeps."""

    def begin(stage: int = 0) -> tuple[Any, Optimizer]:
        torch.manual_seed(2)
        model = Skipping().double()
        if not stage:
            return model, getattr(torch.optim, kind)(model.parameters(), lr=LR, foreach=False, **OPTIONS[kind])
        engine = megazero.initialize(model, config(stage, kind), mesh=mesh_in_worker(rank, dp=2))
        return engine, engine.optimizer

    def go(model: Any, optimizer: Optimizer, first: int, last: int) -> dict[str, Tensor]:
        for step in range(first, last):
            is_engine = isinstance(model, DataParallelEngine)
            (model.module if is_engine else model).uses_other = step % 3 == 2
            optimizer.zero_grad()
            loss = model(batch_of(step)).square().mean()
            model.backward(loss) if is_engine else loss.backward()
            model.step() if is_engine else optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    plain, plain_optimizer = begin()
    go(plain, plain_optimizer, 0, 4)
    engine, _ = begin(stage)
    go(engine, engine.optimizer, 0, 4)
    same_state(engine.optimizer.state_dict(), plain_optimizer.state_dict())
    engine.save_checkpoint(folder)
    loaded, _ = begin(stage % 3 + 1)
    loaded.load_checkpoint(folder)
    given, _ = begin(stage)
    given.load_state_dict(plain.state_dict())
    given.optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    expected = go(plain, plain_optimizer, 4, 9)
    for one in (engine, loaded, given):
        close(go(one, one.optimizer, 4, 9), expected)
        same_state(one.optimizer.state_dict(), plain_optimizer.state_dict())
        one.close()


@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "stage"), [("AdamW", 1), ("AdamW", 3), ("NAdam", 2), ("SGD", 3)])
def test_a_layer_that_steps_leave_alone_keeps_its_count(kind: str, stage: int, tmp_path: Path) -> None:
    run_ranks(2, skipping, kind, stage, str(tmp_path))


def changed(saved: dict[str, Any], change: str) -> dict[str, Any]:
    saved = copy.deepcopy(saved)
    state = saved["state"]
    if change == "shape":
        state[0]["exp_avg"] = torch.zeros(3)
    elif change == "class":
        state[1] = {"momentum_buffer": state[1]["exp_avg"]}
    else:
        saved["param_groups"].append({**saved["param_groups"][0], "params": []})
    return saved


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("shape", r"exp_avg of shape \[3\] for parameter 0\.weight(?s:.*)\[7, 4\]"),
        ("class", r"a state of momentum_buffer for parameter 0\.bias(?s:.*)exp_avg, exp_avg_sq, step"),
        ("groups", r"a state of 2 param groups"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: str, told: str) -> None:
    engine = engine_of(2)
    train(engine, 0, 1)
    before = copy.deepcopy(engine.optimizer.state_dict())
    with pytest.raises(UsageError, match=told):
        engine.optimizer.load_state_dict(changed(before, change))
    same_state(engine.optimizer.state_dict(), before)


# --- the options ------------------------------------------------------------------------------------------------------


@each(("stage", "given"), [(0, False), (1, True), (2, False), (3, False), (3, True)])
def test_options_and_torchs_schedules_act_at_the_next_step(stage: int, given: bool) -> None:
    engine, (model, optimizer) = engine_of(stage, given=given), plain_of(given=given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules = [LambdaLR(each, lambda n: 1 / (1 + n)) for each in (engine.optimizer, optimizer)]
        for step in range(3):
            train(engine, step)
            train_plain(model, optimizer, step)
            for schedule in schedules:
                schedule.step()
    assert engine.get_lr() == schedules[0].get_last_lr() == schedules[1].get_last_lr()
    for one in (engine.optimizer, optimizer):
        one.param_groups[-1] |= {"lr": 0.5, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.7, "maximize": True}
    train(engine, 3)
    train_plain(model, optimizer, 3)
    assert engine.get_lr()[-1] == 0.5 and len(engine.get_lr()) == 1 + given
    close(weights(engine), {name: p.detach() for name, p in model.named_parameters()})


def test_options_come_with_a_loaded_state_and_act() -> None:
    engine = engine_of(1)
    train(engine, 0)
    groups, saved = engine.optimizer.param_groups, copy.deepcopy(engine.optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.0
    engine.optimizer.load_state_dict(saved)
    assert engine.optimizer.param_groups is groups and engine.get_lr() == [0.0]
    before = weights(engine)
    train(engine, 1)
    assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())


@pytest.mark.parametrize("given", [False, True])
def test_what_ranks_do_together_is_not_done_by_the_optimizer_alone(given: bool) -> None:
    engine = engine_of(1, given=given)
    with pytest.raises(UsageError, match=r"engine.step\(\)"):
        engine.optimizer.step()
    with pytest.raises(UsageError, match="all param groups before initialize"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_amsgrad_needs_its_state() -> None:
    engine = engine_of(1)
    engine.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(UsageError, match="amsgrad in the optimizer's configuration"):
        train(engine, 0)


# --- the configuration's schedule -------------------------------------------------------------------------------------


def test_the_configurations_schedule_has_torchs_methods() -> None:
    def begin() -> DataParallelEngine:
        scheduler = {"type": "cosine", "params": {"lr_decay_iters": 10, "lr_warmup_iters": 2}}
        return megazero.initialize(make(), config(1, scheduler=scheduler))

    engine, other = begin(), begin()
    assert engine.lr_scheduler is not None and other.lr_scheduler is not None
    train(engine, 0, 1, 2, 3)
    assert engine.lr_scheduler.get_last_lr() == engine.get_lr() == [engine.optimizer.param_groups[0]["lr"]]
    assert engine.get_lr()[0] == pytest.approx(LR * (1 + math.cos(math.pi / 4)) / 2)
    assert engine.optimizer.param_groups[0]["initial_lr"] == LR
    other.lr_scheduler.load_state_dict(engine.lr_scheduler.state_dict())
    assert other.get_lr() == engine.get_lr()
    train(engine, 4)
    train(other, 4)
    assert other.get_lr() == engine.get_lr()
    with pytest.raises(UsageError, match=r"engine.step\(\) alone"):
        engine.lr_scheduler.step()
    with pytest.raises(UsageError, match="lr_decay_iters': 10"):
        engine.lr_scheduler.load_state_dict({**engine.lr_scheduler.state_dict(), "params": {"lr_decay_iters": 11}})
    assert engine_of(0).lr_scheduler is None
