"""Small file systems of their own for tests of full, failing and peculiar disks, where mounting is allowed.

A test is skipped where it is not: only root may, and not in every container.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *words: str) -> Iterator[Path]:
    """Mount a file system in a new folder, with these words before it on mount's command line."""
    _run("mount", *words, str(folder), new=folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def small_disk(folder: Path, mib: int = 1) -> AbstractContextManager[Path]:
    """Mount a file system of so many MiB in memory."""
    return mounted(folder, "-t", "tmpfs", "-o", f"size={mib}m", "none")


@contextmanager
def ext4_disk(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Mount an ext4 file system of 8 MiB; yield its folder, and the file in `folder` that is its disk."""
    disk = folder / "disk"
    disk.touch()
    os.truncate(disk, 8 << 20)
    _run("mkfs.ext4", "-q", "-O", "^has_journal", str(disk))
    with mounted(folder / "ext4", "-o", "loop", str(disk)) as place:
        yield place, disk


def free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's file system, those that root alone may use among them."""
    found = os.statvfs(folder)
    return found.f_bfree * found.f_frsize


def _run(*words: str, new: Path | None = None) -> None:
    if shutil.which(words[0]) is None or os.geteuid():
        pytest.skip(f"needs root and {words[0]}")
    if new is not None:
        new.mkdir()
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{words[0]}: {done.stderr.strip()}")
