"""Rounding to 8-bit numbers, in the orders that matrix products read, as operators of their own.

A product reads its left operand by rows and its right one by columns (`float8.py`).  So of a linear layer's input, and
of its output's gradient, 8-bit numbers are needed in both orders, which one pass makes:

    x [n, k] --> rows [n, k], columns [k, n]

An infinity or a NaN in x is a NaN in both, and so in every product of its row or column.

As operators they are whole to torch's compiler.  Its own kernels for the same wrote columns a byte at a time, at a
fifth of the speed.  Within a compiled block forward and backward share one call, whose columns are saved in place of x.
An operator is one call to dispatch and one or two kernels: a step of 48 layers has 576, and the host must keep ahead.
"""

import math

import torch
from torch import Tensor

# A maximum below it counts as it: factors and their reciprocals stay finite.
LEAST = 2.0**-100

# Schemas by hand: torch.library.custom_op adds 20 us of checks to every call.
torch.library.define(
    "megazero::round_by_maximum",
    "(Tensor x, Tensor? maximum, ScalarType dtype, bool by_rows, bool by_columns)"
    " -> (Tensor rows, Tensor columns, Tensor scale)",
)
torch.library.define(
    "megazero::round_by_factor",
    # `maximum` is written to, which the schema leaves out: then two calls of forward and backward count as one.
    "(Tensor x, Tensor factor, Tensor maximum, ScalarType dtype, bool by_rows, bool by_columns)"
    " -> (Tensor rows, Tensor columns)",
)


def round_by_maximum(
    x: Tensor, dtype: torch.dtype, *, by_rows: bool, by_columns: bool, maximum: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Round x [n, k] by the factor that makes the largest |x|, or `maximum` [], fp32, the format's largest number.

    Returns the values by rows [n, k] and by columns [k, n], each empty if it is not wanted, and the factor's reciprocal
    [], fp32; it is not finite if x is not.
    """
    rows, columns, scale = torch.ops.megazero.round_by_maximum.default(x, maximum, dtype, by_rows, by_columns)
    return rows, columns, scale


def round_by_factor(
    x: Tensor, factor: Tensor, maximum: Tensor, dtype: torch.dtype, *, by_rows: bool, by_columns: bool
) -> tuple[Tensor, Tensor]:
    """Round x [n, k] times factor []; what exceeds the format's largest number becomes that.

    Returns the values by rows [n, k] and by columns [k, n], each empty if it is not wanted.  maximum [], fp32, becomes
    the largest |x| if it was less, or a NaN where x has one; a second call with the same arguments changes nothing.
    """
    rows, columns = torch.ops.megazero.round_by_factor.default(x, factor, maximum, dtype, by_rows, by_columns)
    return rows, columns


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the maximum of |x|, fp32 []; a NaN if x has one."""
    largest: Tensor = torch.linalg.vector_norm(x, ord=math.inf)
    return largest.float()


@torch.library.impl("megazero::round_by_maximum", "cpu")
def _by_maximum_on_cpu(
    x: Tensor, maximum: Tensor | None, dtype: torch.dtype, by_rows: bool, by_columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    known = (largest_magnitude(x) if maximum is None else maximum).clamp(min=LEAST)
    # A number over a tensor is its product with the tensor's reciprocal to torch, which is rounded twice.
    factor = torch.full_like(known, torch.finfo(dtype).max) / known
    return *_rounded(x, factor, dtype, by_rows, by_columns), factor.reciprocal()


@torch.library.impl("megazero::round_by_factor", "cpu")
def _by_factor_on_cpu(
    x: Tensor, factor: Tensor, maximum: Tensor, dtype: torch.dtype, by_rows: bool, by_columns: bool
) -> tuple[Tensor, Tensor]:
    maximum.copy_(torch.maximum(maximum, largest_magnitude(x)))
    return _rounded(x, factor, dtype, by_rows, by_columns)


def _rounded(x: Tensor, factor: Tensor, dtype: torch.dtype, by_rows: bool, by_columns: bool) -> tuple[Tensor, Tensor]:
    largest = torch.finfo(dtype).max
    wide = x.float()
    values = torch.where(wide.isfinite(), (wide * factor).clamp(-largest, largest), math.nan).to(dtype)
    # An operator's results share no memory, and a transpose of one row or column would.
    rows = values.contiguous() if by_rows else values.new_empty(0)
    return rows, values.t().clone(memory_format=torch.contiguous_format) if by_columns else values.new_empty(0)


@torch.library.impl("megazero::round_by_maximum", "cuda")
def _by_maximum_on_gpu(
    x: Tensor, maximum: Tensor | None, dtype: torch.dtype, by_rows: bool, by_columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from megazero.tensor_parallel import float8_kernels  # needs Triton, which torch for GPUs has

    return float8_kernels.round_by_maximum(x, maximum, LEAST, dtype, by_rows, by_columns)


@torch.library.impl("megazero::round_by_factor", "cuda")
def _by_factor_on_gpu(
    x: Tensor, factor: Tensor, maximum: Tensor, dtype: torch.dtype, by_rows: bool, by_columns: bool
) -> tuple[Tensor, Tensor]:
    from megazero.tensor_parallel import float8_kernels

    return float8_kernels.round_by_factor(x, factor, maximum, dtype, by_rows, by_columns)


@torch.library.register_fake("megazero::round_by_maximum")
def _by_maximum_fake(
    x: Tensor, maximum: Tensor | None, dtype: torch.dtype, by_rows: bool, by_columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return *_empty(x, dtype, by_rows, by_columns), x.new_empty((), dtype=torch.float32)


@torch.library.register_fake("megazero::round_by_factor")
def _by_factor_fake(
    x: Tensor, factor: Tensor, maximum: Tensor, dtype: torch.dtype, by_rows: bool, by_columns: bool
) -> tuple[Tensor, Tensor]:
    return _empty(x, dtype, by_rows, by_columns)


def _empty(x: Tensor, dtype: torch.dtype, by_rows: bool, by_columns: bool) -> tuple[Tensor, Tensor]:
    n, k = x.shape
    return x.new_empty((n, k) if by_rows else 0, dtype=dtype), x.new_empty((k, n) if by_columns else 0, dtype=dtype)
