"""Keeps torch.compile out of functions that move memory between the operations of a compiled model.

Traced, a hook that gathers parameters would be compiled again for every unit and state, until torch gives up and runs
the model without compilation.
"""

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar, cast

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., object])


def eagerly(function: F) -> F:
    """Return the function, which torch.compile calls between two graphs as it is, with all that it calls.

    torch.compiler.disable does the same, but imports the compiler, which takes a second, and adds a call.
    """
    code = cast(FunctionType, function).__code__
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    function.__dict__["_torchdynamo_disable"] = True  # where it would be inlined
    return function
