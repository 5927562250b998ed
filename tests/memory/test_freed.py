"""Freed memory goes back to the system."""

import ctypes
import platform

import pytest
import torch

from megazero.memory.host import return_freed_memory

PIECE, PIECES = 100_000, 400  # bytes; below what the C library would map, and unmap, by itself


def resident_kib() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_holes_are_given_back() -> None:
    """Every second of many small pieces is freed, which leaves holes that nobody can give back by growing smaller."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    pieces = [libc.malloc(PIECE) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    for piece in pieces[::2]:
        libc.free(piece)
    before = resident_kib()
    assert return_freed_memory(torch.device("cpu"))
    freed_kib = PIECES // 2 * PIECE // 1024
    assert before - resident_kib() > freed_kib // 2
    for piece in pieces[1::2]:
        libc.free(piece)


def test_memory_of_a_gpu_is_left_alone() -> None:
    assert not return_freed_memory(torch.device("cuda"))
