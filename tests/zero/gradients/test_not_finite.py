"""Tests of the watch: which of several values that are not finite comes first, and what it leaves out."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megazero.parallel.param_spec import Unit
from megazero.zero.gradients.not_finite import Finding, Watch, cause_in_words, first_of_all

X = torch.ones(2, 3)


def watched() -> tuple[nn.Sequential, Watch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    units = [Unit(name, (f"{name}.weight", f"{name}.bias")) for name in ("0", "2")]
    return model, Watch(model, units)


def spoil(*_arguments: object) -> Tensor:
    return X * torch.nan


Plant = Callable[[nn.Sequential], object]
FAULTS: dict[str, Plant] = {
    "the output of 0": lambda model: model[0].register_forward_hook(spoil),
    "the output of 1": lambda model: model[1].register_forward_hook(spoil),
    "the parameter 2.bias itself": lambda model: model[2].bias.data.fill_(torch.inf),
    "the gradient of 2.weight": lambda model: model[2].weight.register_hook(lambda grad: grad * torch.inf),
}


@each("expected", FAULTS)
def test_the_first_value_is_found(expected: str) -> None:
    model, watch = watched()
    FAULTS[expected](model)
    watch.close()
    watch = Watch(model, [Unit("2", ("2.weight", "2.bias"))])  # behind the fault's own hook
    model(X).sum().backward()
    assert watch.found is not None and watch.found.value == expected
    assert watch.found.unit == ("2" if "2" in expected else "")
    assert watch.found.is_weight == ("itself" in expected) and watch.found.in_backward == ("gradient" in expected)


def test_a_good_step_has_no_finding_and_a_closed_watch_checks_nothing() -> None:
    model, watch = watched()
    model(X).sum().backward()
    assert watch.found is None
    watch.close()
    model(X * torch.nan).sum().backward()
    assert watch.found is None


def test_forwards_that_are_not_the_steps_are_left_out() -> None:
    model, watch = watched()
    watch.is_on = False
    model(X * torch.nan)
    assert watch.found is None


def test_a_recomputed_forward_is_left_out() -> None:
    model, watch = watched()
    output = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False)
    model[1].register_forward_hook(lambda _module, _inputs, output: output * torch.nan)  # what is recomputed is spoilt
    output.sum().backward()
    assert watch.found is not None and watch.found.in_backward


def test_an_earlier_micro_batch_counts_though_it_is_computed_later() -> None:
    model, watch = watched()
    for micro_batch, x in ((1, X * torch.nan), (0, X * torch.inf), (2, X * torch.nan)):
        watch.micro_batch = micro_batch
        model(x)
    assert watch.found is not None and watch.found.micro_batch == 0


F = Finding(1, False, 4, 7, "the output of layers.4", "layers.4")


@each(
    "later",
    [
        replace(F, micro_batch=2),
        replace(F, in_backward=True, place=-9),
        replace(F, place=5, order=1),
        replace(F, order=8),
    ],
    ids=str,
)
def test_order(later: Finding) -> None:
    assert F.key < later.key


def test_in_backward_the_last_part_comes_first() -> None:
    assert replace(F, in_backward=True, place=-4).key < replace(F, in_backward=True, place=0).key


def test_in_words() -> None:
    verdict = first_of_all(replace(F, note="samples 4 to 5"), mesh_in_worker(0))
    place = "the output of layers.4, in layers.4, on rank 0, micro-batch 1 (samples 4 to 5)"
    assert cause_in_words(verdict, "", otherwise="unknown") == f"the first value that is not finite is {place}"
    assert first_of_all(None, mesh_in_worker(0)) is None
    assert (
        cause_in_words(None, "a.b", otherwise="x") == "x; in the order of the model, the first such gradient is a.b's"
    )


class Quantise(nn.Module):
    """A module of a user's own 8-bit model; torch itself looks for no NaN in some of these formats."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu], ids=str)
def test_modules_may_return_8_bit_numbers(dtype: torch.dtype) -> None:
    model = nn.Sequential(Quantise(dtype))
    watch = Watch(model, [])
    model(X)
    assert watch.found is None
    model(X * torch.nan)
    assert watch.found is not None and watch.found.value == "the output of 0"
