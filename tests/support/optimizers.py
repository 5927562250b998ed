"""Optimizers such as users write: elementwise ones, and some of each kind that cannot work on pieces of parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """An optimizer that steps along the sign of averaged gradients; `kept_in` is the type of its momentum if given."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9, *, kept_in: torch.dtype | None = None) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})
        self.kept_in = kept_in

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p, dtype=self.kept_in or p.dtype))
                p.sub_(torch.sign(average * group["beta"] + p.grad * 0.1), alpha=group["lr"])
                average.lerp_(p.grad.to(average.dtype), 1 - group["beta"])


class Plain(Optimizer):
    """Gradient descent along a direction that subclasses make."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p, group) * group["lr"])

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class InBlocks(Plain):
    """Momentum, for parameters of at least 4,096 elements as 8-bit integers with a scale for each block of 256."""

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        state, blocks = self.state[p], p.numel() // 256
        old = state.get("momentum", torch.zeros_like(p))
        if "scales" in state:
            old = (old.view(blocks, 256) * state["scales"][:, None]).view_as(p)
        new = old.to(p.dtype).lerp(p.grad, 0.1)
        state["momentum"] = new
        if p.numel() >= 4096:
            state["scales"] = new.view(blocks, 256).abs().amax(1) / 127
            state["momentum"] = (new.view(blocks, 256) / state["scales"][:, None]).round().to(torch.int8).view_as(p)
        return new


class InOneType(InBlocks):
    """The same in one tensor of a lower precision, without scales."""

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        new = self.state[p].get("momentum", torch.zeros_like(p)).to(p.dtype).lerp(p.grad, 0.1)
        self.state[p]["momentum"] = new if p.numel() < 4096 else new.to(torch.bfloat16)
        return new


class TrustRatio(Plain):
    """The core of LAMB and LARS: the norm of a parameter's step is proportional to the norm of the parameter."""

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad * (p.norm() / p.grad.norm())


class KeepsGradient(Plain):
    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        previous = self.state[p].get("previous", p.grad)
        self.state[p]["previous"] = p.grad
        return p.grad + previous


class KeepsList(Plain):
    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        self.state[p].setdefault("history", []).append(p.grad.clone())
        return p.grad


class CountsInItself(Plain):
    count = 0

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        self.count += 1
        return p.grad / self.count


class CountsInGroup(Plain):
    """An optimizer that counts steps in its param groups, as older ones do, where the count looks like an option."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group.setdefault("step", 0)

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        if p is group["params"][0]:
            group["step"] += 1
        return p.grad / group["step"]


class Noisy(Plain):
    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad + torch.randn_like(p)


class Scaled(Plain):
    """An optimizer with a setting that is an attribute and not an option of its param groups."""

    def __init__(self, params: Any, *, scale: float = 1.0) -> None:
        super().__init__(params)
        self.scale = scale

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad * self.scale


class NeedsMore(Plain):
    def __init__(self, params: Any, horizon: int) -> None:
        super().__init__(params)
