"""The GPU's kernel of `cross_entropy.py`, in Triton: all of a chunk's loss and gradient in one launch.

A program takes a row, whose second read, for the gradient, is a few microseconds after the first, and finds a part of
it in the caches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of eleven sizes the fastest: 0.46 ms for 5,120 rows of 50,304 logits in bf16 on an H200 (0.19 without the gradient).
_BLOCK, _WARPS = 2048, 4  # columns


@triton.jit
def _loss_and_gradient(
    logits,  # [num_rows, width]
    ids,  # [num_rows]
    token_weights,  # [num_rows], if they are given
    losses,  # [num_rows], which is written
    width: tl.constexpr,
    num_real: tl.constexpr,
    has_weights: tl.constexpr,
    wants_gradient: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    peak = -float("inf")
    total = 0.0
    for start in range(0, num_real, block):
        column = start + tl.arange(0, block)
        x = tl.load(logits + column, mask=column < num_real, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, axis=0))
        # From a peak of minus infinity no distance is a number.
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(peak - finite) + tl.sum(tl.exp(x - finite), axis=0)
        peak = higher
    label = tl.load(ids + row)
    is_real = (label >= 0) & (label < num_real)
    target = tl.load(logits + tl.where(is_real, label, 0)).to(tl.float32) - peak
    tl.store(losses + row, tl.log(total) - tl.where(is_real, target, 0.0))
    if wants_gradient:
        weight = 1.0
        if has_weights:
            weight = tl.load(token_weights + row).to(tl.float32)
        tl.debug_barrier()  # the label's logit is read before another thread overwrites it
        for start in range(0, width, block):
            column = start + tl.arange(0, block)
            x = tl.load(logits + column, mask=column < num_real, other=-float("inf"), eviction_policy="evict_first")
            softmax = tl.exp(x.to(tl.float32) - peak) / total
            gradient = (softmax - tl.where((column == label) & is_real, 1.0, 0.0)) * weight
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < width)


def losses(logits: Tensor, ids: Tensor, token_weights: Tensor | None, num_real: int, *, wants_gradient: bool) -> Tensor:
    """Return the losses [m], fp32, of logits [m, width], whose columns from num_real on are padding.

    wants_gradient: the logits are overwritten by their gradient, times the token's weight.
    """
    num_rows, width = logits.shape
    found = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _loss_and_gradient[(num_rows,)](
            logits,
            ids,
            token_weights,
            found,
            width,
            num_real,
            has_weights=token_weights is not None,
            wants_gradient=wants_gradient,
            block=_BLOCK,
            num_warps=_WARPS,
        )
    return found
