"""Lion (Chen et al., arXiv 2302.06675, algorithm 2): a step of one length along the sign of an average of gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Lion as a torch optimizer, which treats every element by itself.

    Its one moment, `exp_avg`, decays with the second beta; the first one weighs it against the gradient in the step.
    Weight decay is decoupled.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; closure: evaluates the model before, and returns the result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        average, (beta1, beta2) = state["exp_avg"], group["betas"]
        direction = (average * beta1).add_(gradient, alpha=1 - beta1).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=group["lr"] if group["maximize"] else -group["lr"])
        average.mul_(beta2).add_(gradient, alpha=1 - beta2)
