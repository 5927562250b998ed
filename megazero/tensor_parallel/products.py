"""The three matrix products of a linear layer, and the libraries that compute them.

With x [n, in], W [out, in] and the gradient dy [n, out] of y = x W^T + b:

    output            y  = x W^T + b
    input gradient    dx = dy W
    weight gradient   dW = dy^T x

Layers and the LM head use this interface, so that a number format or a library is chosen in one place: torch's own
product, oneDNN where torch would call a slower library (`onednn.py`), or 8-bit numbers (`float8.py`).
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.parallel.gradient_slot import add_to


class Products(Protocol):
    """An implementation of the products of two-dimensional tensors; every result is a new tensor."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return [n, out] from x [n, in], weight [out, in] and bias [out]."""

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return [n, in] from grad [n, out] and weight [out, in]."""

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return [out, in] from grad [n, out] and x [n, in]."""

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, *, is_first: bool) -> None:
        """Add the weight gradient to total [out, in]; is_first: total is undefined, and is overwritten.

        total may be of a higher precision: the sum is then made there.
        """


class TorchProducts:
    """The products that torch computes by itself."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.t() @ x

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, *, is_first: bool) -> None:
        if has_wider_sums(total, grad):
            torch.addmm(total, grad.t(), x, beta=0 if is_first else 1, out_dtype=total.dtype, out=total)
        elif total.dtype != grad.dtype:
            add_to(total, self.weight_gradient(grad, x), is_first=is_first)
        elif is_first:
            torch.mm(grad.t(), x, out=total)
        else:
            total.addmm_(grad.t(), x)


def has_wider_sums(total: Tensor, operand: Tensor) -> bool:
    """Return True if torch's product of 16-bit operands can be written, or added, to this fp32 total without rounding.

    On GPUs it can: the product is summed in fp32 there, and no tensor of the operands' dtype lies between.
    """
    is_narrow = operand.dtype in (torch.bfloat16, torch.float16)
    return total.device.type == "cuda" and total.dtype == torch.float32 and is_narrow


TORCH = TorchProducts()
