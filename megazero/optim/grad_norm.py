"""The global gradient norm, every logical element counted once.

Norms are taken per fragment, because a flat partition mixes parameters of different nature: one that is replicated over
tensor-parallel ranks counts on one of them only.  A fragment's norm is summed in float32 (float64 for float64
gradients), and the squares are added up in float64 over all ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_NONE = torch.iinfo(torch.int32).max


def fragment_norms(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """L2 norm of every tensor, float64 [len(gradients)]; inf or nan where a tensor holds one."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64, device=device)
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    norms: list[Tensor] = list(torch._foreach_norm(list(gradients), 2, dtype=dtype))
    return torch.stack(norms).double()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied with so that their norm stays below max_norm (0: no clipping); no dimensions."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def first_overflow(norms: Tensor, parameter_indices: Tensor) -> Tensor:
    """The smallest index in `parameter_indices` whose norm is not finite, int32; a large number when all are finite."""
    if norms.numel() == 0:
        return torch.full((), _NONE, dtype=torch.int32, device=norms.device)
    bad = torch.where(torch.isfinite(norms), _NONE, parameter_indices)
    return bad.min().to(torch.int32)
