"""The modules of DeepSpeed's that programs import, and the modules of `megazero.deepspeed` that take their places."""

import sys
from importlib import import_module
from types import MappingProxyType, ModuleType

PACKAGE = "megazero.deepspeed"
# {module of DeepSpeed's, below deepspeed: the module that takes its place, below megazero.deepspeed}
_PLACES = MappingProxyType(
    {
        **{
            name: name
            for name in (
                *("accelerator", "checkpointing", "comm", "moe", "moe.layer", "moe.utils", "ops", "ops.adam", "pipe"),
                *("runtime", "runtime.lr_schedules", "runtime.utils", "utils", "utils.zero_to_fp32", "zero"),
            )
        },
        "checkpoint.utils": "utils",
        "runtime.activation_checkpointing.checkpointing": "checkpointing",
        "runtime.dataloader": "data",
        "runtime.engine": "deepspeed_engine",
        "runtime.pipe": "pipe",
        "runtime.pipe.module": "pipe",
        "runtime.pipe.topology": "pipe",
        "runtime.zero": "zero",
        "runtime.zero.config": "zero",
        "runtime.zero.offload_config": "zero",
        "runtime.zero.partition_parameters": "zero",
        "runtime.zero.stage3": "zero",
        "runtime.zero.stage_1_and_2": "zero",
        "runtime.zero.tiling": "zero",
    }
)


def put_modules(root: str, *, below: str = "") -> None:
    """Make the modules that take a place importable as ROOT.PLACE; below: only those whose place is below this one."""
    for name, place in _PLACES.items():
        if name.startswith(f"{below}." if below else "") and f"{root}.{name}" != f"{PACKAGE}.{place}":
            _put(root, name, import_module(f"{PACKAGE}.{place}"))


def _put(root: str, name: str, module: ModuleType) -> None:
    """Make `module` importable as ROOT.NAME; a package on the way that is not there becomes an empty module."""
    parent, path = sys.modules[root], root
    *packages, last = name.split(".")
    for package in packages:
        path = f"{path}.{package}"
        setattr(parent, package, sys.modules.setdefault(path, ModuleType(path, "A package of DeepSpeed's.")))
        parent = sys.modules[path]
    setattr(parent, last, module)
    sys.modules[f"{path}.{last}"] = module
