"""Identifies the process that a temporary file belongs to, so that only files of processes that are gone are cleared.

An owner is written into the names of temporary files as a *tag*, `4711-8123456-1a2b3c4d-5e6f7a8b-4026531836`: process
id, its start in clock ticks, digests of the machine and of the machine's boot, and the number of the process ids'
namespace.  Process ids are compared only within one boot and namespace, since elsewhere they belong to other processes.
"""

import errno
import hashlib
import os
import re
import socket
import uuid
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

_TAG = re.compile(r"(\d{1,10})-(\d{1,20})-([0-9a-f]{8}|)-([0-9a-f]{8}|)-(\d{1,20})")
_PROCESSES = Path("/proc")
_ENDING = 4  # Linux's flag PF_EXITING of a thread, which it has from before its files are closed


class ProcessState(StrEnum):
    """The state of a process, as far as a process of the same machine can see it."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    UNSEEN = "unseen"


@dataclass(frozen=True)
class Owner:
    """A process; `machine` and `boot` are digests, empty where the system does not distinguish machines or boots."""

    pid: int
    started: int
    machine: str
    boot: str
    namespace: int

    @staticmethod
    def of_this_process() -> "Owner":
        """Return the owner of the files that this process writes."""
        pid = os.getpid()
        boot = _digest(_read(_PROCESSES / "sys/kernel/random/boot_id"))
        return Owner(pid, process_start(pid) or 0, _machine(has_boot=bool(boot)), boot, _namespace())

    @property
    def tag(self) -> str:
        """The owner as a part of a file's name."""
        return "-".join(map(str, asdict(self).values()))

    @staticmethod
    def from_tag(tag: str) -> "Owner | None":
        """Return the owner that a tag names; None for any other text."""
        found = _TAG.fullmatch(tag)
        return Owner(int(found[1]), int(found[2]), found[3], found[4], int(found[5])) if found else None

    def is_comparable(self, here: "Owner") -> bool:
        """Return True if the process `here` can find out whether this one lives."""
        return bool(here.boot) and self.boot == here.boot and self.namespace == here.namespace

    def is_gone(self, here: "Owner") -> bool:
        """Return True if this process is known to have ended, as seen by the process `here`, which is the caller's.

        It has if its id is free, or belongs to a process that started at another time, or if the machine has been
        restarted since.  A process on another machine, or in another namespace of the same boot, may live.  On a system
        that does not distinguish boots (macOS), one of the same machine has ended if its id is free.
        """
        without_boots = not (self.boot or here.boot) and self.namespace == here.namespace
        if self.is_comparable(here) or (without_boots and here.machine and self.machine == here.machine):
            return process_state(self.pid, self.started) is ProcessState.GONE
        return (
            bool(here.machine and here.boot and self.boot) and self.machine == here.machine and self.boot != here.boot
        )


def open_shared_file(pid: int, number: int) -> int:
    """Open a file without a name that a process of this machine has open under a number; return its descriptor.

    Raises OSError where the system does not allow it.
    """
    path = _PROCESSES / str(pid) / "fd" / str(number)
    if not os.readlink(path).startswith("/memfd:"):
        raise FileNotFoundError(errno.ENOENT, "its memory is not there")
    return os.open(path, os.O_RDWR)


def process_start(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the boot; None where it cannot be read."""
    fields = _read(_PROCESSES / str(pid) / "stat").rpartition(")")[2].split()  # the name before may hold any character
    return int(fields[19]) if len(fields) > 19 else None


def process_state(pid: int, started: int) -> ProcessState:
    """Return the state of the process of this machine that had this id and start (`process_start`)."""
    found = process_start(pid)
    if found is None:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ProcessState.GONE
        except (OSError, OverflowError):  # a process of another user
            pass
        return ProcessState.UNSEEN
    stats = [_read(task / "stat").rpartition(")")[2] for task in (_PROCESSES / str(pid) / "task").glob("[0-9]*")]
    threads = [stat.split() for stat in stats if stat]
    if not threads and process_start(pid) is None:  # its parent has read its status between the two looks
        return ProcessState.GONE
    # A process whose threads have all ended, or are ending, writes no more: its files and connections are closed before
    # its threads count as ended, and its id is taken until its parent reads its status.
    if found != started or (threads and all(thread[0] in "ZX" or int(thread[6]) & _ENDING for thread in threads)):
        return ProcessState.GONE
    return ProcessState.STOPPED if any(thread[0] in "Tt" for thread in threads) else ProcessState.RUNNING


def _machine(*, has_boot: bool) -> str:
    """Return a digest of the machine's name and id; empty for a name that many machines have.

    has_boot: False on a system that does not distinguish boots: there the number of the network card stands for the id.
    """
    name = socket.gethostname()
    number = _read(Path("/etc/machine-id")) if has_boot else str(uuid.getnode())
    return "" if name.split(".")[0] in ("", "localhost") else _digest(name + number)


def _namespace() -> int:
    try:
        return os.stat(_PROCESSES / "self/ns/pid").st_ino
    except OSError:
        return 0


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8] if text else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
