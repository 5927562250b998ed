"""Passes of backward that make the gradient of a layer's output, and with it that of the layer's bias.

The bias of a linear layer is added to every row of its output, so its gradient is the sum of the output's gradient over
all rows.  Where that gradient is made by a pass over memory, the pass adds the rows up as it writes them, and nothing
is read again:

    GELU       dg [n, f], u [n, f] --> du [n, f], and db [f], the sum of du over n
    attention  dq, dk, dv [b, s, a, d] --> their one tensor [b s, 3 a d], and db [3 a d]

The layer then computes its output with the bias, but leaves the bias's gradient to the function of this file that reads
the output.  On a GPU each pass is an operator, which is whole to torch's compiler: its own kernels would add up in
another pass.  Elsewhere it is written out below, as operations that a compiler may fuse with others.

    n = b s = tokens in rows, f = this rank's inner elements, a = its heads, d = a head's width
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Schemas by hand, as in float8_rounding.py.
torch.library.define(
    "megazero::gelu_gradient",
    "(Tensor grad, Tensor x, bool wants_output) -> (Tensor grad_x, Tensor output, Tensor sums)",
)
torch.library.define(
    "megazero::packed_gradient", "(Tensor query, Tensor key, Tensor value) -> (Tensor packed, Tensor sums)"
)


def gelu_gradient(grad: Tensor, x: Tensor, *, wants_output: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return x's gradient [n, f], gelu(x) (empty if it is not wanted), and the gradient's sums over n, [f]."""
    compute = torch.ops.megazero.gelu_gradient.default if grad.device.type == "cuda" else gelu_gradient_by_torch
    grad_x, output, sums = compute(grad, x, wants_output)
    return grad_x, output, sums


def packed_gradient(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients [b, s, a, d] of queries, keys and values in one tensor [b, s, 3, a, d], and its sums [3 a d]."""
    compute = torch.ops.megazero.packed_gradient.default if query.device.type == "cuda" else packed_gradient_by_torch
    packed, sums = compute(query, key, value)
    return packed, sums


def gelu_gradient_by_torch(grad: Tensor, x: Tensor, wants_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `gelu_gradient` by torch's operations."""
    grad_x = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    output = F.gelu(x, approximate="tanh") if wants_output else x.new_empty(0)
    return grad_x, output, grad_x.sum(0)


def packed_gradient_by_torch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `packed_gradient` by torch's operations."""
    packed = torch.stack((query, key, value), dim=2)
    return packed, packed.flatten(0, 1).flatten(1).sum(0)


torch.library.impl("megazero::gelu_gradient", "cpu", gelu_gradient_by_torch)
torch.library.impl("megazero::packed_gradient", "cpu", packed_gradient_by_torch)


@torch.library.impl("megazero::gelu_gradient", "cuda")
def _gelu_gradient_on_gpu(grad: Tensor, x: Tensor, wants_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    if x.dtype == torch.float64 or not len(x):  # the kernel computes in fp32
        return gelu_gradient_by_torch(grad, x, wants_output)
    from megazero.tensor_parallel import bias_gradient_kernels  # needs Triton, which torch for GPUs has

    return bias_gradient_kernels.gelu_gradient(grad, x, wants_output)


@torch.library.impl("megazero::packed_gradient", "cuda")
def _packed_gradient_on_gpu(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    if query.dtype == torch.float64 or not query.numel():
        return packed_gradient_by_torch(query, key, value)
    from megazero.tensor_parallel import bias_gradient_kernels

    return bias_gradient_kernels.packed_gradient(query, key, value)


@torch.library.register_fake("megazero::gelu_gradient")
def _gelu_gradient_fake(grad: Tensor, x: Tensor, wants_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = x.shape if wants_output else (0,)
    return x.new_empty(x.shape), x.new_empty(shape), x.new_empty(x.shape[1])


@torch.library.register_fake("megazero::packed_gradient")
def _packed_gradient_fake(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, width = query.shape
    return query.new_empty(batch, length, 3, heads, width), query.new_empty(3 * heads * width)


class _Gelu(torch.autograd.Function):
    """GELU of a linear layer's output; backward also makes the gradient of that layer's bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        grad_x, _, sums = gelu_gradient(grad, x)
        return grad_x, sums


class _Heads(torch.autograd.Function):
    """The queries, keys and values in a linear layer's output; backward also makes the gradient of its bias."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = packed.unbind(2)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return packed_gradient(query, key, value)


biased_gelu: Callable[[Tensor, Tensor], Tensor] = _Gelu.apply
"""Return gelu(x), x [n, f], in its approximation by tanh, where the bias [f] is already a part of x."""

biased_heads: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = _Heads.apply
"""Return the views [b, s, a, d] of [b, s, 3, a, d], of which the bias [3 a d] is already a part."""
