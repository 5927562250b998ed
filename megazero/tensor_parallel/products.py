"""The three matrix products of a linear layer, and who computes them.

With x [n, in], W [out, in] and the gradient dy [n, out] of y = x W^T + b:

    output            y  = x W^T + b
    input gradient    dx = dy W
    weight gradient   dW = dy^T x

Layers and the LM head ask for them here, so that a number format or a library is chosen in one place: torch's own
product, oneDNN where torch would call a slower library (`onednn.py`), or 8-bit numbers (`float8.py`).
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.parallel.gradient_slot import add_to


class Products(Protocol):
    """Products of two-dimensional tensors; a result is a new tensor that nobody else has."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in], weight [out, in], bias [out] to [n, out]."""

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad [n, out], weight [out, in] to [n, in]."""

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """grad [n, out], x [n, in] to [out, in]."""

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, *, is_first: bool) -> None:
        """total [out, in] += the weight gradient; is_first: what total holds is undefined, and is overwritten.

        total may be of a higher precision: the sum is then made there.
        """


class TorchProducts:
    """What torch does with a product by itself."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.t() @ x

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, *, is_first: bool) -> None:
        if total.dtype != grad.dtype:
            add_to(total, self.weight_gradient(grad, x), is_first=is_first)
        elif is_first:
            torch.mm(grad.t(), x, out=total)
        else:
            total.addmm_(grad.t(), x)


TORCH = TorchProducts()
