"""Parameters that notice being touched.

While its unit is not in use, a partitioned parameter keeps its identity, shape and dtype, but computing with it would
read memory that is not there, or is about to go.  So its class is exchanged for `PartitionedParameter`, through which
every torch function on it comes by, and set back when the unit is used: computing with gathered parameters costs
nothing extra.  torch's own `UninitializedParameter` works in the same way.

A *touch* is a torch function that would read or write the values.  What it leads to is the owner's business: inside a
forward or a backward the unit is gathered (that is how parameters used outside their module are found), elsewhere it is
an error that says what to do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_ATTRIBUTE = "zero_handle"

# Attributes that hand out the values under another name.
_ALIASES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
# Functions that read only what stays.
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


class Owner(Protocol):
    """Who keeps the values of parameters: an engine, or `Init` before there is one."""

    def touched(self, name: str, call: str) -> None:
        """Make parameter `name` whole and unguarded, for `call`; or raise."""

    def hold(self, names: Iterable[str], why: str) -> None:
        """Make the parameters whole until `hand_back`; a collective call."""

    def hand_back(self, names: Iterable[str], *, modifier_rank: int | None) -> None:
        """Take the parameters back; with modifier_rank every rank keeps what they are on that rank now."""

    def register_external(self, module: nn.Module, name: str) -> None:
        """Parameter `name` is read by `module`'s forward too."""


@dataclass(frozen=True)
class ParameterHandle:
    """What leads from a parameter to the engine that keeps its state; the parameter's one attribute beside its spec."""

    name: str
    owner: Owner
    whole_class: type[nn.Parameter]


class PartitionedParameter(nn.Parameter):
    """A parameter whose values are not to be read now."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call, arguments = _name_of(func), dict(kwargs or {})
        if not _reads_values(func, call):
            return super().__torch_function__(func, types, args, arguments)  # type: ignore[no-untyped-call]
        for parameter in _guarded_in((args, arguments)):
            handle = handle_of(parameter)
            assert handle is not None, "a guarded parameter has a handle"
            handle.owner.touched(handle.name, call)
        return func(*args, **arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy has values, and nobody who would gather them: it is of the whole parameter's class."""
        handle = handle_of(self)
        if handle is not None:
            handle.owner.touched(handle.name, "deepcopy")
        assert type(self) is not PartitionedParameter, "whoever was touched is whole now"
        return deepcopy(self, memo)

    def __repr__(self) -> str:  # type: ignore[override]
        handle = handle_of(self)
        name = "" if handle is None else handle.name
        return f"PartitionedParameter({name}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def give_handle(parameter: nn.Parameter, name: str, owner: Owner) -> None:
    """Connect a parameter with its owner; a parameter that had another one changes hands."""
    before = handle_of(parameter)
    whole_class = type(parameter) if before is None else before.whole_class
    setattr(parameter, _ATTRIBUTE, ParameterHandle(name, owner, whole_class))


def handle_of(parameter: nn.Parameter) -> ParameterHandle | None:
    """The handle of a parameter, None if no engine has taken it over."""
    return getattr(parameter, _ATTRIBUTE, None)


def take_handle(parameter: nn.Parameter) -> None:
    """Leave the parameter as if there had never been an engine."""
    unguard(parameter)
    if handle_of(parameter) is not None:
        delattr(parameter, _ATTRIBUTE)


def guard(parameter: nn.Parameter) -> None:
    """Touches come to the owner from here on.  Fake tensors have no values to guard."""
    if not isinstance(parameter, FakeTensor):
        parameter.__class__ = PartitionedParameter


def unguard(parameter: nn.Parameter) -> None:
    """The values may be read."""
    handle = handle_of(parameter)
    if handle is not None and type(parameter) is PartitionedParameter:
        parameter.__class__ = handle.whole_class  # type: ignore[assignment]


def _name_of(func: Callable[..., Any]) -> str:
    """The name of a function, or of the attribute that a getter or setter is for."""
    if func.__class__.__name__ == "method-wrapper":
        return str(func.__self__.__name__)  # type: ignore[attr-defined]
    return str(getattr(func, "__name__", func))


def _reads_values(func: Callable[..., Any], call: str) -> bool:
    if func.__class__.__name__ == "method-wrapper":
        return call in _ALIASES
    return call not in _HARMLESS


def _guarded_in(value: Any) -> Iterator[PartitionedParameter]:
    """Guarded parameters among a call's arguments, however nested in lists and mappings."""
    if isinstance(value, PartitionedParameter):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _guarded_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _guarded_in(item)
