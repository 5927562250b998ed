"""Tests of the memory and the files of slices against plain tensors, and of the space and the memory that they take."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support.each import each
from support.late_copies import late_copies
from torch import Tensor

from megazero.errors import FileError
from megazero.library.partitioned_init import slices as slices_module
from megazero.library.partitioned_init.slices import FileSlices, MemorySlices, SliceStore, StoredSlice
from megazero.memory.homes import DeviceHome, HostHome
from megazero.operating_system import ALIGNMENT

CPU = torch.device("cpu")
BLOCK, SEGMENT = ALIGNMENT, 4 * ALIGNMENT


@pytest.fixture(autouse=True)
def _small_files() -> Iterator[None]:
    with patch.multiple(slices_module, _BLOCK_BYTES=BLOCK, _SEGMENT_BYTES=SEGMENT):
        yield


def in_files(folder: Path) -> FileSlices:
    return FileSlices(folder, CPU, is_pinned=False, io_block_bytes=ALIGNMENT, queue_depth=2, notify=print)


def sizes_of_open_files(folder: Path) -> list[int]:
    """Return the sizes of this process's open files that were made in a folder."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return [link.stat().st_size for link in links if link.is_symlink() and str(folder) in os.readlink(link)]


STORES: dict[str, Callable[[Path], SliceStore]] = {
    "device": lambda folder: MemorySlices(DeviceHome(CPU)),
    "host": lambda folder: MemorySlices(HostHome(CPU)),
    "files": in_files,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex128)


def drawn(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(100, (numel,)).to(dtype)


@each("kind", STORES)
def test_slices_hold_what_tensors_hold(kind: str, tmp_path: Path) -> None:
    """Slices of all sizes and formats are made, stored, loaded and freed in any order, in parts of any size."""
    draw = random.Random(kind)
    with late_copies():
        store = STORES[kind](tmp_path)
        held: list[tuple[StoredSlice, Tensor]] = []
        for _ in range(600):
            act = draw.choice(("allocate", "store", "store", "load", "load", "free"))
            if act == "allocate" or not held:
                numel, dtype = draw.choice((1, 3, 100, 1024, 7000, 20000)), draw.choice(DTYPES)
                held.append((store.allocate(numel, dtype), torch.zeros(numel, dtype=dtype)))
                continue
            found, expected = chosen = draw.choice(held)
            assert (found.numel(), found.dtype) == (expected.numel(), expected.dtype)
            start = draw.randrange(found.numel())
            numel = draw.randint(1, found.numel() - start)
            if act == "store":
                expected[start : start + numel] = values = drawn(numel, found.dtype)
                found.store(start, values)
            elif act == "load":
                into = torch.full((numel,), 7, dtype=found.dtype)
                assert torch.equal(found.load(start, into), expected[start : start + numel])
            else:
                found.free()
                held = [each for each in held if each is not chosen]
        for found, expected in held:
            assert torch.equal(found.load(0, torch.empty_like(expected)), expected)
            found.free()


NUMEL = BLOCK // 4 - 100  # of float32: no multiple of a block


def test_memory_is_constant_and_files_are_few(tmp_path: Path) -> None:
    """Five hundred slices pass through as much memory as five, in a few files that are little larger than they."""
    store, allocated = in_files(tmp_path), []
    found = []
    with late_copies():
        for number in range(500):
            found.append(store.allocate(NUMEL, torch.float32))
            found[-1].store(0, torch.full((NUMEL,), float(number)))
            assert store._states is not None
            allocated.append(store._states._memory.allocated_bytes)
        opened = sizes_of_open_files(tmp_path)
        assert len(opened) < 40
        assert 500 * NUMEL * 4 <= sum(opened) < 500 * NUMEL * 4 * 1.2
        for number, one in enumerate(found):
            assert bool((one.load(0, torch.empty(NUMEL)) == number).all())
    allocated.append(store._states._memory.allocated_bytes)
    assert allocated[4] == allocated[-1] == 3 * 2 * BLOCK  # each buffer is aligned within twice as much here


def test_files_are_closed_one_by_one(tmp_path: Path) -> None:
    """The space of slices that have been freed is another's before the last one is, and nothing is left at the end."""
    store, left = in_files(tmp_path), []
    found = [store.allocate(NUMEL, torch.float32) for _ in range(40)]
    for number, one in enumerate(found):
        one.store(0, torch.full((NUMEL,), float(number)))
    for number, one in enumerate(found):
        left.append(sum(sizes_of_open_files(tmp_path)))
        assert bool((one.load(0, torch.empty(NUMEL)) == number).all())
        one.free()
    assert left == sorted(left, reverse=True) and len(set(left)) > 5
    assert all(nbytes < (40 - number) * NUMEL * 4 + 4 * SEGMENT for number, nbytes in enumerate(left))
    assert sizes_of_open_files(tmp_path) == [] and list(tmp_path.iterdir()) == []
    again = store.allocate(NUMEL, torch.float32)
    assert torch.equal(again.load(0, torch.empty(NUMEL)), torch.zeros(NUMEL))
    again.free()
    assert sizes_of_open_files(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="file/folder"):
        in_files(tmp_path / "file" / "folder").allocate(1, torch.float32)
