"""Records the history of a GPU's allocations, as torch's viewer of memory (pytorch.org/memory_viz) reads it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megazero.errors import first_line

# The newest allocations and releases that are kept, of some kilobytes each.
MAX_ENTRIES = 100_000

_record: Callable[..., Any] = torch.cuda.memory._record_memory_history
_write: Callable[..., Any] = torch.cuda.memory._dump_snapshot


class MemoryHistory:
    """The history of this process's allocations on CUDA, with the lines of the program that made them."""

    def __init__(self, path: Path) -> None:
        """Begin to record; path: the file of the snapshot."""
        self._path = path
        _record(max_entries=MAX_ENTRIES, stacks="python")

    def close(self) -> str:
        """Write the snapshot and record no more; return a line about it.

        One that cannot be written ends no run: standard error has a line about it, on any rank.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write(str(self._path))
        except (OSError, RuntimeError) as error:
            print(f"no snapshot of memory {self._path}: {first_line(error)}", file=sys.stderr, flush=True)
            return ""
        finally:
            _record(enabled=None)
        return f"snapshot of memory: {self._path}"


def snapshot_of(path: Path, rank: int, ranks: int) -> Path:
    """Return the file of a rank's snapshot: `path` where one rank writes, else with the rank before its suffix."""
    return path if ranks == 1 else path.with_name(f"{path.stem}_rank{rank:04d}{path.suffix}")
