"""How a job ends when one rank finds that it cannot go on: one message, and no echo of it.

A rank that meets a user's error while training (a damaged token that only it has read, say) tells it and leaves.  The
others are in the middle of a collective and see a connection break; their tracebacks would bury the message.  So the
first rank to fail leaves a *note* in the job's store, and whoever fails after it goes quietly, with the same exit code.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

from megazero.console import tell
from megazero.errors import UserError

_NOTE = "last_word"


@contextmanager
def last_word(store: Store | None, rank: int) -> Iterator[None]:
    """Within the block a UserError is told by the first rank that has one, and ends all ranks by SystemExit.

    store: the job's; None for a job of one process, whose errors go on as they are.  Errors of communication that
    nobody has left a note about are bugs or accidents, and keep their traceback.
    """
    if store is None:
        yield
        return
    try:
        yield
    except UserError as error:
        note = _leave_note(store, f"{rank} {error.exit_code}")
        if _author(note) == rank:
            tell(error)
        raise SystemExit(_exit_code(note)) from None
    except RuntimeError:
        found = _find_note(store)
        if found is None:
            raise
        raise SystemExit(_exit_code(found)) from None


def _leave_note(store: Store, mine: str) -> str:
    """The note of the job: mine if there was none.  A store that is gone leaves every rank to its own."""
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
