"""Parameters in any layout: logical name, full shape, and which box of it is on this rank; units of parameters.

The *logical tensor* is the parameter as one process would hold it, unpadded; a fused QKV weight is logically
(3, heads, head_dim, hidden), so that tensor parallelism cuts it into one *box* (offsets and lengths per dim).  A rank's
tensor may be larger than its box: vocabulary rows are padded to a multiple of the tensor-parallel degree, and padding
lies past `full_shape`.  Initial values, gradient norm, weight decay, checkpoints and export all read the spec, which
is an attribute of the parameter.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megazero.parallel.topology import ENDS

_ATTRIBUTE = "megazero_spec"

InitKind = Literal["normal", "zeros", "ones"]
# "weight", or the optimizer's name for a value that it holds for every element: "exp_avg", "momentum_buffer".
StateKind = str


@dataclass(frozen=True)
class Box:
    """A rectangular region of a logical tensor: one offset and one length per dim, in elements."""

    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)


@dataclass(frozen=True)
class InitialValue:
    """The distribution of a parameter's first value; `std` only counts for "normal"."""

    kind: InitKind = "zeros"
    std: float = 0.0


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model as this rank holds it.

    name:         logical name, the same in every layout.
    full_shape:   shape of the logical tensor, without padding.
    local_shape:  logical dims of this rank's tensor, padding included; same number of elements, in the same order, as
                  the module's (possibly flattened to two dims) parameter.
    offset:       where this rank's tensor begins in the logical tensor, per dim.
    sharded_axes: mesh axes along which ranks hold different slices ("tp"); empty means every rank holds the same.
    summed_over:  mesh axes along which ranks hold the same, but each has a part of its gradient: "tp" where activations
                  are split along the sequence, "ends" for what the first and the last pipeline stage share.
    decay:        whether weight decay applies (not to biases and norms).
    writes_gradient: whether every use of it writes its gradient into the slot that is attached (`gradient_slot.py`).
    trainable:    False for a frozen parameter.
    arrives_with_block: whether autograd gets its gradient at once with those of its whole block, which is compiled.
    arrives_alone: whether its gradient is copied, or added, from autograd's own tensor to where it is stored.  That
                  costs less than zeros there to which autograd adds.
    """

    name: str
    full_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offset: tuple[int, ...]
    sharded_axes: tuple[str, ...] = ()
    summed_over: tuple[str, ...] = ()
    decay: bool = True
    writes_gradient: bool = False
    trainable: bool = True
    init: InitialValue = InitialValue()
    arrives_with_block: bool = False
    arrives_alone: bool = False

    @property
    def accumulates_in_place(self) -> bool:
        """True if autograd itself adds the gradient to where it is stored."""
        return not (self.writes_gradient or self.arrives_with_block or self.arrives_alone)

    @cached_property
    def numel(self) -> int:
        """The number of elements of this rank's tensor, padding included."""
        return math.prod(self.local_shape)

    @property
    def box(self) -> Box:
        """The part of the logical tensor that is on this rank (padding clipped off; may be empty)."""
        lengths = tuple(
            max(0, min(local, full - start))
            for local, full, start in zip(self.local_shape, self.full_shape, self.offset, strict=True)
        )
        return Box(self.offset, lengths)

    def is_counted_on(self, coordinates: Mapping[str, int]) -> bool:
        """Return True if the rank at these coordinates is the one that counts and saves this parameter.

        Along an axis over which the parameter is replicated only coordinate 0 counts it; `dp` is not among them, since
        ZeRO's partitions already divide the parameter along it.
        """
        return all(index == 0 or not self.is_replicated_along(axis) for axis, index in coordinates.items())

    def is_replicated_along(self, axis: str) -> bool:
        """Return True if ranks that differ along this axis, "tp" or "ends", have the same part of the parameter."""
        return axis in self.summed_over if axis == ENDS else axis not in self.sharded_axes


class Unit(NamedTuple):
    """Parameters, by name, that are laid out, gathered and released together, and the modules whose forwards read them.

    part: the number of the part of the model (a pipeline's chunk) that it belongs to; each has backwards of its own.
    is_leaf: whether ranks may compute different things in the consumers, so that backward gathers the unit wherever it
    comes to one of them, whatever that has computed.
    """

    name: str
    parameters: tuple[str, ...]
    consumers: tuple[nn.Module, ...] = ()
    part: int = 0
    is_leaf: bool = False


class StateElsewhere(Protocol):
    """Elements of state that are not in memory, one-dimensional, until they are asked for."""

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the elements."""

    def view(self) -> Tensor:
        """Return the elements, which stay in memory as long as they are referred to; writing writes the state."""


class StateFragment(NamedTuple):
    """A contiguous run of one parameter's state on this rank.

    It has the elements [start, stop) of the row-major flattened local tensor (`spec.local_shape`).
    """

    spec: ParamSpec
    kind: StateKind
    start: int
    stop: int
    source: Tensor | StateElsewhere

    @property
    def tensor(self) -> Tensor:
        """The elements, one-dimensional; writing to them writes the state."""
        return self.source if isinstance(self.source, Tensor) else self.source.view()

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the elements."""
        return self.source.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return (self.stop - self.start) * self.dtype.itemsize


def attach_spec(parameter: nn.Parameter, spec: ParamSpec) -> nn.Parameter:
    """Attach a spec to `parameter` (the layer that makes it has the slice, but not yet the name)."""
    setattr(parameter, _ATTRIBUTE, spec)
    return parameter


def share_between_ends(parameter: nn.Parameter) -> None:
    """Mark a parameter that the first and the last pipeline stage both have, each with a part of its gradient."""
    spec: ParamSpec = getattr(parameter, _ATTRIBUTE)
    attach_spec(parameter, replace(spec, summed_over=(*spec.summed_over, ENDS)))


def mark_block(module: nn.Module) -> None:
    """Mark the parameters of a block that is compiled as a whole: autograd gets their gradients all at once."""
    for parameter in module.parameters():
        attach_spec(parameter, replace(spec_of("", parameter), arrives_with_block=True))


def mark_alone(parameters: Iterable[nn.Parameter]) -> None:
    """Mark parameters of which `.grad` stays empty between passes: gradients are moved to where they are stored."""
    for parameter in parameters:
        attach_spec(parameter, replace(spec_of("", parameter), arrives_alone=True))


def spec_of(name: str, parameter: nn.Parameter) -> ParamSpec:
    """Return a parameter's spec, under `name`; without one it is whole, replicated, and decayed if a matrix."""
    shape = tuple(parameter.shape)
    default = ParamSpec(name, shape, shape, (0,) * len(shape), decay=parameter.ndim > 1)
    spec: ParamSpec = getattr(parameter, _ATTRIBUTE, default)
    return replace(spec, name=name, trainable=parameter.requires_grad)


def named_specs(model: nn.Module) -> Iterator[tuple[ParamSpec, nn.Parameter]]:
    """Yield every distinct parameter of `model` with its spec, in registration order; a tied parameter comes once."""
    for name, parameter in model.named_parameters():
        yield spec_of(name, parameter), parameter
