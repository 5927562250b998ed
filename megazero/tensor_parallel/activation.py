"""GELU before a linear layer, saved once: backward makes its output again, in the pass that makes its gradient.

The layer's weight gradient needs g = gelu(u), GELU's own needs u.  As two operations they save both, [n, f] each; as
one (`layers.RowParallelLinear`) they save u:

    forward    g = gelu(u)                            y = g W^T          retained: u
    backward   dg = dy W      du, g = gelu'(u) dg, gelu(u), in one pass  dW = dy^T g

One pass over u and dg takes a compiler.  Of two passes the second would compute the tanh once more, and on a CPU that
costs more than g's memory is worth: so it is torch.compile that fuses the two (`model/compiled.py`).

    n = tokens, f = this rank's inner elements
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.tensor_parallel.compiler import compiled


def gelu(x: Tensor) -> Tensor:
    """Return GELU of x, in its approximation by tanh."""
    return F.gelu(x, approximate="tanh")


def gelu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x from that of gelu(x), and gelu(x) itself."""
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh"), gelu(x)


class FusedGelu:
    """GELU and its backward, each compiled to one pass over its tensors."""

    def __init__(self, *, searches: bool = False) -> None:
        self.output, self.backward = (compiled(piece, searches=searches) for piece in (gelu, gelu_backward))
