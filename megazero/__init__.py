"""megazero: pretraining with tensor parallelism and ZeRO data parallelism.  Importing it does nothing.

    megazero.initialize(model, config)     an engine around any torch.nn.Module
    megazero.recompute(function, *args)    calls a function whose activations are computed again in backward
    megazero.lora(model, rank=8)           gives linear layers adapters and freezes the rest; merge_lora(state) merges
    megazero.StopRequest()                 a flag that is raised when the process is asked to end (SIGTERM, Ctrl-C, ...)
    megazero.plan(make, config, batch, world_size=64)   what training a module would take: memory, traffic and time
    megazero.verify_module(make, loss, batches, config)   trains a module beside plain PyTorch, and compares the two
    megazero.zero                          Init, GatheredParameters, ... (megazero/zero/__init__.py)

Public names are imported when they are first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["StopRequest", "initialize", "lora", "merge_lora", "plan", "recompute", "verify_module", "zero"]


def __getattr__(name: str) -> Any:
    if name == "StopRequest":
        return import_module("megazero.signals").StopRequest
    if name == "initialize":
        return import_module("megazero.library.initialize").initialize
    if name in ("lora", "merge_lora"):
        return getattr(import_module("megazero.library.module.lora"), name)
    if name == "plan":
        return import_module("megazero.planner.module").plan
    if name == "recompute":
        return import_module("megazero.activations.context").recompute
    if name == "verify_module":
        return import_module("megazero.verify.module").verify_module
    if name == "zero":
        return import_module("megazero.zero")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
