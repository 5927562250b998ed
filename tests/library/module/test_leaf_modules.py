"""Tests of leaf modules: ranks that compute with different modules in a step train as plain PyTorch does."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from support.each import each
from support.irregular_model import alone
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megazero
from megazero.errors import UsageError
from megazero.library.module.units import choose_units

D, STEPS, DP = 6, 3, 2
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Experts(nn.Module):
    """A mixture of experts of two sizes, of which a rank uses those that its samples are routed to, perhaps none.

    how: the number of outputs and where activations are computed again.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, w), nn.Tanh(), nn.Linear(w, D)) for w in (5, 40, 5, 3))
        self.never = nn.Linear(D, 2)

    def forward(self, x: Tensor, used: list[int]) -> Any:
        weight = self.router(x).softmax(-1) if self.how != "nothing routed" else x.detach()[:, :4]
        y = x if not used else x * 0
        for index in used:
            expert = self.experts[index]
            if self.how == "expert recomputed":
                y = y + weight[:, index : index + 1] * checkpoint(expert, x, use_reentrant=False)
            else:
                y = y + weight[:, index : index + 1] * expert(x)
        if self.how == "two outputs":
            return {"hidden": y, "more": (weight.sum() * 0.1,)}
        return y


class Mixture(nn.Module):
    """Two mixtures between dense layers, with a tied matrix of which one copy lies in an expert."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 1)
        self.layers = nn.ModuleList(Experts(how) for _ in range(2))
        if how == "tied":
            self.head = nn.Linear(5, D)
            self.layers[0].experts[0][2].weight = self.head.weight

    def forward(self, x: Tensor, routes: list[list[int]]) -> Tensor:
        x, extra = torch.tanh(self.first(x)), x.new_zeros(())
        for layer, used in zip(self.layers, routes, strict=True):
            if self.how == "layer recomputed":
                found = checkpoint(layer, x, used, use_reentrant=False)
            elif self.how == "layer recomputed, reentrant":
                found = checkpoint(layer, x, used, use_reentrant=True)
            else:
                found = layer(x, used)
            if isinstance(found, dict):
                extra, found = extra + found["more"][0], found["hidden"]
            x = x + found
        if self.how == "tied":
            x = x + self.head(x[:, :5])
        return self.last(x).square().mean() + extra


HOWS = (
    "plain",
    "tied",
    "two outputs",
    "nothing routed",
    "expert recomputed",
    "layer recomputed",
    "layer recomputed, reentrant",
)


def make(how: str) -> Mixture:
    torch.manual_seed(3)
    return Mixture(how).double()


def inputs(step: int, rank: int) -> tuple[Tensor, list[list[int]]]:
    """Return a rank's samples and routes, which differ between ranks and steps, and in the last are empty on rank 0."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(3, D, dtype=torch.float64, generator=generator).requires_grad_()
    routes = [[rank], [0, 3 - rank]] if step % 2 else [[1 - rank, 2], [rank]]
    return x, [[], [3]] if step == STEPS - 1 and rank == 0 else routes


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train_plain(how: str) -> dict[str, Tensor]:
    model = make(how)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(DP):
            (model(*inputs(step, rank)) / DP).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


class Trained(NamedTuple):
    """The outcome of a training on one rank: losses, parameters by name, elements still gathered, and units."""

    losses: list[float]
    weights: dict[str, Tensor]
    gathered: int
    units: list[str]


def train(rank: int, config: dict[str, Any], marked: list[str], hows: Sequence[str]) -> dict[str, Trained]:
    """Train some kinds of mixtures; marked: the classes that are marked as leaf modules."""
    found = {}
    for how in hows:
        model = make(how)
        if marked:
            megazero.zero.set_z3_leaf_modules(model, [Experts if name == "Experts" else name for name in marked])
        engine = megazero.initialize(model, config, mesh=mesh_in_worker(rank, dp=DP), optimizer=sgd)
        losses = []
        for step in range(STEPS):
            loss = engine(*inputs(step, rank))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            with torch.no_grad():
                engine(*inputs(step, rank))
        gathered = engine.zero_engine.gathered_numel[0]
        with megazero.zero.GatheredParameters(model):
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        units = [unit.name for unit in engine.zero_engine.units if unit.is_leaf]
        engine.close()
        found[how] = Trained(losses, weights, gathered, units)
    return found


def own(**zero: Any) -> dict[str, Any]:
    return {"zero": {"zero_stage": 3, "reduce_bucket_size": 100, **zero}, "precision": {"precision": "fp64"}}


def foreign(**leaves: list[str]) -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "leaf_module": leaves, "enable_sanity_checks": True}
    return {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 3}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("config", "marked", "hows"),
    [
        (own(enable_sanity_checks=True), ["Experts"], HOWS),
        (own(leaf_module_classes=["Experts"], max_live_parameters=0), [], HOWS[1::3]),
        (own(leaf_module_name_suffixes=["experts"], leaf_module_classes=[], prefetch_bucket_size=0), [], HOWS[::3]),
        (
            own(leaf_module_names=["layers.0", "layers.1"], max_reuse_distance=10**6, prefetch_bucket_size=10**6),
            [],
            HOWS[2::3],
        ),
    ],
    ids=["marked", "by class", "a list without a forward", "by name"],
)
def test_routing_by_rank_trains_as_plain_pytorch(
    config: dict[str, Any], marked: list[str], hows: Sequence[str]
) -> None:
    """Every kind of mixture is trained under two configurations."""
    runs = run_ranks(DP, train, config, marked, hows)
    for how in hows:
        expected = train_plain(how)
        for found in (run[how] for run in runs):
            for name, value in expected.items():
                torch.testing.assert_close(found.weights[name], value, rtol=1e-9, atol=1e-12, msg=f"{how}: {name}")
            assert found.gathered == 0 or "max_reuse_distance" in config["zero"], how
            assert len(found.units) == 2 + (how == "tied"), found.units


class Routed(nn.Module):
    """Dense layers and, first in backward, two experts: a layer has several buckets, and the experts have eight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.dense = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.layer = Pair()
        self.double()

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for dense in self.dense:
            x = dense(x).tanh()
        return self.layer(x, used).square().mean()


class Pair(nn.Module):
    """Two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return x + sum((self.experts[index](x) for index in used), x)


# By step, those that ranks 0 and 1 use.
_UNEVEN = ([[0, 1], []], [[], [0, 1]], [[0, 1], [1]], [[0], [1]], [[], []])


def train_unevenly(rank: int, settings: dict[str, Any], plain: bool) -> list[Tensor]:
    """Train with `loss.backward()` (plain) or `engine.backward(loss)`; return the weights."""
    model = Routed()
    megazero.zero.set_z3_leaf_modules(model, [Pair])
    config = {"zero": {"zero_stage": 3, **settings}, "precision": {"precision": "fp64"}}
    engine = megazero.initialize(model, config, mesh=mesh_in_worker(rank, dp=DP), optimizer=sgd)
    for step, used in enumerate(_UNEVEN):
        loss = engine(inputs(step, rank)[0], used[rank])
        loss.backward() if plain else engine.backward(loss)
        engine.step()
    with megazero.zero.GatheredParameters(model):
        weights = [p.detach().clone() for p in model.parameters()]
    engine.close()
    return weights


@pytest.mark.gloo
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("threshold", [0, 1000])
def test_a_rank_that_uses_all_does_not_wait_for_one_that_uses_none(plain: bool, threshold: int) -> None:
    """Neither waits for reductions of the other, which needs its part of the next gather before it launches them."""
    settings = {"reduce_bucket_size": 32, "param_persistence_threshold": threshold, "max_reuse_distance": 0}
    model = Routed()
    optimizer = sgd(model.parameters())
    for step, used in enumerate(_UNEVEN):
        optimizer.zero_grad()
        for rank in range(DP):
            (model(inputs(step, rank)[0], used[rank]) / DP).backward()
        optimizer.step()
    for weights in run_ranks(DP, train_unevenly, settings, plain):
        torch.testing.assert_close(weights, list(model.parameters()), rtol=1e-12, atol=1e-14)


def test_a_leaf_that_stays_for_backward_is_gathered_ahead_in_every_pass() -> None:
    """Backward's use of it is recorded although it is whole already, so the next pass follows the record."""
    mesh = alone()
    config = own(leaf_module_classes=["Experts"], leaf_module_names=["first", "last"], prefetch_bucket_size=2500)
    engine = megazero.initialize(make("plain"), config, mesh=mesh, optimizer=sgd)
    found = []
    for _ in range(5):
        mesh.meter.reset()
        engine.backward(engine(*inputs(0, 0)))
        engine.step()
        found.append(mesh.meter.count("dp", "all_gather").calls)
    engine.close()
    assert found[0] > found[1] == found[2] == found[3] == found[4], found


def test_marks_are_set_and_taken_by_class_name_and_suffix() -> None:
    zero, model = megazero.zero, make("plain")
    layers = list(model.layers)
    assert zero.set_z3_leaf_modules(model, [Experts]) == zero.get_z3_leaf_modules(model) == layers
    assert zero.z3_leaf_module(layers[0]) and not zero.z3_leaf_module(model)
    assert zero.unset_z3_leaf_modules(model, ["Experts"]) == layers and not zero.get_z3_leaf_modules(model)
    full_name = f"{Experts.__module__}.Experts"
    assert zero.set_z3_leaf_modules(model, [full_name]) == layers
    zero.set_z3_leaf_module(layers[0], False)
    assert zero.get_z3_leaf_modules(model) == layers[1:]
    assert zero.set_z3_leaf_modules_by_name(model, ["layers.0", "x"], raise_if_not_found=False) == (layers[:1], ["x"])
    found, missing = zero.set_z3_leaf_modules_by_suffix(model, ["experts", "y"], flag=False)
    assert found == [layer.experts for layer in layers] and missing == ["y"]
    with pytest.raises(UsageError, match="no module of Mixture is Conv2d, Nothing"):
        zero.set_z3_leaf_modules(model, [nn.Conv2d, "Nothing"])
    assert zero.set_z3_leaf_modules(model, ["Nothing"], raise_if_not_found=False) == []


def around(model: nn.Module, config: dict[str, Any]) -> Any:
    return megazero.initialize(model, config, mesh=alone())


def test_the_key_of_a_deepspeed_configuration() -> None:
    model = make("plain")
    engine = around(model, foreign(classes=["Experts"], names=[], name_suffixes=["experts"]))
    assert [unit.name for unit in engine.zero_engine.units if unit.is_leaf] == ["layers.0", "layers.1"]
    assert megazero.zero.z3_leaf_parameter(model.layers[0].never.weight)
    assert not megazero.zero.z3_leaf_parameter(model.first.weight)
    with pytest.raises(UsageError, match="leaf modules of a model with an engine"):
        megazero.zero.set_z3_leaf_modules(model, [Experts])
    engine.close()


def test_what_no_module_matches_is_named() -> None:
    with pytest.warns(UserWarning, match=r"zero\.leaf_module_names: no module of the model is 'expert'"):
        around(make("plain"), own(leaf_module_names=["expert"], leaf_module_classes=["Experts"])).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        around(make("plain"), own()).close()


def test_leaves_are_units_in_stage_3_only() -> None:
    model = make("plain")
    megazero.zero.set_z3_leaf_modules(model, [Experts])
    engine = around(model, {"zero": {"zero_stage": 2}})
    assert not any(unit.is_leaf for unit in engine.zero_engine.units)
    engine.close()


Pick = Callable[[Mixture], nn.Module]


@each(
    ("leaf", "unit", "consumer"),
    [
        (lambda m: m.layers[0], "layers.0", "layers.0"),
        (lambda m: m.layers[0].experts, "layers.0", "layers.0"),
        (lambda m: m.layers, "the model", ""),
        (lambda m: m.layers[1].experts[0], "layers.1.experts.0", "layers.1.experts.0"),
        (lambda m: m, "the model", ""),
    ],
)
def test_a_leaf_is_one_unit_that_a_module_with_a_forward_reads(leaf: Pick, unit: str, consumer: str) -> None:
    model = make("plain")
    units = choose_units(model, [leaf(model)])
    (found,) = (one for one in units if one.is_leaf)
    inside = {id(p) for p in model.get_submodule(consumer).parameters()}
    assert set(found.parameters) == {name for name, p in model.named_parameters() if id(p) in inside}
    assert found.name == unit and found.consumers == (model.get_submodule(consumer),)
    assert sorted(name for one in units for name in one.parameters) == sorted(dict(model.named_parameters()))


def test_a_leaf_in_a_leaf_belongs_to_the_outer_one() -> None:
    model = make("plain")
    units = choose_units(model, [model.layers[0].experts[1], model.layers[0], model.layers[0].router])
    assert [unit.name for unit in units if unit.is_leaf] == ["layers.0"]
