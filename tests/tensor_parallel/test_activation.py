"""Tests that GELU fused with the layer behind it computes what the two do apart, and saves one tensor less."""

from unittest.mock import patch

import pytest
import torch
from support.models import context, put_logical
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.autograd.graph import saved_tensors_hooks

from megazero.model.compiled import lacking
from megazero.parallel.param_spec import InitialValue
from megazero.tensor_parallel.activation import ACTIVATIONS, FusedActivation, gelu, gelu_backward
from megazero.tensor_parallel.layers import RowParallelLinear

CPU = torch.device("cpu")


def as_written() -> FusedActivation:
    """Return the fused GELU without a compiler."""
    with patch.object(torch, "compile", lambda function, **options: function):
        return FusedActivation("gelu")


def layer() -> RowParallelLinear:
    row = RowParallelLinear(context(), logical_shape=(5, 12), init=InitialValue())
    generator = torch.Generator().manual_seed(1)
    shapes = {"weight": (5, 12), "bias": (5,)}
    put_logical(row, {key: torch.randn(s, generator=generator, dtype=torch.float64) for key, s in shapes.items()})
    return row


def inputs() -> Tensor:
    return torch.randn(7, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def run(fused: FusedActivation | None, *, frozen: tuple[str, ...] = ()) -> tuple[list[Tensor | None], list[Tensor]]:
    """Return the output and the gradients of x, weight and bias, and the tensors saved for backward."""
    row, x, saved = layer(), inputs().requires_grad_("x" not in frozen), list[Tensor]()
    row.weight.requires_grad_("weight" not in frozen)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = row(gelu(x)) if fused is None else row(x, fused)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return [y.detach(), x.grad, row.weight.grad, row.bias.grad], saved


@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",)], ids=str)
def test_the_same_to_the_bit(frozen: tuple[str, ...]) -> None:
    (apart, _), (together, _) = run(None, frozen=frozen), run(as_written(), frozen=frozen)
    for expected, found in zip(apart, together, strict=True):
        assert (expected is None) == (found is None)
        assert expected is None or torch.equal(expected, found)


def test_only_the_input_and_the_weight_are_saved() -> None:
    _, apart = run(None)
    _, together = run(as_written())
    sizes = [sorted(tensor.numel() for tensor in saved) for saved in (apart, together)]
    assert sizes == [[60, 84, 84], [60, 84]]


@pytest.mark.skipif(bool(lacking(CPU)), reason=f"this machine lacks {lacking(CPU)}")
def test_backward_is_one_pass() -> None:
    """The compiler makes one kernel, which reads x and the gradient once and writes both results."""
    x, grad = inputs(), inputs() + 1
    torch._dynamo.reset()
    (found, again), sources = run_and_get_code(FusedActivation("gelu").backward, grad, x)
    expected, output = gelu_backward(grad, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(again, output, rtol=1e-12, atol=1e-14)
    assert len(sources) == 1 and sources[0].count("async_compile.cpp_pybinding(") == 1
    assert "exp" in sources[0] and "tanh(" not in sources[0]  # a tanh takes a GPU longer than the memory


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_backward_is_autograds(name: str) -> None:
    x, activation = inputs().requires_grad_(), ACTIVATIONS[name]
    output = activation.output(x)
    grad = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
    (expected,) = torch.autograd.grad(output, x, grad)
    found, again = activation.backward(grad, x.detach())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(again, output.detach())


def test_activations_by_hand() -> None:
    x = inputs()
    gate, up = x[:, :6], x[:, 6:]
    torch.testing.assert_close(ACTIVATIONS["swiglu"].output(x), gate / (1 + (-gate).exp()) * up, rtol=1e-12, atol=0)
    assert torch.equal(ACTIVATIONS["squared-relu"].output(x), torch.where(x > 0, x * x, 0.0))
