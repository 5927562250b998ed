"""Checks implementations of a linear layer's three products: against float64, for all strides, and hollow tensors."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.planner.dry.hollow import Hollow
from megazero.tensor_parallel.products import Products

SHAPES = ((5, 7, 3), (1, 7, 3), (0, 7, 3), (5, 1, 3), (6, 7, 1), (33, 17, 65))  # n, in, out


class Operands(NamedTuple):
    """The operands of a linear layer: x [n, in], weight [out, in], bias [out] and the output's gradient [n, out]."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    grad: Tensor


def operands(shape: tuple[int, int, int], dtype: torch.dtype) -> Iterator[Operands]:
    """Yield the same operands dense, transposed, and with gaps between elements or between rows."""
    rows, width, height = shape
    draw = torch.Generator().manual_seed(sum(shape))
    sizes = ((rows, width), (height, width), (height,), (rows, height))
    dense = Operands(*(torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes))
    yield dense
    yield Operands(*(tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for tensor in dense))
    yield Operands(*(torch.stack((tensor, tensor), dim=-1)[..., 0] for tensor in dense))
    yield Operands(*(torch.cat((tensor, tensor), dim=-1)[..., : tensor.shape[-1]] for tensor in dense))


def check_products(products: Products, given: Operands, tolerance: float) -> None:
    """Check all products of these operands against float64.

    Operands must not change, and a result must share memory with no operand and no other result.
    """
    x, weight, bias, grad = (tensor.double() for tensor in given)
    pairs = [
        (products.output(given.x, given.weight, given.bias), x @ weight.t() + bias),
        (products.output(given.x, given.weight, None), x @ weight.t()),
        (products.input_gradient(given.grad, given.weight), grad @ weight),
        (products.weight_gradient(given.grad, given.x), grad.t() @ x),
    ]
    for found, expected in pairs:
        assert found.dtype == given.x.dtype
        _check_close(found, expected, tolerance)
    for dtype in {given.x.dtype, torch.promote_types(given.x.dtype, torch.float32)}:
        total = torch.full(given.weight.shape, torch.nan, dtype=dtype)
        products.add_weight_gradient(total, given.grad, given.x, is_first=True)
        _check_close(total, grad.t() @ x, tolerance)
        products.add_weight_gradient(total, given.grad, given.x, is_first=False)
        _check_close(total, 2 * grad.t() @ x, tolerance)
    for tensor, before in zip(given, (x, weight, bias, grad), strict=True):
        assert torch.equal(tensor.double(), before)
    there = [tensor for tensor in (*given, *(found for found, _ in pairs)) if tensor.numel()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in there}) == len(there)


def check_shapes(products: Products, rows: int, dtype: torch.dtype) -> None:
    """Check the shapes and types of the products on hollow tensors, as in a dry run of a step."""
    with Hollow():
        x, weight, bias, grad = (torch.empty(size, dtype=dtype) for size in ((rows, 7), (3, 7), (3,), (rows, 3)))
        found = products.output(x, weight, bias), products.output(x, weight, None)
        assert all(output.shape == (rows, 3) and output.dtype == dtype for output in found)
        assert products.input_gradient(grad, weight).shape == (rows, 7)
        assert products.weight_gradient(grad, x).shape == (3, 7)
        for is_first in (True, False):
            products.add_weight_gradient(torch.empty(3, 7, dtype=dtype), grad, x, is_first=is_first)


def _check_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Assert that the shape is the same and the error at most `tolerance` times the largest element."""
    assert found.shape == expected.shape
    if expected.numel():
        assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()
