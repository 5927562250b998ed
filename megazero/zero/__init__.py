"""ZeRO data parallelism: one engine for every stage.

The names below are for users of the library, who may write `megazero.zero.GatheredParameters`; each is imported from
its module when it is first used.
"""

from importlib import import_module
from types import MappingProxyType
from typing import Any

_MODULES = MappingProxyType(
    {
        "GatheredParameters": "megazero.zero.parameters.gathered",
        "Init": "megazero.library.partitioned_init.init",
        "TiledLinear": "megazero.library.module.tiled_linear",
        "get_z3_leaf_modules": "megazero.library.module.leaf_modules",
        "register_external_parameter": "megazero.zero.parameters.gathered",
        "safe_get_full_fp32_param": "megazero.library.state.access",
        "safe_get_full_grad": "megazero.library.state.access",
        "safe_get_full_optimizer_state": "megazero.library.state.access",
        "safe_get_local_fp32_param": "megazero.library.state.access",
        "safe_get_local_grad": "megazero.library.state.access",
        "safe_get_local_optimizer_state": "megazero.library.state.access",
        "safe_set_full_fp32_param": "megazero.library.state.access",
        "safe_set_full_grad": "megazero.library.state.access",
        "safe_set_full_optimizer_state": "megazero.library.state.access",
        "safe_set_local_fp32_param": "megazero.library.state.access",
        "safe_set_local_grad": "megazero.library.state.access",
        "safe_set_local_optimizer_state": "megazero.library.state.access",
        "set_z3_leaf_module": "megazero.library.module.leaf_modules",
        "set_z3_leaf_modules": "megazero.library.module.leaf_modules",
        "set_z3_leaf_modules_by_name": "megazero.library.module.leaf_modules",
        "set_z3_leaf_modules_by_suffix": "megazero.library.module.leaf_modules",
        "unset_z3_leaf_modules": "megazero.library.module.leaf_modules",
        "z3_leaf_module": "megazero.library.module.leaf_modules",
        "z3_leaf_parameter": "megazero.library.module.leaf_modules",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
