"""Norms: layer norm (Ba et al., arXiv 1607.06450) and RMSNorm (Zhang and Sennrich, arXiv 1910.07467)."""

import torch.nn.functional as F
from torch import Tensor, nn

from megazero.config.model import ModelConfig
from megazero.parallel.param_spec import InitialValue
from megazero.tensor_parallel.layers import TensorParallel, replicated_parameter


class Norm(nn.Module):
    """A norm over the last dim, of `width` elements, or h; its weight, and a layer norm's bias, are left uninitialised.

    is_inside: whether it is inside of a sharded region, where every rank has other heads.
    """

    bias: nn.Parameter | None

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, width: int | None = None, *, is_inside: bool = False
    ) -> None:
        super().__init__()
        self._epsilon = config.norm_epsilon
        self._tp = tp
        shape = (config.hidden_size if width is None else width,)
        ones, zeros = InitialValue("ones"), InitialValue("zeros")
        self.weight = replicated_parameter(tp, shape, init=ones, decay=False, is_inside=is_inside)
        has_bias = config.normalization == "LayerNorm"
        self.bias = replicated_parameter(tp, shape, init=zeros, decay=False, is_inside=is_inside) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self._tp.use(self.weight)
        if self.bias is None:
            return F.rms_norm(x, weight.shape, weight, self._epsilon)
        return F.layer_norm(x, weight.shape, weight, self._tp.use(self.bias), self._epsilon)
