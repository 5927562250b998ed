"""Tests the division of modules of many shapes into units against literal tables."""

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from megazero.library.module.units import choose_units


def table(model: nn.Module) -> dict[str, tuple[list[str], list[str]]]:
    """Return, for each unit by name, its parameters and the names of the modules that use them."""
    names = {module: name for name, module in model.named_modules()}
    units = choose_units(model)
    listed = [name for unit in units for name in unit.parameters]
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters()), "every parameter once"
    assert len({unit.name for unit in units}) == len(units)
    return {unit.name: (list(unit.parameters), [names[module] for module in unit.consumers]) for unit in units}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x))


class Tree(nn.Module):
    """The module tree that the docstring of megazero.library.module.units draws."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(5, 4)
        self.stages = nn.ModuleList([nn.ModuleList([Block(4), Block(4)]), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def test_the_drawing() -> None:
    assert table(Tree()) == {
        "the model": (["scale"], [""]),
        "embed.weight": (["embed.weight"], ["embed", "head"]),
        "stages.0.0": (
            [f"stages.0.0.{n}" for n in ("norm.weight", "norm.bias", "up.weight", "up.bias")],
            ["stages.0.0"],
        ),
        "stages.0.1": (
            [f"stages.0.1.{n}" for n in ("norm.weight", "norm.bias", "up.weight", "up.bias")],
            ["stages.0.1"],
        ),
        "stages.1": (["stages.1.0.weight", "stages.1.0.bias"], ["stages.1"]),
        "norm": (["norm.weight", "norm.bias"], ["norm"]),
        "head": (["head.bias"], ["head"]),
    }


def test_a_sequential_is_cut_into_its_elements() -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=nn.ReLU(), c=nn.Linear(3, 1, bias=False)))
    assert table(model) == {"a": (["a.weight", "a.bias"], ["a"]), "c": (["c.weight"], ["c"])}


def test_a_module_that_is_no_list_is_cut_by_owner() -> None:
    assert table(nn.LSTM(3, 4)) == {
        "the model": (["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"], [""]),
    }
    assert list(table(Block(4))) == ["norm", "up"]


def test_an_inner_list_cuts_the_element_around_it() -> None:
    """The parameters that the element has beside the list are cut by their owners."""
    outer = Block(4)
    outer.experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
    assert {unit: names for unit, (names, _) in table(nn.ModuleList([outer])).items()} == {
        "0.norm": ["0.norm.weight", "0.norm.bias"],
        "0.up": ["0.up.weight", "0.up.bias"],
        "0.experts.0": ["0.experts.0.weight"],
        "0.experts.1": ["0.experts.1.weight"],
    }


def test_a_list_with_one_parametrised_element_does_not_cut() -> None:
    outer = Block(4)
    outer.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout())
    assert list(table(nn.ModuleList([outer, nn.Dropout()]))) == ["0"]


def test_lists_of_lists_are_no_blocks() -> None:
    """A list, even one of a single element, is never called as a whole, so lists in a list are not its blocks."""
    grid = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.ModuleDict({"a": nn.Linear(2, 2)})])])
    assert {unit: consumers for unit, (_, consumers) in table(grid).items()} == {"0.0": ["0.0"], "1.0.a": ["1.0.a"]}


def test_elements_of_a_dictionary_are_blocks_if_modules_are_inside() -> None:
    """A dictionary of layers in a block does not cut it, one of blocks does."""
    inner = Block(4)
    inner.mlp = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
    layers = nn.ModuleDict({"0": inner, "1": Block(4), "act": nn.ReLU()})
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "layers": layers, "norm": nn.LayerNorm(4)})
    assert {unit: consumers for unit, (_, consumers) in table(model).items()} == {
        name: [name] for name in ("embed", "layers.0", "layers.1", "norm")
    }
    assert list(table(nn.ModuleList([nn.Sequential(layers)]))) == ["0.0.0", "0.0.1"]


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.layers[2].bias = self.layers[0].bias
        self.head = nn.Linear(3, 3)
        self.head.weight = self.layers[1].weight
        self.again = self.layers[1]  # the same module under two names is one module
        self.alias = self.head.bias  # the same parameter under two names


def test_shared_parameters_are_units_by_their_owners() -> None:
    assert table(Sharing()) == {
        "alias": (["alias"], ["", "head"]),
        "layers.0.weight": (["layers.0.weight", "layers.0.bias"], ["layers.0", "layers.2"]),
        "layers.1.weight": (["layers.1.weight"], ["layers.1", "head"]),
        "layers.1": (["layers.1.bias"], ["layers.1"]),
    }


def test_one_module_with_a_parameter_under_two_names_shares_nothing() -> None:
    model = nn.Linear(3, 3)
    model.alias = model.weight
    assert table(model) == {"the model": (["weight", "bias"], [""])}


def test_parametrized_modules() -> None:
    """A parametrization is a list with parameters of its own, and unlike other lists it is called."""
    model = parametrizations.weight_norm(nn.Linear(3, 2))
    originals = [f"parametrizations.weight.original{index}" for index in (0, 1)]
    assert table(model) == {
        "the model": (["bias"], [""]),
        "parametrizations.weight": (originals, ["parametrizations.weight"]),
    }


@pytest.mark.parametrize("make", [Tree, Sharing])
def test_the_choice_is_the_same_every_time(make: type[nn.Module]) -> None:
    assert list(table(make()).items()) == list(table(make()).items())


def test_a_model_without_parameters_has_no_units() -> None:
    assert choose_units(nn.Sequential(nn.ReLU())) == []


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = nn.Parameter(torch.zeros(3))
        self.register_parameter("missing", None)


def test_absent_parameters_count_for_nothing() -> None:
    assert table(Lookup()) == {"the model": (["table"], [""])}
