"""References of optimizers that torch has not got: by their papers' formulas, for whole parameters, or a package's."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer


class Published(Optimizer):
    """An optimizer whose subclasses say what one step makes of one parameter."""

    DEFAULTS: ClassVar[dict[str, Any]]

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {**self.DEFAULTS, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    sign = -1.0 if group["maximize"] else 1.0
                    p.copy_(self.new_value(p.clone(), sign * p.grad, self.state[p], group))

    def new_value(self, x: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class PublishedLion(Published):
    """Chen et al., arXiv 2302.06675, algorithm 2."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}

    def new_value(self, x: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        (beta1, beta2), m = group["betas"], state.get("m", torch.zeros_like(x))
        update = torch.sign(beta1 * m + (1 - beta1) * g)
        state["m"] = beta2 * m + (1 - beta2) * g
        return x - group["lr"] * (update + group["weight_decay"] * x)


class PublishedLamb(Published):
    """You et al., arXiv 1904.00962, algorithm 2; the trust ratio has bounds, as in DeepSpeed."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "bias_correction": True,
        "eps_inside_sqrt": False,
        "min_coeff": 0.01,
        "max_coeff": 10.0,
        "maximize": False,
    }

    def new_value(self, x: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        (beta1, beta2), eps = group["betas"], group["eps"]
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
        if group["bias_correction"]:
            m, v = m / (1 - beta1**t), v / (1 - beta2**t)
        root = (v + eps).sqrt() if group["eps_inside_sqrt"] else v.sqrt() + eps
        r = m / root + group["weight_decay"] * x
        ratio = 1.0
        if x.norm() > 0 and r.norm() > 0:
            ratio = min(max(float(x.norm() / r.norm()), group["min_coeff"]), group["max_coeff"])
        return x - group["lr"] * ratio * r


def reference_class(name: str) -> Any:
    """Return torch's optimizer of a name, or the one written here, or that of bitsandbytes, without which it skips."""
    if name.endswith("8bit"):
        return getattr(pytest.importorskip("bitsandbytes", reason="the reference is bitsandbytes itself").optim, name)
    return {"Lion": PublishedLion, "Lamb": PublishedLamb}.get(name) or getattr(torch.optim, name)
