"""The end of a job in which one rank has failed: one message, and no tracebacks from the others.

A rank that meets a user's error while training (a damaged token that only it has read, say) prints it and exits.  The
others are in the middle of a collective and find a connection broken; their tracebacks would bury the message.  So the
first rank to fail writes a *note* to the job's store, and ranks that fail after it exit silently with the same code.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

from megazero.console import print_error
from megazero.errors import UserError

_NOTE = "failure_note"


@contextmanager
def single_failure_report(store: Store | None, rank: int) -> Iterator[None]:
    """Print a UserError of the block once, on the first rank that has one, and end all ranks by SystemExit.

    store: the job's; None for a job of one process, whose errors pass through.  Errors of communication without a note
    in the store are bugs or accidents, and keep their traceback.
    """
    if store is None:
        yield
        return
    try:
        yield
    except UserError as error:
        note = _write_note(store, f"{rank} {error.exit_code}")
        if _author(note) == rank:
            print_error(error)
        raise SystemExit(_exit_code(note)) from None
    except RuntimeError:
        found = _find_note(store)
        if found is None:
            raise
        raise SystemExit(_exit_code(found)) from None


def _write_note(store: Store, mine: str) -> str:
    """Return the job's note, which is `mine` if there was none, or if the store is gone."""
    try:
        found: bytes = store.compare_set(_NOTE, "", mine)
        return found.decode()
    except RuntimeError:
        return mine


def _find_note(store: Store) -> str | None:
    try:
        return store.get(_NOTE).decode() if store.check([_NOTE]) else None
    except RuntimeError:
        return None


def _author(note: str) -> int:
    return int(note.split()[0])


def _exit_code(note: str) -> int:
    return int(note.split()[1])
