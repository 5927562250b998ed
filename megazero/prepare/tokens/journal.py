"""Keeps the journal of a long piece of work, by which it can be resumed after any interruption.

A scratch folder beside the destination holds the files made so far and a *journal*: a first line that describes the
work, then a line for every *partition* that was finished and synced to the disk.  A line counts when it is whole; the
work continues after the last one.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megazero.errors import DataError, Problem
from megazero.files import cannot_write, sync_path
from megazero.operating_system import lock_file

JOURNAL = "journal.jsonl"
# Errors of a disk, a quota or a limit on file sizes that is used up.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Errors of file systems without locks, as some clusters have; there the same work can run twice at once.
LOCKLESS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK})


class WorkJournal:
    """A context manager of the scratch folder of one piece of work, which is locked while it is open.

    work: the description of the work, as plain JSON values.  resume: True to continue after the last partition; else
    the folder's files are removed.  Raises DataError when another process has the lock, or when the folder belongs to
    other work.

    A `with` block that ends well removes the folder.  One that is interrupted leaves it if a partition was finished;
    after a full disk it is removed.
    """

    def __init__(self, folder: Path, work: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = folder
        self.last: dict[str, Any] | None = None
        path = folder / JOURNAL
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._stream = open(path, "a+b")  # noqa: SIM115 (lives until close)
        except OSError as error:
            raise cannot_write(path, error) from error
        try:
            self._lock()
            if resume:
                self._read(json.loads(json.dumps(work)))
            if self.last is None:
                self._begin(work)
        except OSError as error:
            self._close()
            raise cannot_write(path, error) from error
        except DataError:
            self._close()
            raise

    @property
    def can_resume(self) -> bool:
        """True if a later run can resume from here."""
        return self.last is not None

    def _lock(self) -> None:
        try:
            is_ours = lock_file(self._stream.fileno(), wait=False)
        except OSError as error:
            if error.errno not in LOCKLESS:
                raise
            return
        if not is_ours:
            rule = "one process at a time makes a corpus; another one is running"
            raise DataError(Problem(str(self.folder), rule, "another --output-prefix, or wait"))

    def _read(self, work: dict[str, Any]) -> None:
        self._stream.seek(0)
        whole = list(_whole_lines(self._stream.read()))
        if not whole:
            return
        earlier, *states = (json.loads(line) for line in whole)
        differing = [key for key in work if earlier.get(key) != work[key]]
        if differing:
            raise DataError(*(_other_work(self.folder, key, earlier.get(key), work[key]) for key in differing))
        if states:
            self.last = states[-1]
            self._stream.truncate(sum(map(len, whole)))

    def _begin(self, work: Mapping[str, Any]) -> None:
        try:
            # The journal is cleared first, or it could list files that have been removed.
            self._stream.truncate(0)
            os.fsync(self._stream.fileno())
            for path in self.folder.iterdir():
                if path.name != JOURNAL:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._append(work)
            sync_path(self.folder)
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def finish(self, state: Mapping[str, Any]) -> None:
        """Record that a partition is on the disk, and the `state` from which to continue."""
        try:
            self._append(state)
        except OSError as error:
            raise cannot_write(self.folder / JOURNAL, error) from error
        self.last = dict(state)

    def _append(self, line: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(line).encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_full = isinstance(error, DataError) and getattr(error.__cause__, "errno", None) in FULL
        try:
            if kind is None or is_full or not self.can_resume:
                shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            self._close()

    def _close(self) -> None:
        with suppress(OSError):  # closing writes again the bytes that the disk has refused
            self._stream.close()


def _whole_lines(content: bytes) -> Iterator[bytes]:
    """Yield the lines before the first that was cut off, or never reached the disk when the machine stopped."""
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"}\n"):
            return
        yield line


def _other_work(folder: Path, key: str, earlier: Any, now: Any) -> Problem:
    if isinstance(earlier, list) and isinstance(now, list):  # of long lists only the first items that differ
        earlier, now = next(pair for pair in zip_longest(earlier, now) if pair[0] != pair[1])
    return Problem(
        f"--resume: {key} was {json.dumps(earlier)[:200]} when {folder} was made, and is {json.dumps(now)[:200]}",
        "a run resumes the same work",
        "the same flags and files, or start again without --resume",
    )
