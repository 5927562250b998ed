"""The GPU's kernels of `float8_rounding.py`, in Triton: a block is read once, and written by rows and by columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of an H200's memory bandwidth, 4.3 TB/s, it reaches 3.1 to 3.7 (16,384 rows of 1,600 to 6,400 numbers), the most of
# fourteen sizes of blocks.
_BLOCK_ROWS, _BLOCK_COLUMNS, _WARPS = 64, 128, 4
_SEARCH_BLOCK, _SEARCH_WARPS = 8192, 8


@triton.jit
def _raise(maximum, value):
    """Raise `maximum` to the largest magnitude of `value` (fp32)."""
    # Magnitudes are ordered as their bits are, with NaNs above infinity: no maximum of floats would keep a NaN.
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits.reshape([bits.numel]), axis=0)
    pointer = maximum.to(tl.pointer_type(tl.int32))
    if largest > tl.load(pointer):  # mostly another block has had a larger one
        tl.atomic_max(pointer, largest, sem="relaxed")


@triton.jit
def _search(x, maximum, numel, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    _raise(maximum, tl.load(x + place, mask=place < numel, other=0.0).to(tl.float32))


@triton.jit
def _round_block(
    x,  # [num_rows, num_columns]
    rows,  # [num_rows, num_columns], as bytes
    columns,  # [num_columns, num_rows], as bytes
    maximum,  # []
    factor,  # [], or where it follows from the maximum: its reciprocal, which is written
    num_rows,
    num_columns,
    least: tl.constexpr,
    largest: tl.constexpr,
    is_e5m2: tl.constexpr,
    by_maximum: tl.constexpr,
    by_rows: tl.constexpr,
    by_columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1).to(tl.int64) * block_columns + tl.arange(0, block_columns)
    is_inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    place = row[:, None] * num_columns + column[None, :]
    value = tl.load(x + place, mask=is_inside, other=0.0).to(tl.float32)
    if by_maximum:
        multiplier = tl.div_rn(largest, tl.maximum(tl.load(maximum), least, propagate_nan=tl.PropagateNan.ALL))
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(factor, tl.div_rn(1.0, multiplier))
    else:
        _raise(maximum, value)
        multiplier = tl.load(factor)
    limited = tl.minimum(tl.maximum(value * multiplier, -largest), largest)
    if is_e5m2:
        byte = limited.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        byte = limited.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    byte = tl.where(tl.abs(value) < float("inf"), byte, 0x7F)  # a NaN in both formats
    if by_rows:
        tl.store(rows + place, byte, mask=is_inside)
    if by_columns:
        tl.store(columns + column[:, None] * num_rows + row[None, :], tl.trans(byte), mask=tl.trans(is_inside))


def round_by_maximum(
    x: Tensor, maximum: Tensor | None, least: float, dtype: torch.dtype, by_rows: bool, by_columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `float8_rounding.round_by_maximum`; a maximum below `least` counts as it."""
    x = x.contiguous()
    if maximum is None:
        maximum = torch.zeros((), dtype=torch.float32, device=x.device)
        blocks = -(-x.numel() // _SEARCH_BLOCK)
        _search[(blocks,)](x, maximum, x.numel(), block=_SEARCH_BLOCK, num_warps=_SEARCH_WARPS)
    scale = torch.empty_like(maximum)
    return *_round(x, maximum, scale, dtype, by_rows, by_columns, least=least), scale


def round_by_factor(
    x: Tensor, factor: Tensor, maximum: Tensor, dtype: torch.dtype, by_rows: bool, by_columns: bool
) -> tuple[Tensor, Tensor]:
    """Compute `float8_rounding.round_by_factor`."""
    return _round(x.contiguous(), maximum, factor, dtype, by_rows, by_columns)


def _round(
    x: Tensor,
    maximum: Tensor,
    factor: Tensor,
    dtype: torch.dtype,
    by_rows: bool,
    by_columns: bool,
    *,
    least: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Round by the factor, or where there is a least maximum, by the maximum, and write the factor's reciprocal."""
    n, k = x.shape
    rows = torch.empty((n, k) if by_rows else 0, dtype=torch.uint8, device=x.device)
    columns = torch.empty((k, n) if by_columns else 0, dtype=torch.uint8, device=x.device)
    _round_block[(-(-n // _BLOCK_ROWS), -(-k // _BLOCK_COLUMNS))](
        x,
        rows,
        columns,
        maximum,
        factor,
        n,
        k,
        least=least or 0.0,
        largest=torch.finfo(dtype).max,
        is_e5m2=dtype == torch.float8_e5m2,
        by_maximum=least is not None,
        by_rows=by_rows,
        by_columns=by_columns,
        block_rows=_BLOCK_ROWS,
        block_columns=_BLOCK_COLUMNS,
        num_warps=_WARPS,
    )
    return rows.view(dtype), columns.view(dtype)
