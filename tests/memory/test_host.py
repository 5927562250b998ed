"""Tests host memory: stored values, reuse of buffers, what is counted where, and streams where there is a GPU."""

import ctypes
import gc
import os
import platform
import re
import resource
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.each import each
from support.warm_python import warm_python
from torch import Tensor

from megazero.errors import MemoryLimitError
from megazero.memory.host import (
    HostMemory,
    HostTensor,
    host_bandwidth,
    host_bytes,
    retain_freed_memory,
    return_freed_memory,
)
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_interface import NullLedger
from megazero.planner.dry.hollow import Hollow

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return any bit patterns, NaN among them (bools are 0 or 1)."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    numel = torch.Size(shape).numel()
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


@each("dtype", DTYPES)
@each("shape", [(), (1,), (7,), (3, 5), (1, 13, 2), (0, 4)])
def test_every_bit_comes_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = random_bytes(shape, dtype)
    expected = bits(x)
    stored = HostMemory(CPU).store(x)
    stored.sent()
    if dtype != torch.bool:
        x.fill_(0)
    back = stored.load()
    assert (back.shape, back.dtype, back.device, bits(back)) == (shape, dtype, CPU, expected)
    assert stored.nbytes == back.nbytes
    stored.release()


def test_a_copy_shares_nothing_with_its_source_or_its_buffer() -> None:
    memory = HostMemory(CPU)
    x = torch.arange(6.0)
    first = memory.store(x)
    x.fill_(-1)
    loaded = first.load()
    first.release()
    second = memory.store(torch.zeros(6))  # goes into the same buffer
    assert memory.buffer_bytes == 24
    assert loaded.tolist() == [0, 1, 2, 3, 4, 5]
    second.release()


def test_what_autograd_knows_stays_behind() -> None:
    weight = torch.ones(3, requires_grad=True)
    stored = HostMemory(CPU).store(weight * 2)
    back = stored.load()
    assert not back.requires_grad and back.grad_fn is None and back.tolist() == [2, 2, 2]


def test_the_source_is_kept_until_it_was_sent() -> None:
    with Ledger(CPU) as ledger:
        memory = HostMemory(CPU, ledger=ledger)
        x = torch.zeros(50)
        stored = memory.store(x)
        del x
        assert sum(ledger.live_bytes().values()) == 200
        stored.sent()
        stored.sent()
        assert sum(ledger.live_bytes().values()) == 0
        again = memory.store(torch.zeros(50))
        again.release()  # without a check before it that the copy was sent
        assert sum(ledger.live_bytes().values()) == 0


@each(
    ("nbytes", "is_pinned", "rule", "legal"),
    [
        (1 << 60, False, "the system has that much left for this process", "device nvme"),
        (1 << 60, True, "the system has that much left for this process: Cannot allocate memory", "device nvme"),
        (17 << 20, True, "CUDA pins it (2)", "offload_pin_memory false"),
    ],
)
def test_memory_that_is_not_to_be_had(
    nbytes: int, is_pinned: bool, rule: str, legal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's refusal is that of a runtime which pins nothing: there need be no GPU."""
    runtime = SimpleNamespace(cudaHostRegister=lambda *area: 2, cudaError=SimpleNamespace(success=0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(MemoryLimitError) as refused:
        host_bytes(nbytes, is_pinned=is_pinned, ledger=NullLedger())
    given, *rest = str(refused.value).splitlines()
    assert re.fullmatch(rf"memory limit exceeded: {nbytes} bytes \(.*iB\) of host memory for what is offloaded", given)
    assert rest[0] == f"    rule:  {rule}" and rest[1].endswith(legal)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's runtime pins it")
def test_a_small_buffer_that_is_not_pinned_is_the_same_error() -> None:
    with pytest.raises(MemoryLimitError, match=r"4096 bytes(?s:.*)CUDA pins it \((?s:.*)offload_pin_memory false"):
        host_bytes(4096, is_pinned=True, ledger=NullLedger())


def test_the_way_back_begins_once() -> None:
    memory = HostMemory(CPU)
    ahead, late = memory.store(torch.ones(4)), memory.store(torch.ones(4))
    ahead.prefetch()
    ahead.prefetch()
    assert memory.fetched_bytes == 16
    assert ahead.load() is ahead.load()
    assert memory.fetched_bytes == 16
    assert late.load().tolist() == [1, 1, 1, 1]  # no prefetch was made of it
    assert memory.fetched_bytes == 32
    never = memory.store(torch.ones(4))
    never.prefetch()
    never.release()


def test_after_letting_go_another_load_brings_it_again() -> None:
    with Ledger(CPU) as ledger:
        memory = HostMemory(CPU, ledger=ledger)
        stored = memory.store(torch.arange(3.0))
        stored.sent()
        mine = stored.load()
        mine += 1
        stored.release_copy()
        assert sum(ledger.live_bytes().values()) == 12  # the bytes of `mine`
        del mine
        assert sum(ledger.live_bytes().values()) == 0
        assert stored.load().tolist() == [0, 1, 2]
        assert memory.fetched_bytes == 24
        stored.release()
        assert sum(ledger.live_bytes().values()) == 0


def test_the_way_back_may_lead_into_memory_that_is_given() -> None:
    memory = HostMemory(CPU)
    arena = torch.zeros(10)
    stored = memory.store(torch.arange(6.0).view(2, 3))
    stored.prefetch(arena[2:8])
    back = stored.load()
    assert back.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arena.tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 0, 0]
    assert back.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr()
    stored.release_copy()
    with pytest.raises(AssertionError, match="24 bytes don't come back into 48"):
        stored.prefetch(torch.zeros(6, dtype=torch.float64))


def test_buffers_are_used_again_by_size() -> None:
    memory = HostMemory(CPU)
    for dtype in (torch.float32, torch.int32, torch.uint8):
        a, b = memory.store(torch.zeros(32 // dtype.itemsize, dtype=dtype)), memory.store(torch.zeros(5))
        assert memory.live_bytes == 52
        a.release()
        b.release()
    assert (memory.buffer_bytes, memory.live_bytes, memory.peak_bytes) == (52, 0, 52)
    assert (memory.sent_bytes, memory.fetched_bytes) == (156, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40))
def test_any_history(moves: list[tuple[int, int]]) -> None:
    """Moves 0 and 1 store that many floats, 2 loads, 3 releases; contents and statistics are those of plain lists."""
    memory = HostMemory(CPU)
    held: list[tuple[HostTensor, list[float]]] = []
    made: dict[int, int] = {}
    peak = sent = 0
    for move, number in moves:
        if move < 2:
            x = torch.rand(number)
            held.append((memory.store(x), x.tolist()))
            held[-1][0].sent()
            sent += x.nbytes
            in_use = sum(stored.nbytes == x.nbytes for stored, _ in held)
            made[x.nbytes] = max(made.get(x.nbytes, 0), in_use)
        elif held and move == 2:
            stored, expected = held[number % len(held)]
            assert stored.load().tolist() == expected
        elif held:
            held.pop(number % len(held))[0].release()
        live = sum(stored.nbytes for stored, _ in held)
        peak = max(peak, live)
        assert (memory.live_bytes, memory.peak_bytes, memory.sent_bytes) == (live, peak, sent)
        assert memory.buffer_bytes == sum(nbytes * count for nbytes, count in made.items())


def test_a_host_tensor_is_released_once_and_then_gone() -> None:
    stored = HostMemory(CPU).store(torch.zeros(2))
    stored.release()
    with pytest.raises(AssertionError, match="released once"):
        stored.release()
    for use in (stored.prefetch, stored.load):
        with pytest.raises(AssertionError, match="cannot be copied back"):
            use()


def test_only_dense_tensors_of_the_device_are_stored() -> None:
    memory = HostMemory(CPU)
    with pytest.raises(AssertionError, match=r"strides \(1, 3\)"):
        memory.store(torch.zeros(2, 3).t())
    with pytest.raises(AssertionError, match=r"not strides .* on meta"):
        memory.store(torch.zeros(2, device="meta"))
    assert memory.live_bytes == 0


@pytest.mark.parametrize("hollow", [False, True])
def test_a_ledger_counts_device_memory_alone(hollow: bool) -> None:
    """No buffer is counted as device memory at any moment, not even on a CPU, where both kinds of memory look alike."""
    mode = Hollow() if hollow else torch.no_grad()
    with mode, Ledger(CPU, limit_bytes=800) as ledger:
        memory = HostMemory(CPU, ledger=ledger)
        kept = []
        for _ in range(5):
            x = torch.zeros(100)
            kept.append(memory.store(x))
            kept[-1].sent()
            del x
        assert sum(ledger.live_bytes().values()) == 0
        assert ledger.elsewhere_bytes() == memory.live_bytes == 2000
        with ledger.category("activation_checkpoints"):
            back = kept[2].load()
        assert back.shape == (100,)
        assert ledger.live_bytes()["activation_checkpoints"] == 400 == sum(ledger.live_bytes().values())
        for stored in kept:
            stored.release()
        del back
        step = ledger.take()
    assert step.peak_bytes == 400
    assert step.timeline.totals[-1] == 0
    assert ledger.elsewhere_bytes() == memory.buffer_bytes == 2000  # the pool's buffers
    del memory, kept, stored
    gc.collect()
    assert ledger.elsewhere_bytes() == 0


def test_bandwidth_is_that_of_copies() -> None:
    """The measured bandwidth is within the range of any memory, and a measurement of no bytes is positive too."""
    nbytes = 1 << 22
    measured = host_bandwidth(CPU, nbytes)
    assert 1e8 < measured < 1e13
    assert host_bandwidth(CPU, 0) > 0


@pytest.mark.cuda
def test_streams_order_copies_and_computation() -> None:
    """A copy that came late would be wrong: sources are overwritten and copies read while the device is kept busy."""
    device = torch.device("cuda", torch.cuda.current_device())
    memory = HostMemory(device)
    busy = torch.randn(2048, 2048, device=device)
    for round_ in range(5):
        held = []
        for layer in range(4):
            x = torch.full((1 << 22,), float(layer + round_), device=device)
            held.append(memory.store(x))
            busy @= busy
            busy /= busy.norm()
            held[-1].sent()
            x.fill_(-1.0)
            del x
        for layer in reversed(range(4)):
            if layer:
                held[layer - 1].prefetch()
            busy @= busy
            busy /= busy.norm()
            back = held[layer].load()
            assert (back == layer + round_).all().item()
            held[layer].release()
    assert memory.buffer_bytes == memory.peak_bytes == 4 * (1 << 24)


# --- freed memory goes back to the system ----------------------------------------------------------------------------

PIECE, PIECES = 100_000, 400  # smaller than the pieces that the C library maps, and unmaps, one by one


def resident_kib() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_holes_are_given_back() -> None:
    """Freeing every second of many small pieces leaves holes, which are returned although the heap cannot shrink."""
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
    assert not retain_freed_memory(torch.device("cuda"))


# Prints the page faults of a temporary of 24 MiB that a process of its own makes for the second time.
SECOND_TEMPORARY = """
import resource, torch
from megazero.memory.host import retain_freed_memory

print(int(retain_freed_memory(torch.device("cpu"))))
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(6 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.parametrize("own", [{}, {"MALLOC_TRIM_THRESHOLD_": "0"}], ids=["retained", "settings of its own"])
def test_freed_memory_is_retained(own: dict[str, str]) -> None:
    """Temporaries of a step touch the pages of the step before, unless the environment has settings of its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **own}
    command = [warm_python(), "-c", SECOND_TEMPORARY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    retains, faults = map(int, done.stdout.split())
    pages = (24 << 20) // resource.getpagesize()
    assert (retains, faults < pages // 10) == (0, False) if own else (1, True), done.stdout


@pytest.mark.cuda
def test_large_blocks_are_pinned_without_rounding() -> None:
    """A block is pinned, of the bytes that were asked for and no more, and is given back with its tensor."""
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    for nbytes in ((1 << 26) + 4096, (1 << 26) + 1):
        buffer = host_bytes(nbytes, is_pinned=True, ledger=NullLedger())
        assert buffer.is_pinned() and buffer.nbytes == nbytes and not buffer.any()
        there = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
        buffer.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert buffer.all()
        view = buffer[8:16].view(torch.int64)
        del buffer
        assert view.is_pinned() and int(view) == 0x0101010101010101
        del view
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
