"""Gradients of parameters, set aside in backward and given to autograd later (zero-bubble schedules).

Backward has two parts: I makes the gradients of activations, which the pipeline stage before is waiting for, and W
those of parameters, for which nobody waits; so W can fill what would be bubbles (Qi et al., arXiv 2401.10241).

    forward   layers compute with an *alias* of each parameter: the same values, a leaf of its own
    I         what autograd finds for an alias is set aside; linear layers only leave word how to make their weight's
    take      all of this belongs to one backward of one chunk, and is held until its turn comes
    W         Held.give: every gradient is made, given to its parameter and dropped, one after the other

So `.grad` accumulates and its hooks fire as they would have in an undivided backward, once for every parameter.  What
linear layers have kept are activations and gradients themselves, no copies: until W nobody may write to them, to the
gradient that backward was started with neither.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Make = Callable[[], Tensor | None]
"""Makes a gradient; None when it has been written to its slot."""


class Held:
    """The gradients of one backward, those that are made already and those that are not."""

    def __init__(self, gradients: Sequence[tuple[nn.Parameter, list[Make]]]) -> None:
        self._gradients = list(reversed(gradients))  # from here on the last is the next

    def give(self) -> None:
        """Hand every parameter its gradient, in the order of `gradients`; where that communicates, a collective call.

        Parameters need no values now, just shape and dtype.
        """
        while self._gradients:
            parameter, contributions = self._gradients.pop()
            with torch.enable_grad():
                torch.autograd.backward(_given(parameter, contributions))


class DeferredGradients:
    """What backward has found for parameters since the last `take`."""

    def __init__(self) -> None:
        self._places: dict[nn.Parameter, int] = {}  # in the order of the first use in forward
        self._contributions: dict[nn.Parameter, list[Make]] = {}

    def alias(self, parameter: nn.Parameter) -> Tensor:
        """What to compute with: the same values, no part of the parameter's graph.

        The gradient that autograd finds for it is set aside for the parameter.  A frozen parameter is its own alias.
        """
        assert isinstance(parameter, nn.Parameter), "an alias of an alias would lead nowhere"
        if not parameter.requires_grad:
            return parameter
        self._places.setdefault(parameter, len(self._places))
        alias = parameter.detach().requires_grad_()
        alias.grad_dtype = parameter.grad_dtype
        when_accumulated: Callable[..., Any] = alias.register_post_accumulate_grad_hook
        when_accumulated(lambda found: self._set_aside(parameter, found))
        return alias

    def later(self, parameter: nn.Parameter, make: Make) -> None:
        """A gradient that will be computed at `Held.give`; make returns a tensor that nobody else has."""
        self._places.setdefault(parameter, len(self._places))
        self._contributions.setdefault(parameter, []).append(make)

    def take(self) -> Held:
        """Everything set aside since the last take: one micro-batch's backward of one chunk.

        It will be given in the order of an undivided backward: the parameter that forward has used first comes last.
        """
        taken, self._contributions = self._contributions, {}
        return Held(sorted(taken.items(), key=lambda item: self._places[item[0]], reverse=True))

    def _set_aside(self, parameter: nn.Parameter, alias: Tensor) -> None:
        gradient, alias.grad = alias.grad, None
        if gradient is not None:  # or else a layer has left word how to make it
            self.later(parameter, lambda: gradient)


class _Given(torch.autograd.Function):
    """Nothing in forward; in backward the sum of the contributions, of which autograd then holds the only reference."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, contributions: list[Make]) -> Tensor:
        ctx.contributions = contributions
        return torch.zeros((), device=parameter.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        contributions, ctx.contributions = ctx.contributions, None
        return _sum(contributions), None


_given: Callable[..., Tensor] = _Given.apply


def _sum(contributions: list[Make]) -> Tensor | None:
    """Of every contribution, freed as soon as it is added, in the highest precision of any; None if there is none."""
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
