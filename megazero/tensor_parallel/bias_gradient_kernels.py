"""The GPU's kernels of `bias_gradients.py`, in Triton: a pass over memory that adds up its columns.

A program has some columns and a run of rows, and keeps a sum for every place of its block until its last rows; a second
launch adds up the sums of the runs.  How rows are cut depends on the tensor's size alone, so results are the same bits
on every GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ROWS, _BLOCK_COLUMNS, _WARPS = 32, 128, 4
_FACTOR, _CUBE = tl.constexpr(2 * math.sqrt(2 / math.pi)), tl.constexpr(0.044715)
_PROGRAMS = 1024  # about as many as a GPU of a hundred processors or more runs at a time


@triton.jit
def _gelu_gradient(
    grad,  # [num_rows, num_columns]
    x,  # [num_rows, num_columns]
    grad_x,  # [num_rows, num_columns]
    output,  # [num_rows, num_columns], which is written if it is wanted
    sums,  # [runs, num_columns], fp32
    num_rows,
    num_columns,
    rows_of_run: tl.constexpr,
    wants_output: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    first = tl.program_id(1) * rows_of_run
    total = tl.zeros([block_rows, block_columns], dtype=tl.float32)
    for start in range(0, rows_of_run, block_rows):
        row = first + start + tl.arange(0, block_rows)
        is_inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        place = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        u = tl.load(x + place, mask=is_inside, other=0.0).to(tl.float32)
        dg = tl.load(grad + place, mask=is_inside, other=0.0).to(tl.float32)
        # GELU by the logistic function, as in decompositions.py.
        square = u * u
        inner = _FACTOR * u * (1 + _CUBE * square)
        slope = _FACTOR * (1 + 3 * _CUBE * square)
        logistic = tl.sigmoid(inner)
        du = dg * logistic * (1 + u * tl.sigmoid(-inner) * slope)
        tl.store(grad_x + place, du.to(grad_x.dtype.element_ty), mask=is_inside)
        if wants_output:
            tl.store(output + place, (u * logistic).to(output.dtype.element_ty), mask=is_inside)
        total += du
    tl.store(sums + tl.program_id(1) * num_columns + column, tl.sum(total, axis=0), mask=column < num_columns)


@triton.jit
def _pack(
    query,  # [num_rows, width]
    key,  # [num_rows, width]
    value,  # [num_rows, width]
    packed,  # [num_rows, 3, width]
    sums,  # [runs, 3, width], fp32
    num_rows,
    width,
    rows_of_run: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    first = tl.program_id(1) * rows_of_run
    which = tl.program_id(2)
    source = query
    if which == 1:
        source = key
    elif which == 2:
        source = value
    total = tl.zeros([block_rows, block_columns], dtype=tl.float32)
    for start in range(0, rows_of_run, block_rows):
        row = first + start + tl.arange(0, block_rows)
        is_inside = (row < num_rows)[:, None] & (column < width)[None, :]
        row = row.to(tl.int64)[:, None]
        x = tl.load(source + row * width + column[None, :], mask=is_inside, other=0.0)
        tl.store(packed + (row * 3 + which) * width + column[None, :], x, mask=is_inside)
        total += x.to(tl.float32)
    place = (tl.program_id(1) * 3 + which) * width + column
    tl.store(sums + place, tl.sum(total, axis=0), mask=column < width)


@triton.jit
def _add_up(sums, total, num_runs, num_columns, runs: tl.constexpr, block_columns: tl.constexpr):
    run = tl.arange(0, runs)[:, None]
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    is_inside = (run < num_runs) & (column < num_columns)[None, :]
    values = tl.load(sums + run * num_columns + column[None, :], mask=is_inside, other=0.0)
    tl.store(total + column, tl.sum(values, axis=0).to(total.dtype.element_ty), mask=column < num_columns)


def gelu_gradient(grad: Tensor, x: Tensor, wants_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x [n, f], gelu(x) if it is wanted, and the sums [f] of the gradient over n."""
    num_rows, num_columns = x.shape
    grad, x = grad.contiguous(), x.contiguous()
    grad_x, output = torch.empty_like(x), torch.empty_like(x) if wants_output else x.new_empty(0)
    columns, runs, rows_of_run = _cut(num_rows, num_columns)
    sums = torch.empty((runs, num_columns), dtype=torch.float32, device=x.device)
    _gelu_gradient[(columns, runs)](
        grad,
        x,
        grad_x,
        output,
        sums,
        num_rows,
        num_columns,
        rows_of_run,
        wants_output=wants_output,
        block_rows=_BLOCK_ROWS,
        block_columns=_BLOCK_COLUMNS,
        num_warps=_WARPS,
    )
    return grad_x, output, _added_up(sums, x.dtype)


def packed_gradient(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients [b, s, a, d] in one tensor [b, s, 3, a, d], and its sums [3 a d] over b and s."""
    batch, length, heads, width = query.shape
    num_rows, num_columns = batch * length, heads * width
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    packed = query.new_empty(batch, length, 3, heads, width)
    columns, runs, rows_of_run = _cut(num_rows, num_columns, tensors=3)
    sums = torch.empty((runs, 3 * num_columns), dtype=torch.float32, device=query.device)
    _pack[(columns, runs, 3)](
        query,
        key,
        value,
        packed,
        sums,
        num_rows,
        num_columns,
        rows_of_run,
        block_rows=_BLOCK_ROWS,
        block_columns=_BLOCK_COLUMNS,
        num_warps=_WARPS,
    )
    return packed, _added_up(sums, query.dtype)


def _cut(num_rows: int, num_columns: int, tensors: int = 1) -> tuple[int, int, int]:
    """Return the blocks of columns, the runs of rows, and the rows of each run, of which the last may have fewer."""
    columns = triton.cdiv(num_columns, _BLOCK_COLUMNS)
    runs = min(max(_PROGRAMS // (columns * tensors), 1), triton.cdiv(num_rows, _BLOCK_ROWS))
    rows_of_run = triton.cdiv(triton.cdiv(num_rows, runs), _BLOCK_ROWS) * _BLOCK_ROWS
    return columns, triton.cdiv(num_rows, rows_of_run), rows_of_run


def _added_up(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over the runs, [columns], of the sums of each, [runs, columns]."""
    num_runs, num_columns = sums.shape
    total = torch.empty(num_columns, dtype=dtype, device=sums.device)
    block = 32  # of up to 1,024 runs
    _add_up[(triton.cdiv(num_columns, block),)](
        sums, total, num_runs, num_columns, runs=triton.next_power_of_2(num_runs), block_columns=block, num_warps=_WARPS
    )
    return total
