"""Stores for copies of activation checkpoints: separate device memory, the arena, the host.

A `StoredCopy` holds one flat tensor from forward to backward:

    store(x) -- release_source() -->  x may be freed      prefetch() -->  on its way back      tensor() -->  to be read
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Protocol

import torch
from torch import Tensor

from megazero.memory.arena import Arena, ArenaBlock
from megazero.memory.host import HostMemory, HostTensor
from megazero.memory.ledger_interface import AnyLedger
from megazero.units import format_bytes

# Every address in the arena is a multiple of this number of bytes.
_ALIGNMENT = 64


class StoredCopy(Protocol):
    """A copy of one flat tensor."""

    def release_source(self) -> None:
        """Wait until the memory of the copied tensor may be overwritten or freed."""

    def prefetch(self) -> None:
        """Begin to copy the tensor back to the device, if it isn't there."""

    def tensor(self) -> Tensor:
        """Return the copy, [numel], on the device; it stays where it is until `unpin` or `release`."""

    def unpin(self) -> None:
        """Undo `tensor`: the caller has read the tensor, or holds a reference of its own."""

    def release(self) -> None:
        """Free the memory, once."""


class CopyStore(Protocol):
    """Memory for copies of activation checkpoints."""

    def begin_pass(self) -> None:
        """Prepare for a forward."""

    def store(self, source: Tensor) -> StoredCopy:
        """Store a copy of `source`, [numel]."""

    def describe(self) -> tuple[str, ...]:
        """Return statistics since the start of the run, line by line."""


class ReleaseQueue:
    """A queue of copies whose checkpoints are gone.

    A graph may end in any thread (collectives in flight refer to it for a while) and, by the garbage collector, at any
    moment, but stores are not thread-safe.  So copies are released here, one after the other, and never inside
    `deferred`.
    """

    def __init__(self) -> None:
        self._copies: deque[StoredCopy] = deque()
        self._lock = RLock()
        self._num_deferring = 0

    def add(self, copy: StoredCopy) -> None:
        """Release a copy, at once or when the current `deferred` ends."""
        self._copies.append(copy)
        self._release_all()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer releases inside: copies are being made and read."""
        self._release_all()
        with self._defer():
            yield
        self._release_all()

    @contextmanager
    def _defer(self) -> Iterator[None]:
        with self._lock:
            self._num_deferring += 1
            try:
                yield
            finally:
                self._num_deferring -= 1

    def _release_all(self) -> None:
        """Release all queued copies, unless this or another thread is inside `deferred`, whose end releases them."""
        while self._copies and self._lock.acquire(blocking=False):
            try:
                if self._num_deferring or not self._copies:
                    return
                with self._defer():
                    self._copies.popleft().release()
            finally:
                self._lock.release()


class DeviceStore:
    """A store in which every copy has device memory of its own."""

    def __init__(self, device: torch.device, *, ledger: AnyLedger) -> None:
        self._device = device
        self._ledger = ledger

    def begin_pass(self) -> None:
        """Do nothing: no memory is allocated ahead."""

    def store(self, source: Tensor) -> StoredCopy:
        return _filled(self.allocate(source.numel(), source.dtype), source)

    def describe(self) -> tuple[str, ...]:
        return ()

    def allocate(self, numel: int, dtype: torch.dtype) -> StoredCopy:
        """Allocate a copy whose elements are undefined."""
        tensor = torch.empty(numel, dtype=dtype, device=self._device)
        self._ledger.tag(tensor, "activation_checkpoints")
        return _DeviceCopy(tensor)


def _filled(copy: StoredCopy, source: Tensor) -> StoredCopy:
    copy.tensor().copy_(source)
    copy.unpin()
    return copy


class _DeviceCopy:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def release_source(self) -> None:
        """Do nothing: the copy has been made on the device's own stream."""

    def prefetch(self) -> None:
        """Do nothing: the copy is on the device."""

    def tensor(self) -> Tensor:
        assert self._tensor is not None, "a copy is read before it is released"
        return self._tensor

    def unpin(self) -> None:
        """Do nothing: the memory stays until `release`, for backward may run through the graph once more."""

    def release(self) -> None:
        self._tensor = None


class ArenaStore:
    """A store in one arena with room for `number` copies of the first one's size (ZeRO, section 6.3).

    Where the number isn't known, the arena is allocated when the second pass begins, of the size of the first, and
    reallocated when a pass was larger.  Copies that don't fit have memory of their own; `num_outside` counts them.
    """

    def __init__(self, number: int | None, device: torch.device, *, ledger: AnyLedger) -> None:
        self.arena: Arena | None = None
        self.num_outside = 0
        self._number = number
        self._device = device
        self._ledger = ledger
        self._outside = DeviceStore(device, ledger=ledger)
        self._pass_bytes = 0

    def begin_pass(self) -> None:
        capacity = 0 if self.arena is None else self.arena.statistics.capacity_bytes
        is_free = self.arena is None or not self.arena.statistics.live_bytes
        if self._number is None and self._pass_bytes > capacity and is_free:
            self.arena = None  # freed before the larger one is allocated
            self._allocate_arena(self._pass_bytes)
        self._pass_bytes = 0

    def store(self, source: Tensor) -> StoredCopy:
        return _filled(self.allocate(source.numel(), source.dtype), source)

    def allocate(self, numel: int, dtype: torch.dtype) -> StoredCopy:
        """Allocate a copy whose elements are undefined."""
        nbytes = -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self.arena is None and self._number is not None:
            self._allocate_arena(self._number * nbytes)
        self._pass_bytes += nbytes
        if self.arena is None:
            return self._outside.allocate(numel, dtype)
        block = self.arena.allocate(numel, dtype)
        if block is None:
            self.num_outside += 1
            return self._outside.allocate(numel, dtype)
        return _ArenaCopy(block)

    def describe(self) -> tuple[str, ...]:
        if self.arena is None:
            return ()
        outside = f"{self.num_outside} activation checkpoints outside"
        return (f"activation checkpoint arena: {self.arena.statistics.describe()}, {outside}",)

    def _allocate_arena(self, nbytes: int) -> None:
        self.arena = Arena(
            nbytes, self._device, category="activation_checkpoints", ledger=self._ledger, alignment=_ALIGNMENT
        )


class _ArenaCopy:
    """A block of the arena, which moves when the arena is compacted, but not while it is pinned."""

    def __init__(self, block: ArenaBlock) -> None:
        self._block = block
        self._is_pinned = False

    def release_source(self) -> None:
        """Do nothing: the copy has been made on the device's own stream."""

    def prefetch(self) -> None:
        """Do nothing: the copy is on the device."""

    def tensor(self) -> Tensor:
        if not self._is_pinned:
            self._block.pin()
            self._is_pinned = True
        return self._block.tensor

    def unpin(self) -> None:
        if self._is_pinned:
            self._block.unpin()
            self._is_pinned = False

    def release(self) -> None:
        self.unpin()
        self._block.release()


class HostStore:
    """A store in host memory (Pa+cpu), whose copies come back into a device store while they are in use."""

    def __init__(self, host: HostMemory, device_store: DeviceStore | ArenaStore) -> None:
        self.host = host
        self.device_store = device_store

    def begin_pass(self) -> None:
        """Do nothing: host buffers are allocated on first use, and reused."""

    def store(self, source: Tensor) -> StoredCopy:
        return _HostCopy(self.host.store(source), self.device_store)

    def describe(self) -> tuple[str, ...]:
        host = self.host
        moved = f"{format_bytes(host.sent_bytes)} sent, {format_bytes(host.fetched_bytes)} fetched"
        in_host = f"activation checkpoints in host memory: at most {format_bytes(host.peak_bytes)}, {moved}"
        return (in_host, *self.device_store.describe())


class _HostCopy:
    def __init__(self, stored: HostTensor, device_store: DeviceStore | ArenaStore) -> None:
        self._stored = stored
        self._device_store = device_store
        self._device_copy: StoredCopy | None = None

    def release_source(self) -> None:
        self._stored.sent()

    def prefetch(self) -> None:
        if self._device_copy is None:
            self._device_copy = self._device_store.allocate(self._stored.numel, self._stored.dtype)
            self._stored.prefetch(self._device_copy.tensor())

    def tensor(self) -> Tensor:
        self.prefetch()
        return self._stored.load()

    def unpin(self) -> None:
        self._stored.release_copy()
        self._release_device_copy()

    def release(self) -> None:
        self._stored.release()
        self._release_device_copy()

    def _release_device_copy(self) -> None:
        copy, self._device_copy = self._device_copy, None
        if copy is not None:
            copy.release()
