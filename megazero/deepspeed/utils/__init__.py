"""DeepSpeed's `deepspeed.utils`: accessors of a parameter's state, marks of leaf modules, and a logger.

The accessors and the marks are those of `megazero.zero`.  Each name is imported from its module when it is first used.
"""

from importlib import import_module
from typing import Any

_TOOLS = frozenset({"clone_tensors_for_torch_save", "log_dist", "logger", "safe_update_full_grad_vectorized"})
_LOADER = "RepeatingLoader"


def __getattr__(name: str) -> Any:
    if name in _TOOLS:
        return getattr(import_module(f"{__name__}.tools"), name)
    if name == _LOADER:
        return import_module("megazero.deepspeed.data").RepeatingLoader
    if name in __dir__():
        return getattr(import_module("megazero.zero"), name)
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise import_module("megazero.deepspeed.missing").missing_name(name, __name__)


def __dir__() -> list[str]:
    shared = (name for name in dir(import_module("megazero.zero")) if name.startswith("safe_") or "z3_leaf" in name)
    return sorted({*_TOOLS, _LOADER, *shared})
