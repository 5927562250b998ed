"""Gradient slots: a layer writes the gradient of its weight straight into the memory where it is stored or sent.

Autograd returns a gradient as a new tensor, which then is added to, or copied into, a flat buffer: one tensor and one
pass more than a matrix product needs, since it can write into the buffer itself.  A layer that does so marks the
parameter's spec (`ParamSpec.writes_gradient`); an engine that has memory for it attaches a function to the parameter
that returns the *slot*.  The layer's backward calls that function, writes into the slot, and returns no gradient to
autograd, whose hooks fire all the same.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

_ATTRIBUTE = "megazero_gradient_slot"


class GradientSlot(NamedTuple):
    """Memory of the parameter's shape, to which its gradient is added; is_first: undefined, and so overwritten."""

    tensor: Tensor
    is_first: bool


GetGradientSlot = Callable[[], GradientSlot | None]
"""Returns the slot, which is written before backward goes on; None: the gradient goes to autograd."""


def add_to(total: Tensor, found: Tensor, *, is_first: bool) -> None:
    """Add `found` to `total`, rounded first if it is more precise, as autograd does it; or copy it if it is first."""
    if is_first:
        total.copy_(found)
    else:
        total.add_(found.to(total.dtype) if found.dtype.itemsize > total.dtype.itemsize else found)


def attach_gradient_slot(parameter: nn.Parameter, get_slot: GetGradientSlot) -> None:
    """Make the parameter's layer write its gradient into the slots that `get_slot` returns."""
    setattr(parameter, _ATTRIBUTE, get_slot)


def detach_gradient_slot(parameter: nn.Parameter) -> None:
    """Make gradients go to autograd again."""
    if hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)


def gradient_slot_of(parameter: Tensor) -> GetGradientSlot | None:
    """Return the function that an engine has attached, if any; None for parameters with hooks on gradients."""
    get_slot: GetGradientSlot | None = getattr(parameter, _ATTRIBUTE, None)
    return None if parameter._backward_hooks else get_slot
