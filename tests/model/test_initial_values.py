"""Tests initial values: every layout gets the same logical tensor, with the requested distribution."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import assemble, box_index, build_gpt, context, pieces, small_config
from torch import Tensor

from megazero.model import initial_values as initialize
from megazero.model.initial_values import initial_value, initialize_
from megazero.parallel.param_spec import InitialValue, ParamSpec, named_specs

VOCAB = 101
NORMAL = InitialValue("normal", 0.5)


class Axis:
    """A rank and a size of a tensor-parallel axis; nothing is sent while values are drawn."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def whole_spec(shape: tuple[int, ...], init: InitialValue = NORMAL, name: str = "w") -> ParamSpec:
    return ParamSpec(name, shape, shape, (0,) * len(shape), init=init)


def initial_weights(size: int, *, divisible_by: int = 8) -> dict[str, Tensor]:
    config = small_config(untie_embeddings_and_output_weights=True)
    ranks = []
    for rank in range(size):
        tp = context(Axis(rank, size))
        model = build_gpt(config, tp, vocab_size=VOCAB, divisible_by=divisible_by)
        initialize_(model, seed=3)
        ranks.append(pieces(model))
    return assemble(ranks)


def test_every_tensor_parallel_size_starts_with_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize, "BLOCK_NUMEL", 1000)  # makes many blocks even here
    alone = initial_weights(1)
    for size, divisible_by in [(2, 8), (4, 8), (3, 1), (4, 128)]:
        other = initial_weights(size, divisible_by=divisible_by)
        assert set(other) == set(alone)
        assert all(torch.equal(alone[name], other[name]) for name in alone)


@given(data=st.data())
def test_any_box_is_a_slice_of_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    local = tuple(data.draw(st.integers(1, 8)) for _ in shape)  # may reach past the end, as padding does
    spec = ParamSpec("w", shape, local, offset, init=NORMAL)
    expected = torch.zeros(local)
    whole = initial_value(whole_spec(shape), 1).view(shape)
    if spec.box.numel:
        expected[box_index((0,) * len(shape), spec.box.lengths)] = whole[box_index(offset, spec.box.lengths)]
    assert torch.equal(initial_value(spec, 1).view(local), expected)


def test_padding_rows_are_zero() -> None:
    spec = ParamSpec("w", (5, 3), (8, 3), (0, 0), init=NORMAL)
    value = initial_value(spec, 1).view(8, 3)
    assert value[:5].abs().min() > 0 and torch.equal(value[5:], torch.zeros(3, 3))


def test_padding_lies_between_rows_too() -> None:
    """Of each of three matrices this rank has all rows, with one of padding behind them."""
    value = initial_value(ParamSpec("w", (3, 2, 4), (3, 3, 4), (0, 0, 0), init=NORMAL), 1).view(3, 3, 4)
    assert torch.equal(value[:, :2], initial_value(whole_spec((3, 2, 4)), 1).view(3, 2, 4))
    assert torch.equal(value[:, 2], torch.zeros(3, 4))


def test_values_depend_on_seed_name_and_shape() -> None:
    value = initial_value(whole_spec((40, 8)), 1)
    others = [
        initial_value(whole_spec((40, 8)), 2),
        initial_value(whole_spec((40, 8), name="v"), 1),
    ]
    assert not any((value == other).any() for other in others)
    assert torch.equal(value, initial_value(whole_spec((40, 8)), 1))


def test_blocks_of_one_tensor_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize, "BLOCK_NUMEL", 64)
    rows = initial_value(whole_spec((64, 8)), 1).view(8, 64)  # eight blocks
    assert rows.unique(dim=0).shape[0] == 8


def test_distributions_are_those_asked_for() -> None:
    value = initial_value(whole_spec((1500, 800)), 5)
    assert abs(value.mean().item()) < 0.005 and abs(value.std().item() - 0.5) < 0.005
    assert torch.equal(initial_value(whole_spec((7,), InitialValue("ones")), 1), torch.ones(7))
    assert torch.equal(initial_value(whole_spec((7,), InitialValue("zeros")), 1), torch.zeros(7))


def test_gpt2_scales() -> None:
    config = small_config(init_method_std=0.3)
    stds = {spec.name: spec.init for spec, _ in named_specs(build_gpt(config, context(), vocab_size=VOCAB))}
    small = InitialValue("normal", 0.3 / math.sqrt(6))
    for name, init in stds.items():
        if "norm" in name:
            assert init == InitialValue("ones" if name.endswith("weight") else "zeros"), name
        elif name.endswith("bias"):
            assert init == InitialValue("zeros"), name
        else:
            assert init == (small if "projection" in name or "down" in name else InitialValue("normal", 0.3)), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_hold_the_float32_values(dtype: torch.dtype) -> None:
    model = build_gpt(small_config(), context(dtype=dtype), vocab_size=VOCAB, divisible_by=8)
    initialize_(model, seed=3)
    for spec, parameter in named_specs(model):
        assert torch.equal(parameter.detach().view(-1), initial_value(spec, 3).to(dtype)), spec.name


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_threads_draw_the_same_values(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Blocks come in order whoever draws them, and no more than two for each thread are ahead."""
    monkeypatch.setattr(initialize, "BLOCK_NUMEL", 64)
    spec = ParamSpec("a", (40, 16), (20, 16), (10, 0), init=InitialValue("normal", 1.0))
    one, many = ([part.block for part in initialize._slices(spec, 7, number)] for number in (1, threads))
    assert len(one) == 6 and all(torch.equal(mine, other) for mine, other in zip(one, many, strict=True))
    begun: list[int] = []
    drawn = initialize._ahead(lambda number: begun.append(number) or torch.tensor(number), range(40), threads)
    assert int(next(drawn)) == 0
    assert len(begun) <= 1 + 2 * threads
    assert [int(each) for each in drawn] == list(range(1, 40)) and sorted(begun) == list(range(40))


def test_no_more_than_a_block_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    original = initialize._draw

    def recording(spec: ParamSpec, seed: int, index: int, shape: tuple[int, int]) -> Tensor:
        drawn.append(math.prod(shape))
        return original(spec, seed, index, shape)

    monkeypatch.setattr(initialize, "_draw", recording)
    initial_value(ParamSpec("w", (4096, 1024), (1024, 1024), (1024, 0), init=NORMAL), 1)
    assert drawn == [1 << 20]  # the one of four blocks that holds this rank's rows
