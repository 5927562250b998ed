"""Observes the constructors of modules: which are running, and which torch functions they call.

`ConstructorCalls` is a mode of one thread, which calls the methods of a `ConstructionHooks` (`init.py` has one).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from megazero.zero.parameters.guard import PartitionedParameter

# Functions with which modules allocate new parameters.
_ALLOCATING = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.tensor})


class ConstructionHooks(Protocol):
    """Callbacks around the torch functions that constructors of modules call."""

    def release_unused(self) -> None:
        """Release the parameters that need not be whole any more; called before memory is allocated."""

    def call_ended(self) -> None:
        """Release the parameters gathered for a call; called after a torch function with guarded parameters returns."""


class ConstructorCalls(TorchFunctionMode):
    """A function mode that calls the hooks before allocations and around torch functions with guarded parameters."""

    def __init__(self, hooks: ConstructionHooks) -> None:
        super().__init__()
        self.hooks = hooks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        has_guarded = PartitionedParameter in types
        if has_guarded or func in _ALLOCATING:
            with torch._C.DisableTorchFunction():
                self.hooks.release_unused()
        result = func(*args, **(kwargs or {}))
        if has_guarded:
            with torch._C.DisableTorchFunction():
                self.hooks.call_ended()
                if isinstance(result, torch.Tensor) and is_running(nn.Parameter.__new__):
                    result.__class__ = nn.Parameter  # `nn.Parameter(guarded)` must return this class
        return result


def innermost() -> ConstructionHooks | None:
    """Return the hooks of the innermost active `ConstructorCalls` of this thread, or None if there is none."""
    active_modes: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack
    return next((mode.hooks for mode in reversed(active_modes()) if isinstance(mode, ConstructorCalls)), None)


def under_construction() -> set[int]:
    """Return the identities of the objects whose constructors are running."""
    running = [frame for frame in _frames() if frame.f_code.co_name == "__init__" and frame.f_code.co_argcount]
    return {id(frame.f_locals.get(frame.f_code.co_varnames[0])) for frame in running}


def is_running(function: Callable[..., Any]) -> bool:
    """Return True if a Python function is being executed in this thread."""
    return any(frame.f_code is function.__code__ for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
