"""The activations of feed-forward layers, and each before a linear layer, saved once.

The layer's weight gradient needs g = act(u), the activation's own gradient needs u.  As two operations they save both;
as one (`layers.RowParallelLinear`) they save u, and backward makes g again in the pass that makes u's gradient:

    forward    g = act(u)                             y = g W^T          retained: u
    backward   dg = dy W      du, g = act'(u) dg, act(u), in one pass    dW = dy^T g

One pass over u and dg takes a compiler.  Of two passes the second would compute GELU's tanh once more, and on a CPU
that costs more than g's memory is worth: so it is torch.compile that fuses the two (`model/compiled.py`), or on a GPU,
for GELU behind a bias, a kernel that makes the bias's gradient too (`bias_gradients.py`).

    gelu            [n, f] to [n, f]     in its approximation by tanh (GPT-2, BLOOM)
    swiglu          [n, 2 f] to [n, f]   SiLU of the first f, times the others (Llama, Qwen; Shazeer, arXiv 2002.05202)
    squared-relu    [n, f] to [n, f]     (So et al., arXiv 2109.08668)

    n = tokens, f = this rank's inner elements
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.tensor_parallel.bias_gradients import gelu_gradient
from megazero.tensor_parallel.compiler import compiled


class Activation(NamedTuple):
    """An activation, and its backward: the gradient of its input and its output, from the output's gradient and u."""

    output: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def gelu(x: Tensor) -> Tensor:
    """Return GELU of x, in its approximation by tanh."""
    return F.gelu(x, approximate="tanh")


def gelu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x from that of gelu(x), and gelu(x) itself."""
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh"), gelu(x)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., f], of x = gate and up, [..., 2 f]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x from that of swiglu(x), and swiglu(x) itself."""
    gate, up = x.chunk(2, dim=-1)
    inner = F.silu(gate)
    grads = torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * inner), dim=-1)
    return grads, inner * up


def squared_relu(x: Tensor) -> Tensor:
    """Return the square of ReLU of x."""
    return F.relu(x).square()


def squared_relu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x from that of squared_relu(x), and squared_relu(x) itself."""
    positive = F.relu(x)
    return 2 * positive * grad, positive.square()


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": Activation(gelu, gelu_backward),
        "swiglu": Activation(swiglu, swiglu_backward),
        "squared-relu": Activation(squared_relu, squared_relu_backward),
    }
)


class FusedActivation:
    """An activation and its backward, each compiled to one pass over its tensors."""

    def __init__(self, name: str, *, searches: bool = False) -> None:
        self.output, self.backward = (compiled(piece, searches=searches) for piece in ACTIVATIONS[name])
        self._is_gelu = name == "gelu"

    def backward_with_sums(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `backward` of rows, [n, f], and the sums of x's gradient over them."""
        if self._is_gelu and grad.device.type == "cuda":
            return gelu_gradient(grad, x, wants_output=True)
        grad_x, output = self.backward(grad, x)
        return grad_x, output, grad_x.sum(0)
