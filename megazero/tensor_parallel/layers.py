"""Linear layers cut over the tensor-parallel ranks (Megatron-LM, section 3).

A *column-parallel* layer cuts its outputs: every rank reads the whole input and makes a part of the output.  A
*row-parallel* layer cuts its inputs: every rank reads its part, and the partial sums are added up.  One after the other
they need a single all-reduce in forward and one in backward:

    x [.., h] --column--> [.., f / tp] --pointwise--> [.., f / tp] --row--> partial [.., h] --all-reduce--> [.., h]

Weights are created uninitialised: first values come from `model/initialize.py` or a checkpoint.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megazero.comm.interface import Communicator
from megazero.parallel.param_spec import Init, ParamSpec, attach_spec
from megazero.tensor_parallel.random import RandomRegions
from megazero.tensor_parallel.regions import reduce_from_region


@dataclass(frozen=True)
class TensorParallel:
    """What a layer must know of its surroundings: the tensor-parallel axis, random states, where and what it holds.

    hollow: parameters are made without memory, for an engine that brings their first values itself.
    """

    communicator: Communicator
    random: RandomRegions
    dtype: torch.dtype
    device: torch.device
    hollow: bool = False


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the outputs cut: [..., in] to [..., out / size].

    logical_shape is the weight's, [*out, in], where the outputs may have several dims; split_dim is the one of them
    that is cut, and the output keeps this rank's part of all of them, flattened.  The bias is cut along.
    """

    def __init__(self, tp: TensorParallel, *, logical_shape: tuple[int, ...], split_dim: int, init: Init) -> None:
        super().__init__()
        assert split_dim < len(logical_shape) - 1, "a column-parallel layer cuts outputs"
        self._communicator = tp.communicator
        self.weight = sharded_parameter(tp, logical_shape, split_dim, init=init)
        self.bias = sharded_parameter(tp, logical_shape[:-1], split_dim, init=Init("zeros"), flat=True)

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, self._communicator)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the inputs cut: [..., in / size] to [..., out], the same on every rank.

    logical_shape is [out, in].  The bias is replicated and added once, after the partial sums have been added up.
    """

    def __init__(self, tp: TensorParallel, *, logical_shape: tuple[int, int], init: Init) -> None:
        super().__init__()
        self._communicator = tp.communicator
        self.weight = sharded_parameter(tp, logical_shape, 1, init=init)
        self.bias = replicated_parameter(tp, logical_shape[:1], init=Init("zeros"), decay=False)

    def forward(self, x: Tensor) -> Tensor:
        return reduce_from_region(F.linear(x, self.weight), self._communicator) + self.bias


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, communicator: Communicator) -> Tensor:
    """x [..., in] W^T [in, part] + b as the entry of a region: the gradient of x is summed over the ranks."""
    return _ColumnLinear.apply(x, weight, bias, communicator)  # type: ignore[no-untyped-call, no-any-return]


def sharded_parameter(
    tp: TensorParallel, logical_shape: Sequence[int], split_dim: int, *, init: Init, flat: bool = False
) -> nn.Parameter:
    """This rank's equal slice along `split_dim`, uninitialised: [prod(*out), in], or one dim (and no decay) if flat."""
    size, rank = tp.communicator.size, tp.communicator.rank
    assert logical_shape[split_dim] % size == 0, f"{logical_shape[split_dim]} elements over {size} ranks"
    length = logical_shape[split_dim] // size
    local = tuple(length if dim == split_dim else n for dim, n in enumerate(logical_shape))
    offset = tuple(rank * length if dim == split_dim else 0 for dim in range(len(local)))
    shape = (math.prod(local),) if flat else (math.prod(local[:-1]), local[-1])
    spec = ParamSpec("", tuple(logical_shape), local, offset, sharded_axes=("tp",), decay=not flat, init=init)
    return uninitialised_parameter(tp, shape, spec)


def replicated_parameter(tp: TensorParallel, shape: Sequence[int], *, init: Init, decay: bool) -> nn.Parameter:
    """A whole parameter that every tensor-parallel rank holds, uninitialised."""
    whole = tuple(shape)
    return uninitialised_parameter(tp, whole, ParamSpec("", whole, whole, (0,) * len(whole), decay=decay, init=init))


def uninitialised_parameter(tp: TensorParallel, shape: tuple[int, ...], spec: ParamSpec) -> nn.Parameter:
    """A parameter of this shape with its spec, its values undefined (or, if hollow, not there)."""
    tensor = torch.empty(shape, dtype=tp.dtype, device=tp.device)
    if tp.hollow:
        tensor.untyped_storage().resize_(0)
    return attach_spec(nn.Parameter(tensor), spec)


class _ColumnLinear(torch.autograd.Function):
    """F.linear as the entry of a region, in one Function so that the weight gradient is made during the all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])  # [tokens, part]
        grad_x = grad_weight = work = None
        if wants_x:
            grad_x = rows @ weight  # [tokens, in]
            work = ctx.communicator.all_reduce(grad_x)
        if wants_weight:
            grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
        grad_bias = rows.sum(0) if wants_bias else None
        if work is not None:
            work.wait()
        return None if grad_x is None else grad_x.view_as(x), grad_weight, grad_bias, None
