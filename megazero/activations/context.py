"""The public `megazero.recompute`, whose settings are those of the engine whose forward runs.

A model's code is called by its engine but has no reference to it, so the settings are passed in a context variable,
which is set only inside an engine's forward and in the thread that runs it, like autograd's own modes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megazero.activations.recompute import Recomputation
from megazero.generators import DefaultGenerators

_CURRENT: ContextVar[Recomputation | None] = ContextVar("recomputation", default=None)
_CONFIGURED: ContextVar[Recomputation | None] = ContextVar("configured_recomputation", default=None)


def recompute(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call function(*args, **kwargs); its activations are computed again in backward instead of being retained.

    Arguments and results may be of any type.  Retained are the tensors among the arguments (stored as the engine's
    `activations` section, or DeepSpeed's `activation_checkpointing`, sets), the random states and autocast.  The
    function must do the same in both runs and must not write to its inputs: backward raises UsageError where it detects
    a difference.  With partition_activations, floating-point inputs must be the same on every tensor-parallel rank.
    """
    settings = _CURRENT.get() or _CONFIGURED.get() or Recomputation(random=DefaultGenerators(_device((args, kwargs))))
    return settings.run(function, *args, **kwargs)


def configure_recomputation(settings: Recomputation | None) -> None:
    """Make this thread's `recompute` use `settings`, also in engines' forwards; None: the engine's, or plain ones."""
    _CONFIGURED.set(settings)


def configured_recomputation() -> Recomputation | None:
    """Return what this thread has been configured with."""
    return _CONFIGURED.get()


@contextmanager
def recomputing(settings: Recomputation) -> Iterator[None]:
    """Run a forward in which `recompute` uses `settings`, or those that this thread has been configured with."""
    if (configured := _CONFIGURED.get()) is not None:
        settings = replace(configured, stopwatch=settings.stopwatch)
    settings.checkpoints.begin_pass()
    token = _CURRENT.set(settings)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _device(arguments: Any) -> torch.device:
    """Return the device whose random state is restored beside the CPU's."""
    devices = [leaf.device for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_cuda]
    if devices:
        return devices[0]
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
