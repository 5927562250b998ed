"""Tests gradient slots: which parameters have one, and that layers write there the gradient that autograd would get."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from support.each import each
from support.models import context
from torch import Tensor, nn

from megazero.parallel.gradient_slot import (
    GradientSlot,
    add_to,
    attach_gradient_slot,
    detach_gradient_slot,
    gradient_slot_of,
)
from megazero.parallel.param_spec import InitialValue
from megazero.tensor_parallel.head_loss import Targets, summed_cross_entropy
from megazero.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megazero.tensor_parallel.regions import Border
from megazero.tensor_parallel.vocab import VocabParallelEmbedding

TP = context()
OUT, IN = 5, 7


@dataclass
class Kept:
    """Memory for one gradient, filled with nan, that refuses a gradient `refuses` times."""

    tensor: Tensor
    times: int = 0
    refuses: int = 0

    def __call__(self) -> GradientSlot | None:
        if self.refuses:
            self.refuses -= 1
            return None
        self.times += 1
        return GradientSlot(self.tensor, self.times == 1)


def kept_for(parameter: Tensor, dtype: torch.dtype | None = None) -> Kept:
    return Kept(torch.full(parameter.shape, torch.nan, dtype=dtype or parameter.dtype))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_a_place_is_attached_and_taken_off() -> None:
    parameter = nn.Parameter(drawn(OUT, IN))
    place = kept_for(parameter)
    assert gradient_slot_of(parameter) is None
    detach_gradient_slot(parameter)  # does nothing where there is none
    attach_gradient_slot(parameter, place)
    assert gradient_slot_of(parameter) is place
    assert gradient_slot_of(parameter.detach()) is None and gradient_slot_of(parameter.view(-1)) is None
    detach_gradient_slot(parameter)
    assert gradient_slot_of(parameter) is None


def test_a_parameter_whose_hooks_want_gradients_has_no_place_while_they_do() -> None:
    parameter = nn.Parameter(drawn(OUT, IN))
    attach_gradient_slot(parameter, kept_for(parameter))
    first, second = (parameter.register_hook(lambda gradient: None) for _ in range(2))
    first.remove()
    assert gradient_slot_of(parameter) is None
    second.remove()
    assert gradient_slot_of(parameter) is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_add_to(dtype: torch.dtype) -> None:
    found, total = drawn(3, 2, dtype=dtype), torch.full((3, 2), torch.nan)
    add_to(total, found, is_first=True)
    assert torch.equal(total, found.float())
    add_to(total, found, is_first=False)
    assert torch.equal(total, found.float() * 2)


@dataclass
class Case:
    """One layer's parameter, a function to differentiate, and a function that computes the gradient independently."""

    parameter: nn.Parameter
    run: Callable[[int], Tensor]
    plain: Callable[[Tensor, int], Tensor]
    hooked: list[bool] = field(default_factory=list)

    def watch(self) -> None:
        self.parameter.register_post_accumulate_grad_hook(lambda p: self.hooked.append(p.grad is None))

    def gradient(self, *seeds: int) -> Tensor:
        leaf = self.parameter.detach().double().requires_grad_(True)
        torch.stack([self.plain(leaf, seed) for seed in seeds]).sum().backward()
        assert leaf.grad is not None
        return leaf.grad


def column(dtype: torch.dtype) -> Case:
    layer = ColumnParallelLinear(context(dtype=dtype), logical_shape=(OUT, IN), split_dim=0, init=InitialValue())
    nn.init.normal_(layer.weight), nn.init.zeros_(layer.bias)
    return linear_case(layer, dtype)


def row(dtype: torch.dtype) -> Case:
    layer = RowParallelLinear(context(dtype=dtype), logical_shape=(OUT, IN), init=InitialValue())
    nn.init.normal_(layer.weight), nn.init.zeros_(layer.bias)
    return linear_case(layer, dtype)


def linear_case(layer: nn.Module, dtype: torch.dtype) -> Case:
    def plain(weight: Tensor, seed: int) -> Tensor:
        return (drawn(3, IN, seed=seed, dtype=dtype).double() @ weight.t() * weights(seed, dtype).double()).sum()

    def run(seed: int) -> Tensor:
        return (layer(drawn(3, IN, seed=seed, dtype=dtype)) * weights(seed, dtype)).sum()

    return Case(layer.weight, run, plain)


def weights(seed: int, dtype: torch.dtype) -> Tensor:
    return drawn(3, OUT, seed=seed + 100, dtype=dtype)


def embedding(dtype: torch.dtype) -> Case:
    layer = VocabParallelEmbedding(
        context(dtype=dtype), vocab_size=OUT, padded_vocab_size=OUT, hidden_size=IN, init=InitialValue()
    )
    nn.init.normal_(layer.weight)

    def ids(seed: int) -> Tensor:
        return torch.randint(OUT - 1, (2, 4), generator=torch.Generator().manual_seed(seed))  # the last is never used

    def factors(seed: int) -> Tensor:
        return drawn(2, 4, IN, seed=seed + 50, dtype=dtype)

    return Case(
        layer.weight,
        lambda seed: (layer(ids(seed)) * factors(seed)).sum(),
        lambda weight, seed: (weight[ids(seed)] * factors(seed).double()).sum(),
    )


def head(dtype: torch.dtype) -> Case:
    parameter = nn.Parameter(drawn(OUT, IN, dtype=dtype))

    def labels(seed: int) -> Tensor:
        return torch.randint(OUT, (6,), generator=torch.Generator().manual_seed(seed))

    def run(seed: int) -> Tensor:
        targets = Targets(labels(seed), None, OUT, 2 * OUT * 8)
        border = Border(TP.communicator)
        return summed_cross_entropy(drawn(6, IN, seed=seed, dtype=dtype), parameter, targets, border) * 0.25

    def plain(weight: Tensor, seed: int) -> Tensor:
        x = drawn(6, IN, seed=seed, dtype=dtype).double()
        return F.cross_entropy(x @ weight.t(), labels(seed), reduction="sum") * 0.25

    return Case(parameter, run, plain)


CASES = [column, row, embedding, head]


@each("make", CASES)
def test_layers_write_first_and_add_then(make: Callable[[torch.dtype], Case]) -> None:
    """Autograd gets no gradient, but calls its hooks, which serve to count gradients."""
    case = make(torch.float64)
    place = kept_for(case.parameter)
    case.watch()
    attach_gradient_slot(case.parameter, place)
    for times, seeds in ((1, (1,)), (2, (1, 2)), (3, (1, 2, 3))):
        case.run(seeds[-1]).backward()
        assert place.times == times and case.parameter.grad is None and case.hooked == [True] * times
        torch.testing.assert_close(place.tensor, case.gradient(*seeds), rtol=1e-12, atol=1e-13)


@each("make", CASES)
def test_two_uses_in_one_pass_share_the_place(make: Callable[[torch.dtype], Case]) -> None:
    """Two uses in one pass, such as those of a head and its tied embedding, add to the same memory."""
    case = make(torch.float64)
    place = kept_for(case.parameter)
    case.watch()
    attach_gradient_slot(case.parameter, place)
    (case.run(1) + case.run(2)).backward()
    assert place.times == 2 and case.hooked == [True]
    torch.testing.assert_close(place.tensor, case.gradient(1, 2), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("make", CASES)
def test_a_place_may_be_of_a_higher_precision(make: Callable[[torch.dtype], Case]) -> None:
    """Sums over passes are made in the slot's precision, so a sum of many keeps what bf16 would lose."""
    case = make(torch.bfloat16)
    place = kept_for(case.parameter, torch.float32)
    attach_gradient_slot(case.parameter, place)
    for _ in range(300):
        case.run(1).backward()
    expected = case.gradient(1).float() * 300
    assert (place.tensor - expected).abs().max() <= 0.02 * expected.abs().max()


@each("make", CASES)
def test_autograd_gets_what_no_place_takes(make: Callable[[torch.dtype], Case]) -> None:
    case = make(torch.float64)
    place = kept_for(case.parameter)
    place.refuses = 1
    attach_gradient_slot(case.parameter, place)
    case.run(1).backward()
    assert place.times == 0 and case.parameter.grad is not None
    torch.testing.assert_close(case.parameter.grad, case.gradient(1), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("make", [column, row])
def test_a_frozen_weight_takes_no_place(make: Callable[[torch.dtype], Case]) -> None:
    case = make(torch.float64)
    place = kept_for(case.parameter)
    attach_gradient_slot(case.parameter, place)
    case.parameter.requires_grad_(False)
    case.run(1).backward()  # the bias still needs its gradient
    assert place.times == 0 and case.parameter.grad is None
