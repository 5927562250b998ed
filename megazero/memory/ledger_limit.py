"""A limit to the bytes alive on a device, and the error that exceeding it raises.  Pure.

The limit raises once a step: code that still runs while its error ends the step (hooks, clean-up) is not stopped.
"""

from collections.abc import Mapping, Sequence

from megazero.errors import MemoryLimitError, Problem
from megazero.memory.ledger_figures import Category, Phase
from megazero.units import format_bytes

MIB = 1 << 20

_WOULD_HELP = (
    "a smaller --micro-batch-size, --recompute-granularity full, a higher --zero-stage or"
    " --tensor-model-parallel-size, a higher --ledger-limit"
)


class MemoryLimit:
    """A limit of `nbytes` bytes alive at once; a ledger's changes are added up as they come."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._live = 0
        self._num_added = 0
        self._is_reported = False

    def start(self, live: int) -> None:
        """Begin a step with so many bytes alive, and without changes."""
        self._live, self._num_added, self._is_reported = live, 0, False

    def is_newly_exceeded(self, changes: Sequence[tuple[int, object, int]]) -> bool:
        """Return True if the step's changes so far, bytes first, exceed the limit for the first time in this step."""
        new = changes[self._num_added :]
        self._num_added += len(new)
        self._live += sum(change[0] for change in new)
        exceeded = self._live > self.nbytes and not self._is_reported
        self._is_reported = self._is_reported or exceeded
        return exceeded


def limit_error(limit_bytes: int, live: Mapping[Category, int], during: Phase | None) -> MemoryLimitError:
    """Return the error; live: bytes by category at this moment, during: the phase of the step, if it is in one."""
    fullest = sorted(((nbytes, name) for name, nbytes in live.items() if nbytes), reverse=True)
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(nbytes)}" for nbytes, name in fullest)
    where = "" if during is None else f" in {during}"
    total = sum(live.values())
    given = f"{format_bytes(total)} alive{where}: {parts}"
    rule = f"--ledger-limit {limit_bytes / MIB:.6g} (MiB) is the most that may be alive on a process's device"
    rule += f"; {total - limit_bytes} bytes are too many"
    return MemoryLimitError(Problem(given, rule, _WOULD_HELP))
