"""Guarded parameters: every use of a partitioned parameter's values is caught.

While its unit is not in use, a partitioned parameter keeps its identity, shape and dtype, but computing with it would
read memory that is not allocated, or is about to be freed.  So its class is exchanged for `PartitionedParameter`, which
intercepts every torch function on it, and set back when the unit is used: computing with gathered parameters costs
nothing extra.  torch's own `UninitializedParameter` works in the same way.

A *touch* is a torch function that would read or write the values.  It calls the parameter's owner: inside a forward or
a backward the engine gathers the unit (that is how parameters used outside their module are found), elsewhere it raises
an error with the remedy.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from types import MethodWrapperType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

_ATTRIBUTE = "zero_handle"
_T = TypeVar("_T", bound=Tensor)

# Attributes that return the values under another name.
_ALIASES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
# Functions that read only what a partitioned parameter still has.
_HARMLESS = frozenset(
    {
        *(
            "numel",
            "nelement",
            "size",
            "dim",
            "ndimension",
            "stride",
            "element_size",
            "get_device",
            "untyped_storage",
            "__hash__",
        ),
        *("is_contiguous", "is_floating_point", "is_complex", "requires_grad_"),
        *("register_hook", "register_post_accumulate_grad_hook"),
    }
)


class ParameterOwner(Protocol):
    """The owner of parameters' values: an engine, or `Init` before there is one."""

    def touched(self, name: str, call: str) -> None:
        """Make parameter `name` whole and unguarded, for `call`; or raise."""

    def lists_partitioned(self) -> bool:
        """Return True if `detach`, of which a state_dict consists, returns another guarded parameter."""

    def gather(self, names: Iterable[str], why: str, *, is_modified: bool) -> None:
        """Gather the parameters, and pin them until `release`; a collective call.

        is_modified: whether `release` stores their values.
        """

    def check_unchanged(self, names: Iterable[str]) -> None:
        """Raise UsageError if a rank has changed gathered parameters, where that is checked; a collective call then."""

    def release(self, names: Iterable[str], *, modifier_rank: int | None) -> None:
        """Unpin the parameters; with modifier_rank store their values on that rank on every rank first."""

    def register_external(self, module: nn.Module, name: str) -> None:
        """Gather parameter `name` for `module`'s forward too."""


class WatchedValues:
    """The tensor of which a parameter's `.data` returns views, and the number of writes to those that it has returned.

    The first tensor may be swapped for others and come back, as in an evaluation with averaged weights: what is written
    to it meanwhile counts when it is back, and what is written to the others while they are in its place.
    """

    def __init__(self, first: Tensor) -> None:
        self._first = self.tensor = first
        self._begun = self._left = first._version
        self._earlier = 0

    @property
    def writes(self) -> int:
        return self._earlier + self.tensor._version - self._begun

    def assign(self, tensor: Tensor) -> None:
        """Let `.data` return views of another tensor, which has the version counter of what was assigned."""
        self._earlier = self.writes
        if self._is_first():
            self._left = self._first._version
        self.tensor, self._begun = tensor, tensor._version
        if self._is_first():
            self._earlier += self._first._version - self._left

    def _is_first(self) -> bool:
        return self.tensor.data_ptr() == self._first.data_ptr()


@dataclass
class ParameterHandle:
    """The link from a parameter to the owner of its state, an attribute of the parameter; copies have None for it.

    values: what `.data` has returned, and how often that was written to (`written.py`); None before `.data` is read.
    """

    name: str
    owner: ParameterOwner
    whole_class: type[nn.Parameter]
    values: WatchedValues | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return None in pickles and copies: another parameter has no owner, and process groups can't be copied."""
        return type(None), ()


class ParamStatus(Enum):
    """DeepSpeed's words for what a parameter holds; here a parameter that holds its values has no status."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class PartitionedParameter(nn.Parameter):
    """A parameter whose values must not be read now.

    Its `ds_...` attributes are DeepSpeed's, by which programs find the parameters that they have to gather.
    """

    @property
    def ds_id(self) -> int:
        """A number that no other parameter of this process has."""
        return id(self)

    @property
    def ds_status(self) -> ParamStatus:
        """The status of a parameter whose values are partitioned."""
        return ParamStatus.NOT_AVAILABLE

    @property
    def ds_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return tuple(self.shape)

    @property
    def ds_numel(self) -> int:
        """The number of elements of the whole parameter."""
        return self.numel()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call, arguments = name_of(func), dict(kwargs or {})
        if call == "__repr__":
            self = args[0]
            handle = handle_of(self)
            name = "" if handle is None else handle.name
            return f"PartitionedParameter({name}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"
        if not _reads_values(func, call):
            call_torch: Callable[..., Any] = super().__torch_function__
            return call_torch(func, types, args, arguments)
        for parameter in instances_in((args, arguments), PartitionedParameter):
            handle = handle_of(parameter)
            assert handle is not None, "a guarded parameter has a handle"
            if call == "detach" and handle.owner.lists_partitioned():
                return _listed(parameter, handle)
            handle.owner.touched(handle.name, call)
        return func(*args, **arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Gather and copy: a copy has values and no owner, so it is of the whole parameter's class."""
        handle = handle_of(self)
        if handle is not None:
            handle.owner.touched(handle.name, "deepcopy")
        assert type(self) is not PartitionedParameter, "a touched parameter is whole"
        return deepcopy(self, memo)


def attach_handle(parameter: nn.Parameter, name: str, owner: ParameterOwner) -> None:
    """Attach a parameter to its owner, in place of an earlier one."""
    before = handle_of(parameter)
    whole_class = type(parameter) if before is None else before.whole_class
    setattr(parameter, _ATTRIBUTE, ParameterHandle(name, owner, whole_class))


def handle_of(parameter: nn.Parameter) -> ParameterHandle | None:
    """Return the handle of a parameter, None if it has no owner."""
    return getattr(parameter, _ATTRIBUTE, None)


def detach_handle(parameter: nn.Parameter) -> None:
    """Make the parameter an ordinary one: unguarded and without an owner."""
    unguard(parameter)
    if handle_of(parameter) is not None:
        delattr(parameter, _ATTRIBUTE)


def guard(*parameters: nn.Parameter) -> None:
    """Make touches call the owner."""
    for parameter in parameters:
        parameter.__class__ = PartitionedParameter


def unguard(*parameters: nn.Parameter) -> None:
    """Make the values readable without a call of the owner."""
    for parameter in parameters:
        handle: ParameterHandle | None = getattr(parameter, _ATTRIBUTE, None)
        is_guarded = type(parameter) is PartitionedParameter
        if handle is not None and is_guarded:
            parameter.__class__ = handle.whole_class


def _listed(parameter: nn.Parameter, handle: ParameterHandle) -> Tensor:
    """Return a guarded parameter that stands for another one in a state_dict: it has its shape and no values."""
    with torch._C.DisableTorchFunctionSubclass():
        listed = parameter.detach().as_subclass(PartitionedParameter)
    setattr(listed, _ATTRIBUTE, handle)
    return listed


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function, or of the attribute that a getter or setter is for."""
    if isinstance(func, MethodWrapperType):
        return str(getattr(func.__self__, "__name__", func))
    return str(getattr(func, "__name__", func))


def _reads_values(func: Callable[..., Any], call: str) -> bool:
    if func.__class__.__name__ == "method-wrapper":
        return call in _ALIASES
    return call not in _HARMLESS


def instances_in(value: Any, of_class: type[_T]) -> Iterator[_T]:
    """Yield the instances of a class of tensors among a call's arguments, however nested in lists and mappings."""
    if isinstance(value, of_class):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from instances_in(item, of_class)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from instances_in(item, of_class)
