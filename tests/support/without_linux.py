"""A program that takes away what Linux alone has, and then runs `megazero COMMAND ...` as other systems would.

Processes that it starts, and workers that import it, are without these too.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

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

if __name__ == "__main__":
    for module, path in MISSING_PATHS.items():
        found = import_module(f"megazero.{module}")
        assert isinstance(getattr(found, path), Path)
        setattr(found, path, Path("/none"))
    sys.exit(import_module("megazero.command").run())
