"""Rounding to 8 bits is compared with a search for the nearest of all numbers of the format, in float64."""

import math

import numpy as np
import pytest
import torch
from support.each import each
from support.gpus import has_8bit_gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megazero.tensor_parallel.float8 import E4M3, E5M2
from megazero.tensor_parallel.float8_rounding import round_by_factor, round_by_maximum

SHAPES = [(1, 1), (16, 16), (48, 80), (66, 130), (3, 1000)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0 ** (seed % 9 - 4)
    return x.bfloat16()


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest finite number of the format to each of x (float64); of two, the one with an even mantissa."""
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every.view(dtype).double()
    keep = numbers.isfinite() & ~((numbers == 0) & (every > 0))
    numbers, order = numbers[keep].sort()
    is_odd = (every[keep] % 2).bool()[order]
    above = torch.searchsorted(numbers, x.contiguous()).clamp(1, len(numbers) - 1)
    up, down = numbers[above] - x, x - numbers[above - 1]
    return torch.where((up < down) | ((up == down) & is_odd[above - 1]), numbers[above], numbers[above - 1])


def by_factor(x: Tensor, factor: Tensor, dtype: torch.dtype, *orders: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values in both orders, and the maximum."""
    maximum, (by_rows, by_columns) = torch.zeros_like(factor), orders or (True, True)
    rows, columns = round_by_factor(x, factor, maximum, dtype, by_rows=by_rows, by_columns=by_columns)
    return rows, columns, maximum


def by_maximum(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values in both orders, and the scale."""
    return round_by_maximum(x, dtype, by_rows=True, by_columns=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_are_the_nearest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(9):
        x, factor = drawn(*shape, seed=seed), torch.tensor(2.0 ** (3 * seed - 6))  # too large for some, too small too
        rows, columns, maximum = by_factor(x, factor, dtype)
        assert torch.equal(rows.double(), nearest(x.double() * float(factor), dtype))
        assert torch.equal(columns.float(), rows.float().t())
        assert rows.is_contiguous() and columns.is_contiguous() and rows.dtype == columns.dtype == dtype
        assert float(maximum) == float(x.abs().max())


@each("shape", SHAPES)
@each("dtype", [E4M3, E5M2])
def test_the_maximum_becomes_the_largest_number(shape: tuple[int, int], dtype: torch.dtype) -> None:
    several = [drawn(*shape, seed=seed) for seed in range(9)]  # of maxima whose reciprocals are rounded up and down
    for x in (*several, torch.zeros(shape).bfloat16(), torch.full(shape, 2.0**-133).bfloat16()):
        rows, columns, scale = by_maximum(x, dtype)
        maximum = x.float().abs().max()
        # Divided once: torch takes a number over a tensor for its product with the tensor's reciprocal.
        factor = torch.tensor(np.float32(torch.finfo(dtype).max) / np.float32(max(float(maximum), 2.0**-100)))
        assert torch.equal(rows.double(), nearest((x.float() * factor).double(), dtype)) and scale == 1 / factor
        assert torch.equal(columns.float(), rows.float().t())
        found = round_by_maximum(x, dtype, by_rows=True, by_columns=False, maximum=2 * maximum)
        assert torch.equal(found[0].double(), nearest((x.float() * (factor / 2)).double(), dtype)) or maximum == 0


@pytest.mark.parametrize("orders", [(True, False), (False, True), (False, False)])
def test_one_order_is_made_alone(orders: tuple[bool, bool]) -> None:
    x, factor = drawn(48, 80), torch.tensor(3.0)
    both, found = by_factor(x, factor, E4M3), by_factor(x, factor, E4M3, *orders)
    for wanted, mine, other in zip(orders, found, both, strict=False):
        assert torch.equal(mine.float(), other.float()) if wanted else mine.numel() == 0


def check_not_finite(device: str, value: float) -> None:
    """Check the NaNs that a number that is not finite makes, and what becomes of the maximum."""
    x, factor = drawn(48, 80).to(device), torch.tensor(1.0, device=device)
    x[7, 11] = value
    expected = torch.zeros(x.shape, dtype=torch.bool, device=device)
    expected[7, 11] = True
    for dtype in (E4M3, E5M2):
        rows, columns, maximum = by_factor(x, factor, dtype)
        assert torch.equal(rows.float().isnan(), expected) and torch.equal(columns.float().isnan(), expected.t())
        assert maximum.isnan() if math.isnan(value) else maximum == math.inf
        rows, columns, scale = by_maximum(x, dtype)
        assert rows.float().isnan()[7, 11] and columns.float().isnan()[11, 7] and not scale.isfinite()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_nan(value: float) -> None:
    check_not_finite("cpu", value)


def test_a_maximum_is_kept_over_calls() -> None:
    maximum, factor = torch.zeros(()), torch.tensor(1.0)
    for magnitude, expected in ((1.0, 1.0), (3.0, 3.0), (2.0, 3.0), (3.0, 3.0)):
        x = torch.full((16, 16), -magnitude)
        round_by_factor(x, factor, maximum, E4M3, by_rows=True, by_columns=False)
        assert float(maximum) == expected


def test_operators_are_as_torch_wants_them() -> None:
    """Torch's own checks: schemas, but for the maximum that is written to, results on fake tensors, compiled code."""
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x, one, maximum = drawn(16, 48), torch.tensor(2.0), torch.zeros(())
    for orders in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(torch.ops.megazero.round_by_maximum.default, (x, None, E4M3, *orders))
        arguments = (x, one, maximum, E4M3, *orders)
        torch.library.opcheck(torch.ops.megazero.round_by_factor.default, arguments, test_utils=checks)
    with FakeTensorMode():
        rows, columns, _ = by_maximum(torch.empty(16, 48), E5M2)
    assert rows.shape == (16, 48) and columns.shape == (48, 16) and rows.dtype == E5M2


def as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


@pytest.mark.cuda
@pytest.mark.skipif(not has_8bit_gpu(), reason="no GPU with 8-bit products")
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_gpu_rounds_as_a_cpu_does(dtype: torch.dtype) -> None:
    """Blocks of any shape, and of rows with gaps between them, have the CPU's bits."""
    for seed, shape in enumerate([*SHAPES, (130, 272), (1024, 1600), (1000, 4808)]):
        for x in (drawn(*shape, seed=seed), drawn(shape[0], 2 * shape[1], seed=seed)[:, ::2]):
            factor = torch.tensor(2.0**seed * 1.1)
            pairs = [
                (by_factor(x, factor, dtype), by_factor(x.cuda(), factor.cuda(), dtype)),
                (by_maximum(x, dtype), by_maximum(x.cuda(), dtype)),
            ]
            for here, there in pairs:
                for mine, other in zip(here, there, strict=True):
                    assert torch.equal(as_bytes(mine), as_bytes(other.cpu())), (shape, mine, other)
            rows, columns, _ = by_factor(x.cuda(), factor.cuda(), dtype, False, True)
            assert rows.numel() == 0 and torch.equal(as_bytes(columns.cpu()), as_bytes(pairs[0][0][1]))
    for value in (math.nan, math.inf, -math.inf):
        check_not_finite("cuda", value)
