"""Host memory for tensors that leave the device for a while (ZeRO, section 6.1: Pa+cpu).

A *host tensor* is a dense device tensor that is being copied to host memory, is there, or is being copied back.  Its
*buffer* comes from a pool by byte size, because pinning memory is slow, and returns there when the tensor is released.

On CUDA all copies run on one stream of their own, beside the computation and one after the other; so a buffer is not
written again before its contents have been read.  The current stream waits where the result matters:

    store(x) ---- copy out ---->  sent()  : x may be overwritten      prefetch() ---- copy in ---->  load() : to be read

Device memory belongs to the current stream on both ways, and a source is retained until `sent`, so no memory is reused
while a copy is using it.  On a CPU the same calls make the same copies at once.
"""

import ctypes
import mmap
import os
import statistics
import time
from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor

from megazero.errors import MemoryLimitError, Problem
from megazero.memory.copies import Arrival, copy_stream
from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.units import format_bytes

_REPETITIONS = 5
# glibc's numbers of mallopt's settings, and their largest useful values, which it takes itself after the release of a
# block of 32 MiB: larger blocks come from the system and return there, as does free memory beyond 64 MiB.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK = 32 << 20
# Torch rounds pinned memory up to a power of two, and keeps what is free for later: for large blocks that is too much.
_LARGEST_ROUNDED = 16 << 20
_LESS = "less in host memory: more processes, a smaller offload_optimizer_ratio or sub_group_size, or device nvme"


class HostMemory:
    """A pool of buffers in host memory for tensors of `device`, and copies there and back.

    buffer_bytes: size of all the pool's buffers, in use or not.  live_bytes, peak_bytes: in use, now and at most.
    sent_bytes, fetched_bytes: bytes copied to the host and back since the beginning.
    """

    def __init__(self, device: torch.device, *, ledger: AnyLedger | None = None) -> None:
        self._on_cuda = device.type == "cuda"
        self._stream = copy_stream(device)
        self._ledger = ledger or NullLedger()
        self._device = device
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.buffer_bytes = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self.sent_bytes = 0
        self.fetched_bytes = 0

    def store(self, tensor: Tensor) -> "HostTensor":
        """Begin to copy a dense tensor of the device to the host; doesn't wait."""
        assert tensor.is_contiguous() and tensor.device == self._device, (
            f"a dense tensor on {self._device} is stored, not strides {tensor.stride()} on {tensor.device}"
        )
        tensor = tensor.detach()
        buffer = self.lease(tensor.nbytes)
        arrival = self._stream.copy(buffer.view(tensor.dtype).view(tensor.shape), tensor)
        self.sent_bytes += tensor.nbytes
        return HostTensor(self, buffer, tensor, arrival)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocate device memory of this shape to copy back into, its contents undefined."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def prefetch(self, buffer: Tensor, copy: Tensor) -> tuple[Tensor, Arrival]:
        """Begin to copy a buffer into `copy`, on the device."""
        assert copy.nbytes == buffer.nbytes, f"{buffer.nbytes} bytes don't come back into {copy.nbytes}"
        arrival = self._stream.copy(copy, buffer.view(copy.dtype).view(copy.shape))
        self.fetched_bytes += copy.nbytes
        return copy, arrival

    def free(self, buffer: Tensor) -> None:
        """Make a released buffer available again."""
        self._free[buffer.nbytes].append(buffer)
        self.live_bytes -= buffer.nbytes

    def lease(self, nbytes: int) -> Tensor:
        """Lease a buffer, uint8 [nbytes], contents undefined, until it is freed."""
        free = self._free[nbytes]
        buffer = free.pop() if free else self._new_buffer(nbytes)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return buffer

    def _new_buffer(self, nbytes: int) -> Tensor:
        self.buffer_bytes += nbytes
        return host_bytes(nbytes, is_pinned=self._on_cuda, ledger=self._ledger)


def host_bytes(nbytes: int, *, is_pinned: bool, ledger: AnyLedger) -> Tensor:
    """Allocate host memory, uint8 [nbytes], which a ledger of the device does not count; contents undefined.

    is_pinned: whether the system may not move it, so that a GPU copies it beside the computation.

    Raises MemoryLimitError if the system has no such memory, or does not let it be pinned.
    """
    if is_pinned:
        buffer = _pinned_by_torch(nbytes) if nbytes < _LARGEST_ROUNDED else _pinned_by_itself(nbytes)
        ledger.elsewhere(buffer, is_pinned=True)
        return buffer
    # On a CPU a ledger counts it as device memory until `elsewhere`, which comes while there are no bytes to count.
    buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
    ledger.elsewhere(buffer)
    try:
        return buffer.resize_(nbytes)
    except RuntimeError as error:  # torch has no class of its own for it
        raise _refused(nbytes, "the system has that much left for this process", _LESS) from error


def _refused(nbytes: int, rule: str, legal: str) -> MemoryLimitError:
    given = f"{nbytes} bytes ({format_bytes(nbytes)}) of host memory for what is offloaded"
    return MemoryLimitError(Problem(given, rule, legal))


def _pinned_by_torch(nbytes: int) -> Tensor:
    """Allocate pinned memory of torch's allocator, which rounds up; raises MemoryLimitError if the system refuses."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # torch has no class of its own for it
        raise _not_pinned(nbytes, str(error).partition("\n")[0]) from error


def _not_pinned(nbytes: int, reason: object) -> MemoryLimitError:
    return _refused(nbytes, f"CUDA pins it ({reason})", "less of it, or offload_pin_memory false")


class _PinnedMemory(mmap.mmap):
    """Pages that are pinned, until the tensor that is made of them is gone."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            torch.cuda.synchronize()  # a copy that is under way may still use it
            runtime = cast(Any, torch.cuda).cudart()
            runtime.cudaHostUnregister(self.address)


def _pinned_by_itself(nbytes: int) -> Tensor:
    """Allocate and pin memory of exactly so many bytes; raises MemoryLimitError if the system refuses."""
    try:
        memory = _PinnedMemory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _refused(nbytes, f"the system has that much left for this process: {error.strerror}", _LESS) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # of a system with larger pages, of which fewer are to be pinned
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    buffer.zero_()  # by all threads: pinning would make the pages by one
    runtime = cast(Any, torch.cuda).cudart()
    status = runtime.cudaHostRegister(buffer.data_ptr(), nbytes, 0)
    if status != runtime.cudaError.success:
        raise _not_pinned(nbytes, status)
    memory.address = buffer.data_ptr()
    return buffer


class HostTensor:
    """A tensor on the host; made by `HostMemory.store`, released once."""

    def __init__(self, memory: HostMemory, buffer: Tensor, source: Tensor, sent: Arrival) -> None:
        self._memory = memory
        self._buffer: Tensor | None = buffer
        self._shape = source.shape
        self.dtype = source.dtype
        self.numel = source.numel()
        self._source: Tensor | None = source
        self._sent = sent
        self._fetched: tuple[Tensor, Arrival] | None = None
        self.nbytes = buffer.nbytes

    def sent(self) -> None:
        """Wait until the source's memory may be overwritten or freed; until then it is retained."""
        if self._source is not None:
            self._sent.wait()
            self._source = None

    def prefetch(self, into: Tensor | None = None) -> None:
        """Begin to copy back, unless that has begun: into device memory of as many elements, or new memory."""
        assert self._buffer is not None, "a released host tensor cannot be copied back"
        if self._fetched is None:
            target = self._memory.empty(self._shape, self.dtype) if into is None else into.view(self._shape)
            self._fetched = self._memory.prefetch(self._buffer, target)

    def load(self) -> Tensor:
        """Return the tensor on the device, for work queued from here on; the same tensor until `release_copy`."""
        self.prefetch()
        assert self._fetched is not None
        copy, arrival = self._fetched
        arrival.wait()
        return copy

    def release_copy(self) -> None:
        """Release this reference to the device's copy; a later load makes another one."""
        if self._fetched is not None:
            # It may not have been waited for, and its memory must not be reused while it is being written.
            self._fetched[1].wait()
            self._fetched = None

    def release(self) -> None:
        """Return the buffer to the pool and release the device's copy, once."""
        assert self._buffer is not None, "a host tensor is released once"
        self.sent()
        self.release_copy()
        self._memory.free(self._buffer)
        self._buffer = None


def host_bandwidth(device: torch.device, nbytes: int) -> float:
    """Return the bytes a second copied to the host and back, each way counted: the median of some trips of `nbytes`."""
    memory, nbytes = HostMemory(device), max(nbytes, 1)
    memory.free(memory.lease(nbytes))  # before the device's, since its lack has a message of its own
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    seconds = [_round_trip(memory, tensor) for _ in range(1 + _REPETITIONS)]
    return 2 * tensor.nbytes / statistics.median(seconds[1:])  # the first trip pins memory


def _round_trip(memory: HostMemory, tensor: Tensor) -> float:
    _synchronize(tensor.device)
    start = time.perf_counter()
    there = memory.store(tensor)
    there.sent()
    there.load()
    _synchronize(tensor.device)
    seconds = time.perf_counter() - start
    there.release()
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def return_freed_memory(device: torch.device) -> bool:
    """Give freed memory back to the system, on a CPU whose C library can (glibc); return True if there was any."""
    if device.type != "cpu":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def retain_freed_memory(device: torch.device) -> bool:
    """Have the C library retain up to 64 MiB of freed memory on a CPU, if it is glibc; return True if it does.

    Every step allocates the same temporaries.  By default glibc returns them to the system, which clears each page
    when the next step touches it: two milliseconds for 4 MiB.  Settings in the environment (MALLOC_...) stay.
    """
    settings = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
    if device.type != "cpu" or any(name in os.environ for name in settings):
        return False
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose is None:
        return False
    return bool(choose(_MMAP_THRESHOLD, _LARGEST_BLOCK)) and bool(choose(_TRIM_THRESHOLD, 2 * _LARGEST_BLOCK))
