"""Chooses the one of torch's kernels that computes attention.

On a GPU several can (FlashAttention, cuDNN's, the memory-efficient one), and which is fastest depends on the GPU, the
shape and torch's version: *auto* measures them once, forward and backward, on the shape that the run will have, with a
mask if the run has one (FlashAttention takes none).  The chosen kernel goes first; a call that it cannot serve
goes to the next.  Megatron-LM's names: flash, fused (cuDNN), unfused.
"""

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megazero.config.run import RunConfig
from megazero.model.sequences import document_mask
from megazero.zero.plan import DTYPES

KERNELS: Mapping[str, SDPBackend] = MappingProxyType(
    {
        "flash": SDPBackend.FLASH_ATTENTION,
        "fused": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "unfused": SDPBackend.MATH,
    }
)
_FUSED = ("flash", "fused", "efficient")
_CALLS = 5
_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
_using: Callable[..., AbstractContextManager[None]] = sdpa_kernel


class AttentionCall(NamedTuple):
    """The arguments of one attention call, as far as kernels depend on them.

    shape: [b, a/t, s, d] of query, key and value.  dropout: a probability.
    is_masked: True for a mask of documents, False for a causal one.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    dropout: float
    is_masked: bool = False


def attention_call(config: RunConfig, device: torch.device) -> AttentionCall:
    """Return the attention call of every layer of a run."""
    model, tensor_size = config.model, config.parallel.tensor_model_parallel_size
    heads, head_dim = model.num_attention_heads, model.hidden_size // model.num_attention_heads
    shape = (config.training.micro_batch_size, heads // tensor_size, model.seq_length, head_dim)
    dtype, is_masked = DTYPES[config.precision.precision], config.data.reset_attention_mask
    return AttentionCall(shape, dtype, device, model.attention_dropout, is_masked)


def choose_kernel(
    wanted: str, call: AttentionCall, seconds: Callable[[str, AttentionCall], float | None] | None = None
) -> str | None:
    """Return the name in `KERNELS` of the kernel to prefer; None leaves it to torch, as on the CPU, which has one.

    seconds: returns how long a kernel takes for a call, None if it cannot serve it; `measure` by default.
    """
    if wanted != "auto":
        return wanted
    if call.device.type != "cuda":
        return None
    candidates = [name for name in _FUSED if not (call.is_masked and name == "flash")]
    measured = {name: (seconds or measure)(name, call) for name in candidates}
    able = {name: found for name, found in measured.items() if found is not None}
    return min(able, key=lambda name: able[name]) if able else None


def prefer_kernel(kernel: str | None) -> AbstractContextManager[None]:
    """Return a context in which attention is computed by this kernel where it can be."""
    if kernel is None:
        return nullcontext()
    if kernel == "unfused":  # which serves every call
        return _using([KERNELS[kernel]])
    others = [backend for name, backend in KERNELS.items() if name != kernel]
    return _using([KERNELS[kernel], *others], set_priority=True)


def measure(kernel: str, call: AttentionCall) -> float | None:
    """Return the median seconds of a forward and backward on a GPU; None if the kernel cannot serve the call."""
    query, key, value = (
        torch.randn(call.shape, dtype=call.dtype, device=call.device, requires_grad=True) for _ in range(3)
    )
    mask = None
    if call.is_masked:
        documents = torch.zeros(call.shape[0], call.shape[2], dtype=torch.int32, device=call.device)
        mask = document_mask(documents, call.dtype)
    times: list[float] = []
    try:
        with _using([KERNELS[kernel]]):
            for _ in range(_CALLS + 1):
                begin, end = _event(enable_timing=True), _event(enable_timing=True)
                begin.record()
                mixed = F.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, dropout_p=call.dropout, is_causal=mask is None
                )
                torch.autograd.backward(mixed, torch.ones_like(mixed))
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
    except RuntimeError:  # "no available kernel"
        return None
    return statistics.median(times[1:])
