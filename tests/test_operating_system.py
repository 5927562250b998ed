"""Tests of what is used where the operating system lacks one of Linux's calls."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero import operating_system
from megazero.operating_system import lock_file, nameless_file, peak_resident_bytes, unlock_file, usable_cores


def test_all_cores_count_where_a_process_has_no_affinity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(operating_system, "_QUOTA", tmp_path / "none")
    assert usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == os.cpu_count()
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


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
