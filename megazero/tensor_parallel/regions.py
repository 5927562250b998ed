"""The exit of a tensor-parallel region as an autograd Function (Megatron-LM, section 3).

Outside a *region* every tensor-parallel rank holds the same activation; inside it each holds a part.  Leaving it adds
up partial sums in forward and does nothing in backward; its conjugate, the entry, does nothing in forward and sums the
gradient in backward, where `layers.column_linear` hides it behind the weight's gradient.

The communicator is an argument; nothing here knows which axis it belongs to, and one rank takes the same path.
"""

from typing import Any

import torch
from torch import Tensor

from megazero.comm.interface import Communicator


def reduce_from_region(x: Tensor, communicator: Communicator) -> Tensor:
    """The sum of x over the ranks, written over x (which must be dense and not needed by its own backward)."""
    return _Reduce.apply(x, communicator)  # type: ignore[no-untyped-call, no-any-return]


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        assert x.is_contiguous(), "a strided tensor would be summed wrongly"
        ctx.mark_dirty(x)
        communicator.all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
