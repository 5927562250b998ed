"""Tests of what is used where the operating system lacks one of Linux's calls."""

import errno
import fcntl
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.mounts import ext4_disk, free_bytes, small_disk

from megazero import operating_system
from megazero.operating_system import (
    SharedCounters,
    batch_threads,
    bypass_page_cache,
    free_space,
    lock_file,
    memory_bytes,
    nameless_file,
    peak_resident_bytes,
    reserve_space,
    unlock_file,
    usable_cores,
)


def test_all_cores_count_where_a_process_has_no_affinity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(operating_system, "_QUOTA", tmp_path / "none")
    assert usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == os.cpu_count()
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_the_least_of_the_groups_that_a_process_lies_in(
    version: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root, name = (tmp_path / "memory", "memory.limit_in_bytes") if version == 1 else (tmp_path, "memory.max")
    (root / "job" / "step").mkdir(parents=True)
    own = "4:cpu:/job/step\n3:hugetlb,memory:/job/step\n0::/\n" if version == 1 else "0::/job/step\n"
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(operating_system, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(operating_system, "_GROUPS", tmp_path)
    machine = memory_bytes()
    assert machine == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (root / "job" / "step" / name).write_text("max\n" if version == 2 else "9223372036854771712\n")
    assert memory_bytes() == machine
    (root / "job" / name).write_text("1000000\n")
    assert memory_bytes() == 1_000_000
    (root / name).write_text("900000\n")
    assert memory_bytes() == 900_000
    (tmp_path / "own").write_text(own.replace("job", "not_seen_from_here"))
    assert memory_bytes() == 900_000
    monkeypatch.setattr(operating_system, "_OWN_GROUPS", tmp_path / "none")
    assert memory_bytes() == machine


def test_memory_is_that_of_a_real_group() -> None:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in lines if "memory" in line.split(":")[1].split(",")), None)
    if own is None or os.geteuid():
        pytest.skip("no control group of version 1 that this user may divide")
    group = Path("/sys/fs/cgroup/memory") / own.lstrip("/") / f"test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("800000000")
    except OSError as error:
        pytest.skip(f"no group of memory can be made: {error}")
    try:
        program = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0'); import megazero.operating_system as system"
        words = [sys.executable, "-c", f"{program}; print(system.memory_bytes())"]
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    finally:
        group.rmdir()
    assert 799_990_000 < int(found) <= 800_000_000


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_nameless_file_is_zeros_that_no_folder_holds(
    in_memory: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = nameless_file(5000)
    try:
        assert os.read(file, 9000) == bytes(5000)
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(file).st_blocks == 0, "memory is used where it is written"
    finally:
        os.close(file)


def test_a_counter_is_shared_by_two_processes() -> None:
    """What the other process has raised can be taken as often, and a wait for more ends after its time."""
    file = nameless_file(mmap.PAGESIZE)
    memory = mmap.mmap(file, mmap.PAGESIZE)
    os.close(file)
    counter, written = SharedCounters().at(memory, 64), 1000
    counter.reset()
    assert counter.is_zero()
    child = os.fork()
    if child == 0:
        time.sleep(0.05)
        memory[written] = 7
        counter.add_one()
        counter.add_one()
        os._exit(0)
    assert counter.wait_for_one(30) and memory[written] == 7
    os.waitpid(child, 0)
    assert not counter.is_zero() and counter.is_zero()
    assert not counter.wait_for_one(0.01)


def test_a_system_without_counters_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no counters in shared memory"):
        SharedCounters()


@pytest.mark.parametrize("way", ["ordinary", "idle", "refused", "hidden", "missing"])
def test_threads_of_a_block_have_the_batch_policy_where_there_is_one(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that the process was started with stays; the caller has its own afterwards."""
    given, batch, policies = os.SCHED_IDLE if way == "idle" else os.SCHED_OTHER, os.SCHED_BATCH, []

    policy = os.sched_getscheduler

    def begin() -> None:
        policies.append(policy(0))

    def caller() -> None:  # a thread, whose policy ends with it
        os.sched_setscheduler(0, given, os.sched_param(0))
        if way == "refused":
            monkeypatch.setattr(os, "sched_setscheduler", refuse)
        elif way == "hidden":
            monkeypatch.setattr(os, "sched_getscheduler", refuse)
        elif way == "missing":
            monkeypatch.delattr(os, "SCHED_BATCH")
        with batch_threads():
            run_in_thread(begin)
        begin()

    run_in_thread(caller)
    assert policies == [batch if way == "ordinary" else given, given]


def run_in_thread(target: Callable[[], None]) -> None:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


def refuse(*words: object) -> None:
    raise OSError(errno.EOPNOTSUPP, "not supported")


@pytest.mark.parametrize("call", ["there", "refused", "missing"])
def test_space_is_reserved_or_at_least_compared(call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if call == "refused":  # as musl does where a file system cannot
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    elif call == "missing":
        monkeypatch.delattr(os, "posix_fallocate")
    with small_disk(tmp_path / "disk") as folder, open(folder / "file", "wb") as stream:
        assert free_space(stream.fileno()) == 1 << 20
        with pytest.raises(OSError, match="No space left on device"):
            reserve_space(stream.fileno(), (1 << 20) + 1)
        assert os.fstat(stream.fileno()).st_size == 0
        reserve_space(stream.fileno(), 100_000)
        status = os.fstat(stream.fileno())
        assert status.st_size == 100_000
        assert (512 * status.st_blocks >= 100_000) == (call == "there")


def test_what_does_not_fit_reserves_nothing(tmp_path: Path) -> None:
    """A call that ext4 refuses has reserved all the space that there was; its last part is root's alone."""
    with ext4_disk(tmp_path) as (folder, _), open(folder / "file", "wb") as stream:
        free, all_free = free_space(stream.fileno()), free_bytes(folder)
        assert free is not None and free < all_free
        with pytest.raises(OSError, match="No space left on device"):
            reserve_space(stream.fileno(), free + 1)
        assert free_bytes(folder) == all_free
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                reserve_space(stream.fileno(), 200_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (os.fstat(stream.fileno()).st_size, free_bytes(folder)) == (0, all_free)


def test_pages_go_past_the_cache_where_they_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as stream:
        file = stream.fileno()
        os.ftruncate(file, 8192)
        # Where a file system refuses writes of 100 bytes, any others go through the cache as before.
        if not bypass_page_cache(file, 100):
            assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT == 0
            assert os.pwrite(file, b"abc", 1) == 3
        assert bypass_page_cache(file, 4096) == bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
    monkeypatch.delattr(os, "O_DIRECT")
    with open(tmp_path / "other", "w+b") as stream:
        assert not bypass_page_cache(stream.fileno(), 4096)


def elsewhere(work: Callable[[], bool]) -> bool:
    """Return what a forked process finds."""
    child = os.fork()
    if not child:
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def opens_and_locks(path: Path) -> bool:
    return lock_file(os.open(path, os.O_RDWR), wait=False)


@pytest.mark.parametrize("has_fcntl", [True, False])
def test_one_process_at_a_time_has_a_lock(has_fcntl: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not has_fcntl:
        monkeypatch.setitem(sys.modules, "fcntl", None)
    path = tmp_path / "locked"
    path.write_bytes(b"some bytes")
    with open(path, "a+b") as stream:
        assert stream.tell() == 10
        assert lock_file(stream.fileno(), wait=False)
        assert not elsewhere(lambda: opens_and_locks(path))
        unlock_file(stream.fileno())
        assert elsewhere(lambda: opens_and_locks(path))
        assert lock_file(stream.fileno(), wait=True, shared=True)
        assert not elsewhere(lambda: opens_and_locks(path))
    assert elsewhere(lambda: opens_and_locks(path))


def test_resident_memory_is_in_bytes_on_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    on_linux = peak_resident_bytes()
    assert 10 << 20 < on_linux < 1 << 40
    monkeypatch.setattr(sys, "platform", "darwin")
    assert on_linux <= 1024 * peak_resident_bytes() < on_linux + (10 << 20)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert peak_resident_bytes() == 0
