"""A program that takes away what Linux alone has, and then runs `megazero COMMAND ...` as other systems would.

Processes that it starts, and workers that import it, are without these too.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
MISSING_MODULES = ("fcntl", "resource")
MISSING_CALLS = (
    *("O_DIRECT", "memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate"),
    *("sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "sched_setscheduler", "SCHED_BATCH"),
)
# {module: the name that it has for a path of Linux's}
MISSING_PATHS = {"owner": "_PROCESSES", "operating_system": "_QUOTA", "tensor_parallel.onednn": "_PROCESSOR"}

for missing in MISSING_MODULES:
    sys.modules[missing] = None
for missing in MISSING_CALLS:
    if hasattr(os, missing):
        delattr(os, missing)


def take_away(module: ModuleType) -> None:
    """Let a module find nothing in its path of Linux's."""
    path = MISSING_PATHS[module.__name__.removeprefix("megazero.")]
    assert isinstance(getattr(module, path), Path)
    setattr(module, path, Path("/none"))


class TakingAway(MetaPathFinder):
    """Takes the paths away from modules that the program imports, and imports none that it does not."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.removeprefix("megazero.") not in MISSING_PATHS:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            take_away(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    for name in MISSING_PATHS:
        if f"megazero.{name}" in sys.modules:
            take_away(sys.modules[f"megazero.{name}"])
    sys.meta_path.insert(0, TakingAway())
    sys.exit(import_module("megazero.command").run())
