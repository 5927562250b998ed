"""The arithmetic of the global gradient norm: norms of fragments, the clip coefficient, the first overflow.

Norms are taken per fragment, because a flat partition has both sharded and replicated parameters: one that is
replicated over tensor-parallel ranks is counted on one of them only (`megazero.zero.update` selects the fragments,
`megazero.zero.step` adds up their squares in float64 over all ranks).  A fragment's norm is summed in float32 (float64
for float64 gradients).

On a CPU torch widens narrow numbers into memory of its own before it sums them; here that memory is a leased
constant-size buffer, one fragment at a time (CB: ZeRO, section 6.2).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megazero.memory.lease import Scratch

_NONE = torch.iinfo(torch.int32).max


def fragment_norms(gradients: Sequence[Tensor], device: torch.device, buffers: Scratch) -> Tensor:
    """Return the L2 norm of every tensor, float64 [len(gradients)]; inf or nan for a tensor that contains one.

    buffers: leases memory for the largest tensor in the dtype of sums.
    """
    if not gradients:
        return torch.zeros(0, dtype=torch.float64, device=device)
    dtype = sum_dtype(gradients[0].dtype)
    if device.type == "cpu" and gradients[0].dtype != dtype:
        norms = [norm_of_parts([gradient], gradient.numel(), dtype, buffers) for gradient in gradients]
    else:
        norms = list(torch._foreach_norm(list(gradients), 2, dtype=dtype))
    return torch.stack(norms).double()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a fragment of `dtype` is summed."""
    return torch.promote_types(dtype, torch.float32)


def norm_of_parts(parts: Iterable[Tensor], numel: int, dtype: torch.dtype, buffers: Scratch) -> Tensor:
    """Return the L2 norm of a tensor on a CPU that comes in parts, one after the other, in the dtype of its sum.

    numel: its elements, for which memory is leased: the norm is that of all in one tensor, to the bit.
    """
    lease, start = buffers.lease(numel, dtype), 0
    for part in parts:
        lease.tensor[start : start + part.numel()].copy_(part)
        start += part.numel()
    norm: Tensor = torch.linalg.vector_norm(lease.tensor)
    lease.release()
    return norm


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor, a scalar tensor, that reduces the gradients' norm to max_norm at most (0: no clipping)."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def first_overflow(norms: Tensor, parameter_indices: Tensor) -> Tensor:
    """Return the least of `parameter_indices` whose norm is not finite, int32; the largest int32 if there is none."""
    if norms.numel() == 0:
        return torch.full((), _NONE, dtype=torch.int32, device=norms.device)
    bad = torch.where(torch.isfinite(norms), _NONE, parameter_indices)
    return bad.min().to(torch.int32)
