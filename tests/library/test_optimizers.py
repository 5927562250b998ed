"""Tests every elementwise optimizer on partitioned state: chosen by name, given, or made by a function."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.any_models import CASES, History, inputs_of, make, train_plain
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from support.published_optimizers import reference_class
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import megazero
from megazero.config.choices import OptimizerChoice
from megazero.config.optimizers import OPTIMIZERS
from megazero.errors import ConfigError, UsageError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.optimizers import choose
from megazero.library.state.access import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from megazero.optim.inner import Elementwise, FusedAdamW
from megazero.zero.parameters.gathered import GatheredParameters

STEPS = 4
NAME = "perceptron"  # a model with frozen, unused and one-element parameters
# Options by name of optimizer, different from the defaults where that is simple.
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"betas": (0.8, 0.9), "weight_decay": 0.2},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.1},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "ASGD": {"t0": 1.0},
    "Lamb": {"betas": (0.8, 0.95), "weight_decay": 0.1, "max_coeff": 2.0},
    "Adafactor": {"eps": (1e-5, 0.01), "d": 1.5, "beta2_decay": -0.5, "weight_decay": 0.1},
    "Lion": {"betas": (0.8, 0.95), "weight_decay": 0.1},
}
LR = 0.02


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero": {"zero_stage": stage, "reduce_bucket_size": 50}, "precision": {"precision": "fp64"}, **more}


def run(engine: DataParallelEngine, rank: int = 0, dp: int = 1, scheduler: LambdaLR | None = None) -> dict[str, Tensor]:
    for step in range(STEPS):
        part = [x.chunk(dp)[rank] for x in inputs_of(NAME, step)]
        engine.backward(CASES[NAME].loss(engine, step, *part))
        engine.step()
        if scheduler is not None:
            scheduler.step()
    with GatheredParameters(engine.module):
        found = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.close()
    return found


def by_name(rank: int, kind: str, stage: int, dp: int) -> dict[str, Tensor]:
    mesh = mesh_in_worker(rank, dp=dp) if dp > 1 else None
    optimizer = {"type": kind, "lr": LR, "params": OPTIONS[kind]}
    return run(megazero.initialize(make(NAME), config(stage, optimizer=optimizer), mesh=mesh), rank, dp)


def plain(kind: str) -> History:
    return train_plain(NAME, STEPS, lambda p: reference_class(kind)(p, lr=LR, **OPTIONS[kind]))


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_every_choice_is_tried() -> None:
    in_8_bits = {kind for kind, optimizer in OPTIMIZERS.items() if optimizer.package}  # in test_eight_bit.py
    assert OPTIONS.keys() == OPTIMIZERS.keys() - in_8_bits


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("stage", [0, 3])
def test_by_name(kind: str, stage: int) -> None:
    close(by_name(0, kind, stage, 1), plain(kind).weights)


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "NAdam", "RMSprop", "Lamb", "Lion", "Adafactor"])
def test_by_name_on_several_ranks(kind: str) -> None:
    expected = plain(kind).weights
    for stage in (1, 2, 3):
        for found in run_ranks(2, by_name, kind, stage, 2):
            close(found, expected)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW with two groups of different rates and decays."""
    parameters = list(parameters)
    groups = [{"params": parameters[::2], "lr": 0.05, "weight_decay": 0.3}, {"params": parameters[1::2]}]
    return torch.optim.AdamW(groups, lr=LR, weight_decay=0.0)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("given", ["instance", "function"])
def test_groups_of_a_given_optimizer_hold(stage: int, given: str) -> None:
    model = make(NAME)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = megazero.initialize(model, config(stage), optimizer=grouped(trained) if given == "instance" else grouped)
    assert engine.get_lr() == [0.05, LR] and engine.optimizer is not None
    close(run(engine), train_plain(NAME, STEPS, grouped).weights)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_scheduler_on_a_given_optimizer_acts(stage: int) -> None:
    def rate(step: int) -> float:
        return 1.0 / (1 + step)

    model = make(NAME)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # including the frozen parameters
    scheduler = LambdaLR(optimizer, rate)
    engine = megazero.initialize(model, config(stage), optimizer=optimizer)
    found = run(engine, scheduler=scheduler)
    assert engine.get_lr() == scheduler.get_last_lr() == [0.5 / (1 + STEPS)]

    other = make(NAME)
    plain_optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    plain_scheduler = LambdaLR(plain_optimizer, rate)
    for step in range(STEPS):
        plain_optimizer.zero_grad()
        CASES[NAME].loss(other, step, *inputs_of(NAME, step)).backward()
        plain_optimizer.step()
        plain_scheduler.step()
    close(found, {name: p.detach() for name, p in other.named_parameters()})


@pytest.mark.parametrize("stage", [1, 3])
def test_what_the_optimizer_was_not_given_stays(stage: int) -> None:
    model, before = make(NAME), make(NAME)
    engine = megazero.initialize(model, config(stage), optimizer=torch.optim.SGD(model.layers.parameters(), lr=0.1))
    found = run(engine)
    for name, value in before.named_parameters():
        assert torch.equal(found[name], value) != name.startswith("layers."), name


# --- param groups by pattern -----------------------------------------------------------------------------------------

# Rates as multiples of the others', and weight decays; the weights of the layers are matched by two patterns.
PATTERNS = ["layers.0.* lr=0.06", "layers.*.weight weight_decay=0.5", "last.* lr=0.002 weight_decay=0.3"]


def by_pattern(rank: int, kind: str, stage: int, dp: int, **more: Any) -> dict[str, Tensor]:
    mesh = mesh_in_worker(rank, dp=dp) if dp > 1 else None
    optimizer = {"type": kind, "lr": LR, "params": {"weight_decay": 0.1}, "param_groups": PATTERNS}
    scheduler = {"type": "linear", "params": {"lr_decay_iters": 5, "min_lr": 0.004}}
    settings = config(stage, optimizer=optimizer, scheduler=scheduler)
    settings["zero"] |= more
    return run(megazero.initialize(make(NAME), settings, mesh=mesh), rank, dp)


def plain_by_pattern(kind: str) -> dict[str, Tensor]:
    """Train with torch's groups, whose rates are written by hand before each step."""
    model = make(NAME)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        factor, decay = 1.0, 0.1
        if name.startswith("layers.0."):
            factor = 3.0
        elif name.startswith("layers.") and name.endswith(".weight"):
            decay = 0.5
        elif name.startswith("last."):
            factor, decay = 0.1, 0.3
        if p.requires_grad:
            groups.setdefault((factor, decay), []).append(p)
    assert len(groups) == 4
    optimizer = reference_class(kind)([{"params": p, "weight_decay": key[1]} for key, p in groups.items()], lr=1.0)
    for step in range(STEPS):
        for (factor, _), group in zip(groups, optimizer.param_groups, strict=True):
            group["lr"] = factor * (0.004 + (LR - 0.004) * (1 - step / 5))
        optimizer.zero_grad()
        CASES[NAME].loss(model, step, *inputs_of(NAME, step)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lamb", "NAdam"])
def test_patterns_have_rates_and_decays_of_their_own(kind: str) -> None:
    for stage in (0, 3):
        close(by_pattern(0, kind, stage, 1), plain_by_pattern(kind))


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["AdamW", "RMSprop"])
def test_patterns_on_several_ranks(kind: str) -> None:
    for found in run_ranks(2, by_pattern, kind, 2, 2):
        close(found, plain_by_pattern(kind))


@each(
    ("patterns", "given", "legal"),
    [
        (["weight lr=1"], "optimizer.param_groups: weight", "0.weight"),
        (["*.bais lr=1"], "optimizer.param_groups: *.bais", "0.bias, 1.bias"),
        (["0.* lr=1", "0.b* lr=2"], "optimizer.param_groups: 0.b*", "0.b* before 0.*"),
        (["2.* lr=1"], "optimizer.param_groups: 2.*", "0.weight, 0.bias, 1.weight, ..."),
    ],
)
def test_a_pattern_without_parameters_is_refused(patterns: list[str], given: str, legal: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ConfigError) as caught:
        megazero.initialize(model, {"optimizer": {"type": "SGD", "lr": 0.1, "param_groups": patterns}})
    (problem,) = caught.value.problems
    assert problem.given == given and problem.legal.startswith(legal)


# --- choice and refusals ---------------------------------------------------------------------------------------------


def test_adamw_of_a_configuration_is_the_fused_one() -> None:
    model = nn.Linear(3, 2)
    chosen = choose(None, OptimizerChoice(type="AdamW", lr=0.1, params={"weight_decay": 0.5}), model)
    assert isinstance(chosen.inner, FusedAdamW) and chosen.given is None
    group = chosen.groups[0]
    assert [group[name] for name in ("lr", "weight_decay", "eps")] == [0.1, 0.5, 1e-8]
    other = choose(None, OptimizerChoice(type="AdamW", lr=0.1, params={"amsgrad": True}), model)
    assert isinstance(other.inner, Elementwise) and other.given is not None
    assert other.given.param_groups[0]["amsgrad"] is True


def test_only_parameters_with_weight_decay_have_a_decoupled_rate() -> None:
    """The message names those of the model that have some; biases and norms of models with specs have none."""
    cases: list[tuple[nn.Module, str, str]] = [
        (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), "1.bias", "0.weight, 1.weight"),
        (nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), "1.bias", "0.weight, 1.weight, 2.weight, ..."),
        (nn.LayerNorm(3), "bias", "leave out decoupled_lr"),
    ]
    for model, name, legal in cases:
        choice = OptimizerChoice(type="SGD", lr=0.1, decoupled_lr=0.5, decoupled_parameters=(name,))
        with pytest.raises(ConfigError) as caught:
            choose(None, choice, model)
        (problem,) = caught.value.problems
        assert problem.given == f"optimizer.decoupled_parameters: {name}" and problem.legal == legal


def refusals() -> list[tuple[Callable[[nn.Module], Any], str]]:
    return [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS"),
        (lambda model: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), "1 tensors that are no parameters"),
        (lambda model: lambda parameters: "Adam", "optimizer of type str"),
    ]


@pytest.mark.parametrize(("make_optimizer", "told"), refusals())
def test_optimizers_that_do_not_fit(make_optimizer: Callable[[nn.Module], Any], told: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=told):
        megazero.initialize(model, {"zero": {}}, optimizer=make_optimizer(model))


def test_a_given_optimizer_never_steps_itself() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    megazero.initialize(model, {"zero": {}}, optimizer=optimizer)
    with pytest.raises(UsageError, match=r"engine.step\(\)"):
        optimizer.step()


# --- Adafactor, whose state is of whole matrices ----------------------------------------------------------------------


class Matrices(nn.Module):
    """A linear layer, a stack of matrices, a column, a vector and a number; a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.stack = nn.Parameter(torch.randn(3, 5, 2))
        self.column = nn.Parameter(torch.randn(6, 1))
        self.number = nn.Parameter(torch.tensor(0.3))
        self.unused = nn.Parameter(torch.ones(4, 2))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) @ self.stack.sum(0) @ self.frozen
        return (hidden.sum(1, keepdim=True) * self.column.T * self.number).sin().square().mean()


FACTORED: dict[str, Any] = {"eps": (1e-3, 0.01), "d": 1.5, "weight_decay": 0.2}


def factored(model: nn.Module) -> torch.optim.Optimizer:
    """Return Adafactor over all parameters but one, in two groups."""
    rest = [model.get_parameter(name) for name in ("stack", "column", "unused")]
    groups = [{"params": [model.get_parameter("first.weight")], "lr": 0.05, "maximize": True}, {"params": rest}]
    return torch.optim.Adafactor([*groups, {"params": [model.get_parameter("number")]}], lr=LR, **FACTORED)


def matrices() -> Matrices:
    torch.manual_seed(5)
    return Matrices().double()


def samples(step: int) -> Tensor:
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def plain_matrices(steps: int) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    model = matrices()
    optimizer = factored(model)
    for step in range(steps):
        optimizer.zero_grad()
        model(samples(step)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, optimizer.state_dict()["state"]


def given_adafactor(
    rank: int, dp: int, stages: tuple[int, ...], shard_size: int = -1
) -> list[tuple[dict[str, Tensor], dict[int, Any]]]:
    found = []
    for stage in stages:
        mesh = mesh_in_worker(rank, dp=dp) if dp > 1 else None
        model, settings = matrices(), config(stage)
        settings["zero"] |= {"reduce_bucket_size": 20, "mics_shard_size": shard_size}
        engine = megazero.initialize(model, settings, optimizer=factored(model), mesh=mesh)
        for step in range(STEPS):
            engine.backward(engine(samples(step).chunk(dp)[rank]))
            engine.step()
        row = safe_get_full_optimizer_state(model.stack, "row_var")
        assert row is not None and row.shape == (3, 5, 1) and engine.optimizer is not None
        state = engine.optimizer.state_dict()["state"]
        assert torch.equal(state[1]["row_var"], row)
        with GatheredParameters(engine.module):
            found.append(({name: p.detach().clone() for name, p in model.named_parameters()}, state))
        engine.close()
    return found


def check_matrices(found: tuple[dict[str, Tensor], dict[int, Any]]) -> None:
    weights, state = plain_matrices(STEPS)
    close(found[0], weights)
    assert found[1].keys() == state.keys(), "what has no gradient has no state"
    for number, entries in state.items():
        close(found[1][number], entries)


@pytest.mark.parametrize("stage", range(4))
def test_a_given_adafactor_has_torchs_state(stage: int) -> None:
    check_matrices(given_adafactor(0, 1, (stage,))[0])


@pytest.mark.gloo
def test_a_given_adafactor_on_several_ranks() -> None:
    for ranks in run_ranks(3, given_adafactor, 3, (0, 1, 2, 3)):
        for found in ranks:
            check_matrices(found)


def goes_on(rank: int, dp: int, folder: str, stage: int, steps: range) -> tuple[dict[str, Tensor], dict[int, Any]]:
    """Train some steps from the checkpoint in a folder, if there is one, and save there."""
    mesh = mesh_in_worker(rank, dp=dp) if dp > 1 else None
    model = matrices()
    engine = megazero.initialize(model, config(stage), optimizer=factored(model), mesh=mesh)
    if steps.start:
        engine.load_checkpoint(folder)
    for step in steps:
        engine.backward(engine(samples(step).chunk(dp)[rank]))
        engine.step()
    engine.save_checkpoint(folder)
    assert engine.optimizer is not None
    state = engine.optimizer.state_dict()["state"]
    with GatheredParameters(engine.module):
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.close()
    return found, state


@pytest.mark.gloo
def test_a_given_adafactor_goes_on_at_another_layout(tmp_path: Path) -> None:
    run_ranks(3, goes_on, 3, str(tmp_path), 3, range(2))
    check_matrices(goes_on(0, 1, str(tmp_path), 1, range(2, STEPS)))


@pytest.mark.gloo
def test_a_given_adafactor_over_replicas() -> None:
    """Two groups of two ranks, each with all partitions."""
    for (found,) in run_ranks(4, given_adafactor, 4, (3,), 2):
        check_matrices(found)


class Slices(nn.Module):
    """A stack of matrices, of which this rank has some of the columns, and one that every rank has whole."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        stack, whole = (torch.randn(2, 7, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        self.stack = nn.Parameter(stack.chunk(size, 2)[rank].contiguous())
        self.whole = nn.Parameter(whole)
        if size > 1:
            vars(self.stack).update(tensor_model_parallel=True, partition_dim=2)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.stack.sum(0)).sin().mean(0).sum() + (x @ self.whole.sum(0)).cos().mean(0).sum()


def in_slices(rank: int, stage: int) -> tuple[Tensor, Tensor, dict[int, Any]]:
    mesh = mesh_in_worker(rank, tp=2, dp=2)
    model = Slices(mesh.coordinate("tp"), 2)
    given = torch.optim.Adafactor(model.parameters(), lr=LR, **FACTORED)
    engine = megazero.initialize(model, config(stage), optimizer=given, mesh=mesh)
    for step in range(STEPS):
        engine.backward(engine(samples(step).chunk(2)[mesh.coordinate("dp")]))
        engine.step()
    assert engine.optimizer is not None
    state = engine.optimizer.state_dict()["state"]
    with GatheredParameters(engine.module):
        found = model.stack.detach().clone(), model.whole.detach().clone()
    engine.close()
    return *found, state


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 3])
def test_averages_are_of_what_tensor_parallel_ranks_have_together(stage: int) -> None:
    ranks = run_ranks(4, in_slices, stage)
    model = Slices(0, 1)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=LR, **FACTORED)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(samples(step)).backward()
        optimizer.step()
    expected = {"stack": model.stack.detach(), "whole": model.whole.detach()}
    close({"stack": torch.cat([ranks[0][0], ranks[1][0]], 2), "whole": ranks[3][1]}, expected)
    for _, _, state in ranks:
        for number, entries in optimizer.state_dict()["state"].items():
            close(state[number], entries)


def test_a_given_adafactor_takes_torchs_state() -> None:
    """The second half of a training goes on from a plain optimizer's weights and state."""
    weights, _ = plain_matrices(2)
    plain_model = matrices()
    plain_optimizer = factored(plain_model)
    for step in range(2):
        plain_optimizer.zero_grad()
        plain_model(samples(step)).backward()
        plain_optimizer.step()
    model = matrices()
    model.load_state_dict(weights)
    engine = megazero.initialize(model, config(3), optimizer=factored(model))
    assert engine.optimizer is not None
    engine.optimizer.load_state_dict(plain_optimizer.state_dict())
    for step in range(2, STEPS):
        engine.backward(engine(samples(step)))
        engine.step()
    with GatheredParameters(engine.module):
        close({name: p.detach().clone() for name, p in model.named_parameters()}, plain_matrices(STEPS)[0])
    state = engine.optimizer.state_dict()
    wrong = {**state, "state": {**state["state"], 1: {**state["state"][1], "row_var": torch.zeros(3, 5, 2)}}}
    with pytest.raises(UsageError, match=r"row_var of shape \[3, 5, 2\](?s:.*)\[3, 5, 1\]"):
        engine.optimizer.load_state_dict(wrong)
    value = torch.full((3, 1, 2), 0.5, dtype=torch.float64)
    safe_set_full_optimizer_state(model.stack, value, "col_var")
    assert torch.equal(engine.optimizer.state_dict()["state"][1]["col_var"], value)
    with pytest.raises(UsageError, match=r"'variance'(?s:.*)row_var, col_var"):
        safe_get_full_optimizer_state(model.stack, "variance")
    engine.close()


def test_a_given_adafactor_cannot_be_late() -> None:
    late = config(1)
    late["zero"] |= {"offload_optimizer": "cpu", "delayed_parameter_update": True}
    model = matrices()
    with pytest.raises(ConfigError, match=r"zero.delayed_parameter_update with a given Adafactor"):
        megazero.initialize(model, late, optimizer=factored(model))
