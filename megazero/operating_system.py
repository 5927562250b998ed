"""The one place for what not every operating system has, with what is used instead.

    cores of a process      its affinity (Linux), or all cores
    memory to share         a file in memory (Linux), or a temporary file without a name
    counters in it          POSIX's semaphores without names (Linux), or none
    locks of files          flock, or os.lockf where python has no fcntl
    reserved disk space     posix_fallocate (Linux), or a comparison with what is free
    reads past the cache    O_DIRECT (Linux), where the file system has it too
    memory of a process     sysconf and the control group's limit; 0 where neither has one
    most memory resident    getrusage, in KiB or in bytes (macOS); 0 where python has no resource
    threads of low urgency  Linux's SCHED_BATCH, or the policy of all others

Windows is refused (`megazero.interrupts`).
"""

import ctypes
import errno
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

# A container's share of time: "QUOTA PERIOD" in microseconds of all cores together; "max" where there is no limit.
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# The control groups of this process ("NUMBER:CONTROLLERS:PATH"), and the folder of all.
_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# What addresses, offsets and sizes are multiples of past the page cache: no disk's sectors are larger.
ALIGNMENT = 4096
# What a call that a file system does not have ends in.
_MISSING = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def usable_cores() -> int:
    """Return the number of cores that this process may run on, at most its container's share of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, _QUOTA.read_text().split())
    except (OSError, ValueError):
        return cores
    return max(1, min(cores, quota // period))


def nameless_file(size: int) -> int:
    """Return the descriptor of a new file of `size` zeros that no other program can open: in memory where it can be."""
    if hasattr(os, "memfd_create"):
        file: int = os.memfd_create("megazero")
    else:
        file, path = tempfile.mkstemp(prefix="megazero-")
        os.unlink(path)
    os.ftruncate(file, size)
    return file


class SharedCounters:
    """Makes counters in memory that processes share; raises OSError where the system has none."""

    NBYTES = 64  # of a counter: as much as a line of the processor's cache

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(None)
        if not hasattr(os, "memfd_create") or not hasattr(self._library, "sem_timedwait"):
            raise OSError(errno.ENOSYS, "the system has no counters in shared memory")

    def at(self, memory: mmap.mmap, start: int) -> "SharedCounter":
        """Return the counter at a place in the memory, a multiple of its size."""
        return SharedCounter(self._library, (ctypes.c_char * self.NBYTES).from_buffer(memory, start))


class SharedCounter:
    """A counter that two processes share: one raises it, the other lowers it, and waits where it is 0.

    What a process has written to memory before it raises the counter, the other reads once it has lowered it.
    """

    def __init__(self, library: Any, memory: Any) -> None:
        self._library, self._memory = library, memory
        # C's functions themselves, since these are called for every message.
        self.add_one: Callable[[], int] = partial(library.sem_post, memory)
        self.is_zero: Callable[[], int] = partial(library.sem_trywait, memory)
        """Lower the counter by one and return 0, or return another number where it is 0."""

    def reset(self) -> None:
        """Set the counter to 0, before any process uses it."""
        self._library.sem_init(self._memory, 1, 0)

    def wait_for_one(self, seconds: float) -> bool:
        """Lower the counter by one, and wait for so long where it is 0, or until a signal; return True if it was."""
        until = divmod(time.time_ns() + int(seconds * 1e9), 10**9)
        lowered: bool = self._library.sem_timedwait(self._memory, (ctypes.c_long * 2)(*until)) == 0
        return lowered


def free_space(file: int) -> int | None:
    """Return the bytes that users may still write to an open file's file system, None if it has no limit of its own."""
    found = os.fstatvfs(file)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def reserve_space(file: int, size: int) -> None:
    """Extend an empty file to `size` bytes that have their places on the disk; raise OSError where it has too few.

    Where places cannot be reserved, the size is only compared with what is free now.
    """
    free = free_space(file)
    # Compared in any case, because some file systems, such as ext4, are full for a while before they refuse.
    if free is not None and size > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.ftruncate(file, 0)  # what it has reserved is everybody's again
        if error.errno not in _MISSING:
            raise
    os.ftruncate(file, size)


def bypass_page_cache(file: int, page_size: int) -> bool:
    """Make an open file's reads and writes go past the page cache; return False where that cannot be.

    They are then in multiples of `page_size`, in the file and in memory.  One page of zeros is written, at the file's
    beginning, since some file systems accept the flag and refuse the writes.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    from fcntl import F_GETFL, F_SETFL, fcntl

    flags = fcntl(file, F_GETFL)
    try:
        fcntl(file, F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, page_size) as zeros:  # its address is a multiple of the system's pages
            os.pwrite(file, zeros, 0)
    except OSError as error:
        if error.errno not in _MISSING:
            raise
        fcntl(file, F_SETFL, flags)
        return False
    return True


def lock_file(file: int, *, wait: bool, shared: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock and `wait` is False.

    file: a descriptor that may be written to.  shared: other shared locks may be held too.  Raises OSError on a file
    system without locks.
    """
    try:
        from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
    except ImportError:
        return _posix_lock(file, os.F_LOCK if wait else os.F_TLOCK)
    try:
        flock(file, (LOCK_SH if shared else LOCK_EX) | (0 if wait else LOCK_NB))
    except BlockingIOError:
        return False
    return True


def unlock_file(file: int) -> None:
    """Release the lock at once, even if a process that was forked has the descriptor too."""
    try:
        from fcntl import LOCK_UN, flock
    except ImportError:
        _posix_lock(file, os.F_ULOCK)
        return
    flock(file, LOCK_UN)


def memory_bytes() -> int:
    """Return the memory that this process may have: the machine's, or its control groups'; 0 if none is known."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    return min([found, *_memory_limits()])


def _memory_limits() -> Iterator[int]:
    """Yield the limits of the control groups of this process, in both versions, and of those that they lie in.

    A container often sees its own group as the root, whatever the path.
    """
    for line in _OWN_GROUPS.read_text(encoding="utf-8").splitlines() if _OWN_GROUPS.is_file() else ():
        _, controllers, path = line.split(":", 2)
        root, name = (_GROUPS / "memory", "memory.limit_in_bytes") if controllers else (_GROUPS, "memory.max")
        if controllers and "memory" not in controllers.split(","):
            continue
        group = root / path.lstrip("/")
        for folder in (each for each in (group, *group.parents) if each.is_relative_to(root)):
            with suppress(OSError, ValueError):  # where there is none, or "max"
                yield int((folder / name).read_text(encoding="utf-8"))


def peak_resident_bytes() -> int:
    """Return the most memory that this process has had resident; 0 where the system does not count it."""
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:
        return 0
    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def batch_threads() -> Iterator[None]:
    """Let the threads that start in the block not interrupt others when they wake (Linux's SCHED_BATCH).

    They run on a core that is free, or once the time of the thread that runs has passed.  A thread inherits the policy
    of the one that starts it; a policy that the process was started with stays.
    """
    is_ordinary = False
    with suppress(OSError):  # a container may refuse the calls
        is_ordinary = hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER
        if is_ordinary:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        if is_ordinary:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _posix_lock(file: int, command: int) -> bool:
    """Lock or unlock the file from its position to infinity, so that any two locks overlap."""
    try:
        os.lockf(file, command, 0)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        return False
    return True
