"""The lock of a folder of checkpoints: one process at a time, rank 0 of a job, may write there.

The lock is a small JSON file, `.lock`, which names its owner.  It is made by a hard link to a complete file, so that of
several processes one succeeds, and no process reads half of it.  A job that ends releases it.  A job that was killed
leaves it, and the next one *breaks* it, provided that its owner is known to be gone: by `megazero.owner`, or because
Slurm has started the same job again.  In any other case the start is an error that names the owner and the file.

No process removes a lock that another process has made, as it could be a third one's by then.  A lock is broken
by making its *successor*, `.lock.after.ID`, where ID is that of the broken lock, by a hard link too: again one process
succeeds.  The holder is therefore the last of the chain that begins with `.lock`.  A new holder replaces `.lock` by its
own lock, and only then removes the rest of the chain; a slow process that makes a successor after that finds itself in
no chain, and tries again.  Whatever a process that is killed leaves behind, the next one finds a chain.
"""

import errno
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.folders import hidden_path
from megazero.comm.interface import Communicator
from megazero.errors import CheckpointError, Problem
from megazero.files import read_bounded
from megazero.owner import Owner
from megazero.parallel.launch import job_name

LOCK = ".lock"
_PAUSE_SECONDS, _PATIENCE_SECONDS = 0.02, 0.3
_MAX_BYTES = 1 << 16
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

_Text = Annotated[str, Field(max_length=300)]


@checked_dataclass(frozen=True, config=ConfigDict(extra="ignore", strict=True))
class Holder:
    """The content of a lock: who holds it, for programs (`owner`, a tag of megazero.owner) and for people.

    id: different in every lock.  job: the launcher's name of the job; restarts: how often Slurm has started it again.
    """

    owner: _Text
    host: _Text
    pid: int
    since: _Text
    job: _Text = ""
    restarts: int = 0
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] = field(default_factory=lambda: secrets.token_hex(8))

    @staticmethod
    def of_this_process() -> "Holder":
        owner, now = Owner.of_this_process(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return Holder(owner.tag, socket.gethostname(), owner.pid, now, job_name(), _restarts())

    def __str__(self) -> str:
        job = f" ({self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def reason_to_be_gone(self) -> str:
        """Return the evidence that the holder has ended; empty if it may still run."""
        owner, here = Owner.from_tag(self.owner), Owner.of_this_process()
        if owner is not None and owner == here:
            return "this process has ended an earlier run"
        if owner is not None and owner.is_gone(here):
            return "that process is gone"
        if self.job.startswith("Slurm") and self.job == job_name() and self.restarts < _restarts():
            return "Slurm has started that job again"
        return ""

    def refusal(self, path: Path) -> Problem:
        """Return the problem of a job that meets this holder's lock at `path`."""
        owner, here = Owner.from_tag(self.owner), Owner.of_this_process()
        if owner is not None and owner.is_comparable(here):
            rule, legal = "one job at a time writes to a folder, and that process is running", "another folder"
        else:
            rule = "one job at a time writes to a folder; whether that process still runs cannot be seen from here"
            legal = f"another folder; or, if that job has ended, remove {path}"
        return Problem(f"{path} is held by {self}", rule, legal)


_HOLDER = TypeAdapter(Holder)


@dataclass(frozen=True)
class FolderLock:
    """A lock that this process has taken.

    broken: a line on the lock that was broken for it, empty if there was none.
    """

    path: Path
    holder: Holder
    broken: str = ""

    def ensure(self) -> None:
        """Take the lock again if its file was removed by hand; raise CheckpointError if another process has it now."""
        _create(self.path, self.holder)
        found = _holder(self.path)
        if found is None or found.id != self.holder.id:
            given = f"{self.path} is now held by {found}" if found else f"{self.path} is gone"
            rule = "this run has lost its folder: its lock was removed while it ran, and another job took its place"
            raise CheckpointError(Problem(given, rule, "end one of the two jobs"))

    def release(self) -> None:
        """Remove the lock, if it is still this one; a second call does nothing."""
        with suppress(OSError, CheckpointError):
            found = _holder(self.path)
            if found is not None and found.id == self.holder.id:
                self.path.unlink()


def lock_folder(root: Path, *, control: Communicator) -> FolderLock | None:
    """Take the lock of `root`, which is made if it is not there, on rank 0; a collective call.

    Returns the lock on rank 0, None elsewhere.  Raises CheckpointError on all ranks if it is held.
    """
    locks: list[FolderLock] = []

    def take() -> None:
        if control.rank == 0:
            locks.append(take_lock(root))

    all_or_none(control, take, doing=f"locking {root}")
    return locks[0] if locks else None


def take_lock(root: Path) -> FolderLock:
    """Make `root` if it is not there, and take its lock; raise CheckpointError if another job holds it."""
    root.mkdir(parents=True, exist_ok=True)
    path, mine, broken = root / LOCK, Holder.of_this_process(), ""
    _create(path, mine)
    while (found := _holder(path)) is None or found.id != mine.id:
        if found is None:  # released since the lock could not be made
            _create(path, mine)
            continue
        reason = found.reason_to_be_gone()
        if not reason:
            raise CheckpointError(found.refusal(path))
        successor = _successor(path, found)
        _create(successor, mine)
        if (last := _holder(path)) is not None and last.id == mine.id:
            broken = f"{path} was held by {found}: broken, because {reason}"
        elif (made := _read(successor)) is not None and made.id == mine.id:  # a successor that is in no chain
            successor.unlink(missing_ok=True)
    if broken:
        _replace(path, mine)
    for successor in root.glob(f"{LOCK}.after.*"):
        successor.unlink(missing_ok=True)
    return FolderLock(path, mine, broken)


def _holder(path: Path) -> Holder | None:
    """Return the holder, whose lock is the last of the chain that begins at `path`; None if there is no lock."""
    found = None
    following = _read(path)
    while following is not None:
        found, following = following, _read(_successor(path, following))
    return found


def _successor(path: Path, holder: Holder) -> Path:
    return path.with_name(f"{path.name}.after.{holder.id}")


def _create(path: Path, mine: Holder) -> None:
    """Make a lock, complete from its first instant, unless there is one.

    Whether it was made is found by reading it: a network file system may report that the file exists when its own
    first try has made it.
    """
    complete = hidden_path(path.parent, LOCK[1:])
    try:
        _write_new(complete, mine)
        try:
            os.link(complete, path)
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                with suppress(FileExistsError):
                    _write_new(path, mine)
            elif error.errno != errno.EEXIST:
                raise
    finally:
        complete.unlink(missing_ok=True)


def _replace(path: Path, mine: Holder) -> None:
    """Replace the first lock of a chain by that of its holder."""
    complete = hidden_path(path.parent, LOCK[1:])
    _write_new(complete, mine)
    os.replace(complete, path)


def _write_new(path: Path, holder: Holder) -> None:
    with open(path, "xb") as file:
        file.write(json.dumps(asdict(holder)).encode())
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Holder | None:
    """Return the holder of a lock, None if there is no lock; raise CheckpointError if the file is no lock.

    Where there are no hard links a lock is empty for an instant.
    """
    give_up = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return _HOLDER.validate_json(read_bounded(path, _MAX_BYTES, inside=path.parent))
        except FileNotFoundError:
            return None
        except (ValidationError, OSError) as error:
            if time.monotonic() > give_up:
                reason = error.strerror if isinstance(error, OSError) else "its content is none"
                rule = f"this file is the lock of a folder, and does not name its holder: {reason}"
                raise CheckpointError(Problem(str(path), rule, "remove it, if no job writes to the folder")) from None
        time.sleep(_PAUSE_SECONDS)


def _restarts() -> int:
    """Return how often Slurm has started this job again."""
    count = os.environ.get("SLURM_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0
