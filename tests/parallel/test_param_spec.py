"""Tests a rank's description of a parameter: its box without padding, the counting rank, and undescribed modules."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.each import each
from torch import nn

from megazero.parallel.param_spec import Box, InitialValue, ParamSpec, attach_spec, named_specs, spec_of


def vocabulary_rows(rank: int) -> ParamSpec:
    """Return a rank's 4 of 11 rows of 5 elements, padded to 16 rows on 4 ranks."""
    return ParamSpec("word.weight", (11, 5), (4, 5), (4 * rank, 0), sharded_axes=("tp",))


@each(("rank", "lengths", "numel"), [(0, (4, 5), 20), (1, (4, 5), 20), (2, (3, 5), 15), (3, (0, 5), 0)])
def test_padding_is_clipped_off_the_box(rank: int, lengths: tuple[int, int], numel: int) -> None:
    spec = vocabulary_rows(rank)
    assert spec.box == Box((4 * rank, 0), lengths)
    assert spec.box.numel == numel
    assert spec.numel == 20, "the rank's tensor keeps its padding"


def test_a_part_of_a_fused_matrix_is_one_box() -> None:
    spec = ParamSpec("qkv.weight", (3, 12, 5, 60), (3, 3, 5, 60), (0, 6, 0, 0), sharded_axes=("tp",))
    assert spec.box == Box((0, 6, 0, 0), (3, 3, 5, 60))
    assert spec.numel == spec.box.numel == 3 * 3 * 5 * 60


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(0, 8)), max_size=3))
def test_the_box_holds_the_elements_that_exist(dims: list[tuple[int, int, int]]) -> None:
    """The box has the elements of this rank's region, marked in a large enough array, that lie in the logical part."""
    full, local, offset = (tuple(row[part] for row in dims) for part in range(3))
    spec = ParamSpec("p", full, local, offset)
    room = np.zeros([max(n, start + length) for n, length, start in dims], dtype=bool)
    room[tuple(slice(start, start + length) for _, length, start in dims)] = True
    held = room[tuple(slice(0, n) for n in full)]
    assert spec.box.numel == held.sum()
    assert spec.numel == room.sum()


@each(
    ("axes", "coordinates", "counted"),
    [
        ((), {"tp": 0}, True),
        ((), {"tp": 1}, False),
        ((), {"tp": 0, "pp": 1}, False),
        ((), {}, True),
        (("tp",), {"tp": 3}, True),
        (("tp",), {"tp": 3, "pp": 0}, True),
        (("tp",), {"tp": 0, "pp": 1}, False),
        (("tp", "pp"), {"tp": 2, "pp": 1}, True),
    ],
)
def test_who_counts(axes: tuple[str, ...], coordinates: dict[str, int], counted: bool) -> None:
    assert ParamSpec("p", (2,), (2,), (0,), sharded_axes=axes).is_counted_on(coordinates) is counted


def test_modules_that_nobody_described_are_whole_and_decay_if_they_are_matrices() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Conv1d(2, 2, 1, bias=False))
    assert {spec.name: spec for spec, _ in named_specs(model)} == {
        "0.weight": ParamSpec("0.weight", (4, 3), (4, 3), (0, 0), decay=True),
        "0.bias": ParamSpec("0.bias", (4,), (4,), (0,), decay=False),
        "1.weight": ParamSpec("1.weight", (4,), (4,), (0,), decay=False),
        "1.bias": ParamSpec("1.bias", (4,), (4,), (0,), decay=False),
        "2.weight": ParamSpec("2.weight", (2, 2, 1), (2, 2, 1), (0, 0, 0), decay=True),
    }


def test_a_described_parameter_keeps_its_spec_under_the_modules_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(5, 4, bias=False)})
    described = replace(vocabulary_rows(2), name="", init=InitialValue("normal", 0.02))
    parameter = model["a"].weight
    assert attach_spec(parameter, described) is parameter
    assert spec_of("a.weight", parameter) == replace(described, name="a.weight")
    assert [spec.name for spec, _ in named_specs(model)] == ["a.weight"]


def test_frozen_is_asked_of_the_parameter_when_it_matters() -> None:
    layer = nn.Linear(5, 4)
    attach_spec(layer.weight, vocabulary_rows(0))
    layer.requires_grad_(False)
    assert [spec.trainable for spec, _ in named_specs(layer)] == [False, False]
    layer.weight.requires_grad_(True)
    assert [spec.trainable for spec, _ in named_specs(layer)] == [True, False]


def test_a_tied_parameter_comes_once_under_its_first_name() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    ((spec, parameter),) = named_specs(model)
    assert spec.name == "embedding.weight" and parameter is model["head"].weight


def test_a_scalar_has_one_element() -> None:
    spec = spec_of("scale", nn.Parameter(nn.Parameter().new_zeros(())))
    assert (spec.numel, spec.box) == (1, Box((), ()))
