"""GELU in the operators that torch's compiler makes a kernel of, where its own choice is slow on a GPU.

Torch writes GELU with a tanh, which takes a GPU longer than reading and writing the tensor.  With

    1 + tanh(u) = 2 s(2 u),   s = the logistic function

GELU is x s(2 u), and its derivative s + x s (1 - s) 2 u', of one exponential: the same to the last digits, and more
precise for negative x, where 1 + tanh(u) cancels.

    u = sqrt(2 / pi) (x + 0.044715 x^3)     (Hendrycks and Gimpel, arXiv 1606.08415)
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Names what this file holds, in keys of caches: another content needs another name.
DECOMPOSITIONS = "megazero: gelu by the logistic function, 1"

_FACTOR, _CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of operators, with those of this file in place of its own."""
    from torch._inductor.decomposition import select_decomp_table  # takes a second to import

    table = dict(select_decomp_table())
    aten = torch.ops.aten
    for operator, mine in ((aten.gelu.default, _gelu), (aten.gelu_backward.default, _gelu_backward)):
        table[operator] = _unless_exact(mine, table[operator])
    return table


def _unless_exact(mine: Callable[..., Tensor], theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a decomposition that takes torch's own for GELU by the error function."""

    def decompose(*tensors: Tensor, approximate: str = "none") -> Tensor:
        if approximate != "tanh":
            return theirs(*tensors, approximate=approximate)
        dtype = tensors[-1].dtype
        return mine(*(x.to(torch.promote_types(dtype, torch.float32)) for x in tensors)).to(dtype)

    return decompose


def _gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(_FACTOR * x * (1 + _CUBE * x * x))


def _gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    square = x * x
    inner = _FACTOR * x * (1 + _CUBE * square)
    slope = _FACTOR * (1 + 3 * _CUBE * square)
    # 1 - s(v) = s(-v), without cancellation.
    return grad * torch.sigmoid(inner) * (1 + x * torch.sigmoid(-inner) * slope)
