"""Deferred gradients of parameters, which autograd accumulates after backward (zero-bubble schedules).

Backward has two parts: I computes the gradients of activations, which the pipeline stage before is waiting for, and W
those of parameters, which can wait; so W can fill what would be bubbles (Qi et al., arXiv 2401.10241).

    forward   layers compute with an *alias* of each parameter: the same values, a leaf of its own
    I         an alias's gradient is deferred; linear layers only defer a function that computes their weight's gradient
    collect   all of this belongs to one backward of one chunk, and is held until its W
    W         PassGradients.accumulate: every gradient is computed, accumulated in its parameter and freed, one by one

So `.grad` accumulates and its hooks fire as they would have in an undivided backward, once for every parameter.  Linear
layers retain activations and gradients themselves, no copies: until W they must not be written to, nor the gradient
that backward was started with.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MakeGradient = Callable[[], Tensor | None]
"""A function that computes a gradient, or writes it to its slot and returns None."""


class PassGradients:
    """The deferred gradients of one backward: some are computed already, the others are functions that compute them."""

    def __init__(self, gradients: Sequence[tuple[nn.Parameter, list[MakeGradient]]]) -> None:
        self._gradients = list(reversed(gradients))  # popped from the end

    def accumulate(self) -> None:
        """Accumulate every parameter's gradient, in the order of `gradients`; a collective if that communicates.

        Parameters need no values now, just shape and dtype.
        """
        while self._gradients:
            parameter, contributions = self._gradients.pop()
            with torch.enable_grad():
                torch.autograd.backward(_accumulate(parameter, contributions))


class DeferredGradients:
    """The gradients that backward has deferred since the last `collect`."""

    def __init__(self) -> None:
        self._order: dict[nn.Parameter, int] = {}  # the order of first uses in forward
        self._contributions: dict[nn.Parameter, list[MakeGradient]] = {}

    def alias(self, parameter: nn.Parameter) -> Tensor:
        """Return the tensor to compute with: the same values, no part of the parameter's graph.

        The gradient that autograd computes for it is deferred.  A frozen parameter is its own alias.
        """
        assert isinstance(parameter, nn.Parameter), "an alias has no alias"
        if not parameter.requires_grad:
            return parameter
        self._order.setdefault(parameter, len(self._order))
        alias = parameter.detach().requires_grad_()
        alias.grad_dtype = parameter.grad_dtype
        when_accumulated: Callable[..., Any] = alias.register_post_accumulate_grad_hook
        when_accumulated(lambda leaf: self._defer_gradient_of(parameter, leaf))
        return alias

    def defer(self, parameter: nn.Parameter, make: MakeGradient) -> None:
        """Defer a gradient until `accumulate`; make returns a new tensor, or None if it has written the gradient."""
        self._order.setdefault(parameter, len(self._order))
        self._contributions.setdefault(parameter, []).append(make)

    def collect(self) -> PassGradients:
        """Return everything deferred since the last call: one micro-batch's backward of one chunk.

        It is accumulated in the order of an undivided backward: the parameter that forward has used first comes last.
        """
        collected, self._contributions = self._contributions, {}
        return PassGradients(sorted(collected.items(), key=lambda item: self._order[item[0]], reverse=True))

    def _defer_gradient_of(self, parameter: nn.Parameter, alias: Tensor) -> None:
        gradient, alias.grad = alias.grad, None
        if gradient is not None:  # None: a linear layer has deferred a function instead
            self.defer(parameter, lambda: gradient)


class _Accumulate(torch.autograd.Function):
    """A Function that is empty in forward, and whose backward returns the sum of the deferred gradients."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, contributions: list[MakeGradient]) -> Tensor:
        ctx.contributions = contributions
        return torch.zeros((), device=parameter.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        contributions, ctx.contributions = ctx.contributions, None
        return _sum(contributions), None


_accumulate: Callable[..., Tensor] = _Accumulate.apply


def _sum(contributions: list[MakeGradient]) -> Tensor | None:
    """Sum up all contributions in the highest precision of any, freeing each at once; None if there is none."""
    total: Tensor | None = None
    while contributions:
        more = contributions.pop(0)()
        if total is None or more is None:
            total = more if total is None else total
            continue
        if more.dtype.itemsize > total.dtype.itemsize:
            total, more = more, total
        total += more
    return total
