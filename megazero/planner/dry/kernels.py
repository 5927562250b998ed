"""Kernels that a machine has, where tensors without values lie in the memory of another one.

A plan for GPUs is made on a CPU.  There torch would take the operations of a CPU, of which three differ in what they
leave for backward: dropout, whose mask is of the activation's dtype on a CPU and one byte an element on a GPU,
attention, which has no flash kernel with dropout on a CPU, and RMSNorm, which is several operations there.  The update,
which a CPU makes in pieces that fit its cache, is one kernel for all elements of a run on a GPU, and products are added
to sums in float32 without a tensor between.  Other operations are a CPU's: a layer norm's mean and deviation are of the
activation's dtype, where a GPU has float32, and some sums go through buffers.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.optim import inner
from megazero.tensor_parallel import products


def gpu_kernels(attention: str = "flash") -> AbstractContextManager[Any]:
    """Return a context in which torch's functions of dropout and attention take the operations that a GPU has.

    A function mode would not do: torch switches it off in backward, where activations are recomputed.
    attention: "flash", or "unfused": one operation at a time, with matrices of scores.
    """
    plain = F.scaled_dot_product_attention
    core = _unfused if attention == "unfused" else _flash

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *places: Any, **options: Any
    ) -> Tensor:
        if attn_mask is not None:  # FlashAttention takes none
            return plain(query, key, value, attn_mask, *places, **options)
        return core(query, key, value, *places, **options)

    return patch.multiple(F, dropout=_dropout, scaled_dot_product_attention=attend, rms_norm=_rms_norm)


def kernels(*, is_gpu: bool, attention: str) -> AbstractContextManager[Any]:
    """Return a context in which a model computes with the kernels of the devices that a plan is for.

    attention: the setting attention_backend.
    """
    if not is_gpu:
        return nullcontext()
    both = ExitStack()
    both.enter_context(gpu_kernels(attention))
    both.enter_context(patch.object(inner, "_CACHED_NUMEL", sys.maxsize))
    both.enter_context(patch.object(products, "has_wider_sums", _has_wider_sums))
    return both


def _has_wider_sums(total: Tensor, operand: Tensor) -> bool:
    return total.dtype == torch.float32 and operand.dtype in (torch.bfloat16, torch.float16)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0] if p > 0 and training else input


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Stand for the one kernel that a GPU has; it saves the input and a figure of every row, as a layer norm does."""
    return F.layer_norm(input, normalized_shape, weight, None, 1e-5 if eps is None else eps)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    kernel: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention
    mixed: Tensor = kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return mixed


def _repeated(part: Tensor, heads: int) -> Tensor:
    """Return keys or values with as many heads as queries have."""
    batch, groups, length, width = part.shape
    return part[:, :, None].expand(batch, groups, heads // groups, length, width).flatten(1, 2)


def _unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention one operation at a time; inputs and result have the shape [b, n, s, d]."""
    if enable_gqa:
        key, value = (_repeated(part, query.shape[1]) for part in (key, value))
    scores = torch.matmul(query * (scale or query.shape[-1] ** -0.5), key.transpose(-1, -2))  # [b, n, s, s]
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill_(future, -torch.inf)
    return torch.matmul(_dropout(torch.softmax(scores, dim=-1), dropout_p), value)
