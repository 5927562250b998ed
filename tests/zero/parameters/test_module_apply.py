"""Tests of Module.apply over partitioned parameters: the values it sets, and the number of collectives."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.irregular_model import engine_around
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

from megazero.comm.mesh import Mesh
from megazero.errors import UsageError
from megazero.library.partitioned_init.init import Init
from megazero.zero.parameters.gathered import GatheredParameters
from megazero.zero.parameters.module_apply import gather_around_apply, restore_apply


def draw(module: nn.Module) -> None:
    """Draw weights again, in the ways in which models initialize them."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.5)
        module.bias.data.uniform_(-1, 1)
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_()
        with torch.no_grad():
            module.weight[0].fill_(0)


class Model(nn.Module):
    """A model with a layer that `draw` leaves alone, a tied parameter, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(3))


def values(model: nn.Module) -> dict[str, Tensor]:
    with GatheredParameters(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def expected() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {name: parameter.detach() for name, parameter in Model().apply(draw).named_parameters()}


def calls(mesh: Mesh) -> tuple[int, int]:
    return mesh.meter.count("dp", "all_gather").calls, mesh.meter.count("dp", "broadcast").calls


def under_init(rank: int, override: bool) -> tuple[dict[str, Tensor], tuple[int, int], str]:
    """Build a model under zero.Init and apply `draw`; return its values, the collectives sent, and any refusal."""
    mesh = mesh_in_worker(rank, dp=2)
    torch.manual_seed(5 + 10 * rank)
    config = {"zero": {"zero_stage": 3, "override_module_apply": override}}
    with Init(mesh=mesh, config_dict_or_path=config):
        model = Model()
    mesh.meter.reset()
    refusal = ""
    try:
        assert model.apply(draw) is model
    except UsageError as error:
        refusal = str(error)
    messages = calls(mesh)
    return values(model), messages, refusal


@pytest.mark.gloo
def test_partitioned_by_init() -> None:
    for found, messages, refusal in run_ranks(2, under_init, True):
        reference = expected()
        assert found.keys() == reference.keys()
        assert all(torch.equal(found[name], value) for name, value in reference.items())
        # Each module gathers its own parameters: embed 1, norm 2, head 2 (one of them tied), the model 1.
        assert messages == (6, 6) and refusal == ""
    for _, messages, refusal in run_ranks(2, under_init, False):
        assert messages == (0, 0)
        assert "embed.weight" in refusal and "GatheredParameters" in refusal


def under_engine(rank: int, gathers: bool) -> tuple[dict[str, Tensor], tuple[int, int], str, bool]:
    """Do the same with an engine that partitions parameters; return also if closing it leaves an `apply` behind."""
    mesh = mesh_in_worker(rank, dp=2)
    torch.manual_seed(5 + 10 * rank)
    model = Model()
    engine = engine_around(model, mesh, precision="fp32", zero_stage=3, override_module_apply=gathers)
    mesh.meter.reset()
    refusal = ""
    try:
        model.apply(draw)
    except UsageError as error:
        refusal = str(error)
    messages, found = calls(mesh), values(model)
    engine.close()
    return found, messages, refusal, any("apply" in vars(module) for module in model.modules())


@pytest.mark.gloo
def test_kept_by_an_engine() -> None:
    for found, (gathers, broadcasts), refusal, is_left in run_ranks(2, under_engine, True):
        assert all(torch.equal(found[name], value) for name, value in expected().items())
        assert gathers > 0 and broadcasts == 6 and not refusal and not is_left
    for _, messages, refusal, _ in run_ranks(2, under_engine, False):
        assert messages == (0, 0) and "GatheredParameters" in refusal


def fails_on_one_rank(rank: int) -> bool:
    """Return True if the changes of a function that fails are lost; this must hold on every rank."""
    mesh = mesh_in_worker(rank, dp=2)
    with Init(mesh=mesh):
        model = nn.Linear(3, 3)
    before = values(model)

    def fill_and_fail(module: nn.Module) -> None:
        nn.init.ones_(module.weight)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        model.apply(fill_and_fail)
    return all(torch.equal(value, before[name]) for name, value in values(model).items())


@pytest.mark.gloo
def test_a_function_that_fails() -> None:
    assert run_ranks(2, fails_on_one_rank) == [True, True]


class Counting(nn.Linear):
    """A layer whose class overrides `apply`."""

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        self.times = getattr(self, "times", 0) + 1
        return super().apply(fn)


def test_an_apply_of_the_class_is_left_alone() -> None:
    model = nn.Sequential(Counting(2, 2), nn.Linear(2, 2))
    for module in model.modules():
        gather_around_apply(module)
    model.apply(lambda module: None)
    assert model[0].times == 1 and "apply" not in vars(model[0]) and "apply" in vars(model[1])
    restore_apply(model[0])


def test_copies_apply_to_themselves() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    for module in model.modules():
        gather_around_apply(module)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        seen: list[nn.Module] = []
        twin.apply(seen.append)
        assert seen == [twin[0], twin[1], twin]
