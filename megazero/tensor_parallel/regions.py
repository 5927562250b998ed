"""The borders of a tensor-parallel region, as conjugate pairs of autograd Functions (Megatron-LM, section 3).

Outside a *region* every tensor-parallel rank holds the same activation; inside it each holds a part.  Whatever a
border does in forward, its conjugate does in backward:

    border                forward                          backward
    copy_to_region        nothing                          all-reduce the gradient
    reduce_from_region    all-reduce the partial sums      nothing
    scatter_to_region     keep my slice of the last dim    all-gather the slices
    gather_from_region    all-gather the slices            keep my slice of the last dim

The communicator is an argument; nothing here knows which axis it belongs to, and one rank takes the same path.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.comm.interface import Communicator


def copy_to_region(x: Tensor, communicator: Communicator) -> Tensor:
    """x as it is; its gradient is summed over the ranks."""
    return _Copy.apply(x, communicator)  # type: ignore[no-untyped-call, no-any-return]


def reduce_from_region(x: Tensor, communicator: Communicator) -> Tensor:
    """The sum of x over the ranks, written over x (which must be dense and not needed by its own backward)."""
    return _Reduce.apply(x, communicator)  # type: ignore[no-untyped-call, no-any-return]


def scatter_to_region(x: Tensor, communicator: Communicator) -> Tensor:
    """[..., n] to this rank's [..., n / size]; n must be divisible."""
    return _Scatter.apply(x, communicator)  # type: ignore[no-untyped-call, no-any-return]


def gather_from_region(x: Tensor, communicator: Communicator) -> Tensor:
    """This rank's [..., n] to everyone's [..., n * size], in rank order."""
    return _Gather.apply(x, communicator)  # type: ignore[no-untyped-call, no-any-return]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may hand the same gradient tensor to another branch as well.
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.communicator.all_reduce(total).wait()
        return total, None


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


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return _my_slice(x, communicator)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_slices(grad, ctx.communicator), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return _all_slices(x, communicator)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _my_slice(grad, ctx.communicator), None


def _my_slice(x: Tensor, communicator: Communicator) -> Tensor:
    assert x.shape[-1] % communicator.size == 0, f"{x.shape[-1]} elements over {communicator.size} ranks"
    return x.chunk(communicator.size, dim=-1)[communicator.rank].contiguous()


def _all_slices(x: Tensor, communicator: Communicator) -> Tensor:
    gathered = x.new_empty(communicator.size, *x.shape)
    communicator.all_gather_into(gathered.view(-1), x.contiguous().view(-1)).wait()
    return gathered.movedim(0, -2).flatten(-2)  # [size, ..., n] -> [..., size * n]
