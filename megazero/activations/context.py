"""`megazero.recompute(function, *args)` for code that is handed no settings: those of the engine whose forward runs.

A model's code is called by its engine and knows nothing of it, so the settings reach it by a context variable, which
has a value only inside an engine's forward, of the thread that runs it, like autograd's own modes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megazero.activations.recompute import Recomputation
from megazero.generators import DefaultGenerators

_CURRENT: ContextVar[Recomputation | None] = ContextVar("recomputation", default=None)


def recompute(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), whose activations are computed again in backward instead of being kept.

    Any arguments and results.  What is kept is the tensors among the arguments (as the engine's `activations` section,
    or DeepSpeed's `activation_checkpointing`, says), the random states and autocast.  The function must do the same in
    both runs and leave its inputs as they are: UsageError in backward where it is seen not to.  With
    partition_activations, floating-point inputs must be the same on every tensor-parallel rank.
    """
    settings = _CURRENT.get() or Recomputation(random=DefaultGenerators(_device((args, kwargs))))
    return settings.run(function, *args, **kwargs)


@contextmanager
def recomputing(settings: Recomputation) -> Iterator[None]:
    """A forward, in which `recompute` does as `settings` says."""
    settings.checkpoints.begin_pass()
    token = _CURRENT.set(settings)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _device(arguments: Any) -> torch.device:
    """Where the function's random numbers may come from besides the CPU."""
    devices = [leaf.device for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_cuda]
    if devices:
        return devices[0]
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
