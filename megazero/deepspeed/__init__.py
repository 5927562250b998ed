"""DeepSpeed's names over megazero's engine, for training scripts that change their imports alone.

    import megazero.deepspeed as deepspeed

`docs/deepspeed.md` lists what is there.  Each name is imported from its module when it is first used; a name that is
not there raises MissingNameError, with the reason where there is one.
"""

from importlib import import_module
from types import MappingProxyType
from typing import Any

__version__ = "0.19.6"
"""The version of DeepSpeed whose names and meanings are followed, by which programs choose between its calls."""

_MODULES = MappingProxyType(
    {
        "DeepSpeedEngine": "megazero.deepspeed.deepspeed_engine",
        "add_config_arguments": "megazero.deepspeed.arguments",
        "get_accelerator": "megazero.deepspeed.accelerator",
        "init_distributed": "megazero.deepspeed.comm",
        "initialize": "megazero.deepspeed.start",
        "install_as_deepspeed": "megazero.deepspeed.install",
        "log_dist": "megazero.deepspeed.utils",
        "logger": "megazero.deepspeed.utils",
    }
)
# {module or package: a module of it, whose import makes all of its names available}
_PACKAGES = MappingProxyType(
    {
        "accelerator": "megazero.deepspeed.accelerator",
        "checkpointing": "megazero.deepspeed.checkpointing",
        "comm": "megazero.deepspeed.comm",
        "moe": "megazero.deepspeed.moe.layer",
        "ops": "megazero.deepspeed.ops.adam",
        "pipe": "megazero.deepspeed.pipe",
        "runtime": "megazero.deepspeed.runtime.lr_schedules",
        "utils": "megazero.deepspeed.utils",
        "zero": "megazero.deepspeed.zero",
    }
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in _PACKAGES:
        import_module(_PACKAGES[name])
        return import_module(f"{__name__}.{name}")
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise import_module("megazero.deepspeed.missing").missing_name(name)


def __dir__() -> list[str]:
    return sorted({*_MODULES, *_PACKAGES})
