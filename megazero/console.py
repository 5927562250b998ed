"""Printing of a run: lines of rank 0 only, and progress for anything that takes longer than five seconds.

Only the process with rank 0 prints; every other one is silent unless it has an error of its own.
"""

import errno
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TextIO, TypeVar

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from megazero.errors import UserError

T = TypeVar("T")

_SILENCE_SECONDS = 5.0


# The variables of torchrun, Open MPI's mpirun (which may itself run under Slurm), srun, and the mpirun of MPICH.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")


def launcher_rank() -> int:
    """Return this process's rank from its launcher; 0 when started by hand, or when that is no number."""
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    return int(rank) if rank.isdecimal() else 0


class Console:
    """A printer of lines on one rank only."""

    def __init__(self, rank: int | None = None) -> None:
        self.rank = launcher_rank() if rank is None else rank
        self.prints = self.rank == 0
        # A pipe has no width: rich would wrap log lines at 80 columns, which grep could not search.
        width = None if sys.stdout.isatty() else 10_000
        self._rich = RichConsole(highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)

    def line(self, text: str = "") -> None:
        """Print one line (or several, joined by newlines) on the printing rank."""
        if not self.prints:
            return
        try:
            self._rich.print(text)
            sys.stdout.flush()
        except OSError as error:
            # The terminal or the pipe's reader is gone: no reason to lose a run, which prints nothing from here on.
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            self.prints = False
            _discard(sys.stdout)

    def notice(self, text: str) -> None:
        """Print a line that is no part of a program's output, to stderr, on the printing rank."""
        if self.prints:
            with suppress(OSError):  # its reader is gone
                print(text, file=sys.stderr, flush=True)

    def track(self, items: Iterable[T], *, total: int | None, description: str) -> Iterator[T]:
        """Yield `items` under a progress bar with an ETA (only on a terminal; a pipe gets no bar)."""
        if not self.on_terminal:
            yield from items
            return
        with self.progress() as progress:
            yield from progress.track(items, total=total, description=description)

    @property
    def on_terminal(self) -> bool:
        """True if this process prints, and its output goes to a terminal."""
        return self.prints and sys.stdout.isatty()

    def progress(self, *columns: ProgressColumn) -> Progress:
        """Return a progress display, a context manager; without columns it shows count, elapsed and remaining time."""
        usual = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        return Progress(*(columns or usual), console=self._rich, transient=True, disable=not self.on_terminal)


def _discard(stream: TextIO) -> None:
    """Send what is still written to a stream to nowhere; the interpreter would fail to flush it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def run_program(main: Callable[[], int | None]) -> int:
    """Run a program's `main` and return its exit code; user errors are printed without a traceback, once per job."""
    if callable(signal.getsignal(signal.SIGINT)):  # the handler of `megazero.interrupts`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Torch, which is not loaded yet, adds stacks of C++ to its warnings of a broken connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        return main() or 0
    except UserError as error:
        if launcher_rank() != 0:
            # Usually every rank has the same error.  Rank 0 prints it and exits, whereupon the launcher ends this
            # process; if this one still runs after a while, rank 0 does not have the error.
            time.sleep(_SILENCE_SECONDS)
        return print_error(error)
    except KeyboardInterrupt:
        if launcher_rank() == 0:
            print("interrupted", file=sys.stderr, flush=True)
        return 130
    finally:
        # gloo's threads release Python's tensors; one that does so while the interpreter ends aborts the process.
        # Collecting what is left of the process groups ends their threads before that.
        gc.collect()


def print_error(error: UserError) -> int:
    """Print a user's error without a traceback, and return the exit code."""
    with suppress(BrokenPipeError):  # the reader of the messages has ended
        print(error.render(), file=sys.stderr, flush=True)
    return error.exit_code
