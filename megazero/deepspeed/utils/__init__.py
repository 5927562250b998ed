"""DeepSpeed's `deepspeed.utils`: accessors of a parameter's state, marks of leaf modules, and a logger.

Each name is imported from its module when it is first used.
"""

from importlib import import_module
from types import MappingProxyType
from typing import Any

_MODULES = MappingProxyType(
    {
        "clone_tensors_for_torch_save": "megazero.deepspeed.utils.tools",
        "get_z3_leaf_modules": "megazero.library.leaf_modules",
        "log_dist": "megazero.deepspeed.utils.tools",
        "logger": "megazero.deepspeed.utils.tools",
        "safe_get_full_fp32_param": "megazero.library.access",
        "safe_get_full_grad": "megazero.library.access",
        "safe_get_full_optimizer_state": "megazero.library.access",
        "safe_get_local_fp32_param": "megazero.library.access",
        "safe_get_local_grad": "megazero.library.access",
        "safe_get_local_optimizer_state": "megazero.library.access",
        "safe_set_full_fp32_param": "megazero.library.access",
        "safe_set_full_grad": "megazero.library.access",
        "safe_set_full_optimizer_state": "megazero.library.access",
        "safe_set_local_fp32_param": "megazero.library.access",
        "safe_set_local_grad": "megazero.library.access",
        "safe_set_local_optimizer_state": "megazero.library.access",
        "safe_update_full_grad_vectorized": "megazero.deepspeed.utils.tools",
        "set_z3_leaf_module": "megazero.library.leaf_modules",
        "set_z3_leaf_modules": "megazero.library.leaf_modules",
        "set_z3_leaf_modules_by_name": "megazero.library.leaf_modules",
        "set_z3_leaf_modules_by_suffix": "megazero.library.leaf_modules",
        "unset_z3_leaf_modules": "megazero.library.leaf_modules",
        "z3_leaf_module": "megazero.library.leaf_modules",
        "z3_leaf_parameter": "megazero.library.leaf_modules",
    }
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise import_module("megazero.deepspeed.missing").missing_name(name, __name__)


def __dir__() -> list[str]:
    return sorted(_MODULES)
