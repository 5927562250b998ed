"""Where a layer writes the gradient of its weight: straight into the memory in which gradients are kept or sent.

Autograd gives a gradient away as a new tensor, which then is added to, or copied into, a flat buffer: one tensor and
one pass more than a matrix product needs, since it can write into the buffer itself.  A layer that does so says it in
the parameter's spec (`ParamSpec.writes_gradient`); an engine that has a place for it attaches that to the parameter.
The layer's backward then *takes* the place, writes, and returns no gradient to autograd, whose hooks fire all the same.
"""

from typing import NamedTuple, Protocol

from torch import Tensor, nn

_ATTRIBUTE = "megazero_gradient_place"


class Taken(NamedTuple):
    """Memory of the parameter's shape.  is_first: what it holds is undefined; else the gradient is to be added."""

    tensor: Tensor
    is_first: bool


class GradientPlace(Protocol):
    """Gives a parameter's backward the memory for its gradient."""

    def take(self) -> Taken | None:
        """Whoever takes it writes before backward goes on; None: the gradient goes to autograd."""


def add_to(total: Tensor, found: Tensor, *, is_first: bool) -> None:
    """total += found, or total = found; what is of a higher precision is rounded first, as autograd does it."""
    if is_first:
        total.copy_(found)
    else:
        total.add_(found.to(total.dtype) if found.dtype.itemsize > total.dtype.itemsize else found)


def attach_place(parameter: nn.Parameter, place: GradientPlace) -> None:
    """From now on the parameter's layer writes its gradient there."""
    setattr(parameter, _ATTRIBUTE, place)


def detach_place(parameter: nn.Parameter) -> None:
    """Gradients go to autograd again."""
    if hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)


def place_of(parameter: Tensor) -> GradientPlace | None:
    """The place that an engine has given, if one has; none for a parameter with hooks that want to see gradients."""
    place: GradientPlace | None = getattr(parameter, _ATTRIBUTE, None)
    return None if parameter._backward_hooks else place
