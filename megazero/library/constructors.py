"""What constructors of modules are doing: which are running, and which torch functions they call.

A *keeper* looks after the parameters that are made while its mode is active in a thread (`zero_init.py`).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from megazero.zero.guard import PartitionedParameter

# Functions with which modules ask for the memory of new parameters.
_ASKS_FOR_MEMORY = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.tensor})


class Keeper(Protocol):
    """Who keeps the parameters of modules that are being made."""

    def settle(self) -> None:
        """Memory is about to be needed: put away what is whole for no reason any more."""

    def call_ended(self) -> None:
        """A torch function has been called with guarded parameters, and is done."""


class CallsOfConstructors(TorchFunctionMode):
    """Tells the keeper where calls begin and end, among all torch functions that are called while it is active."""

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self.keeper = keeper

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        touches = PartitionedParameter in types
        if touches or func in _ASKS_FOR_MEMORY:
            with torch._C.DisableTorchFunction():
                self.keeper.settle()
        result = func(*args, **(kwargs or {}))
        if touches:
            with torch._C.DisableTorchFunction():
                self.keeper.call_ended()
                if isinstance(result, torch.Tensor) and is_running(nn.Parameter.__new__):
                    result.__class__ = nn.Parameter  # of `nn.Parameter(guarded)`, which wants its argument's class back
        return result


def innermost() -> Keeper | None:
    """The keeper whose mode was activated last in this thread, and still is."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((mode.keeper for mode in reversed(stack) if isinstance(mode, CallsOfConstructors)), None)


def in_the_making() -> set[int]:
    """Identities of the objects whose constructors are running."""
    running = [frame for frame in _frames() if frame.f_code.co_name == "__init__" and frame.f_code.co_argcount]
    return {id(frame.f_locals.get(frame.f_code.co_varnames[0])) for frame in running}


def is_running(function: Callable[..., Any]) -> bool:
    """Whether a Python function is being executed in this thread."""
    return any(frame.f_code is function.__code__ for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
