"""Tests of torch's own three products of a linear layer."""

import pytest
import torch
from support.each import each
from support.linear_products import SHAPES, check_products, check_shapes, operands

from megazero.tensor_parallel.products import TORCH, has_wider_sums

ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}


@each("dtype", ROUNDING, ids=str)
@each("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for given in operands(shape, dtype):
        check_products(TORCH, given, ROUNDING[dtype])


def test_sums_are_made_in_the_precision_of_the_total() -> None:
    """A product is added in the total's precision: 256 + 1 is 257, which bf16 cannot represent."""
    grad, x = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(1, 3, dtype=torch.bfloat16)
    total = torch.full((2, 3), 256.0)
    TORCH.add_weight_gradient(total, grad, x, is_first=False)
    assert total.tolist() == [[257.0] * 3] * 2


@pytest.mark.cuda
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpus_product_is_summed_in_fp32_by_itself(dtype: torch.dtype, is_first: bool) -> None:
    """No tensor of the operands' dtype lies between, whose rounding would be a thousand times as large."""
    grad, x, total = (
        torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in ((67, 5), (67, 9), (5, 9))
    )
    grad, x = grad.to(dtype), x.to(dtype)
    expected = grad.double().t() @ x.double() + (0 if is_first else total.double())
    found = torch.full_like(total, torch.nan, device="cuda") if is_first else total.cuda()
    assert has_wider_sums(found, grad.cuda())
    TORCH.add_weight_gradient(found, grad.cuda(), x.cuda(), is_first=is_first)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@each("dtype", [torch.float64, torch.bfloat16], ids=str)
@each("rows", [5, 1, 0])
def test_shapes_without_memory(rows: int, dtype: torch.dtype) -> None:
    check_shapes(TORCH, rows, dtype)
