"""Where copies of checkpoints are kept: memory of their own, the arena, the host.

A *place* holds one flat tensor from forward to backward:

    put(x) -- leave() -->  x's memory may go      fetch() -->  on its way back      tensor() -->  to be read
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

# Bytes of which every address in the arena is a multiple.
_ALIGNMENT = 64


class Place(Protocol):
    """One flat tensor that is kept."""

    def leave(self) -> None:
        """From here on the memory of what was put may be overwritten or freed."""

    def fetch(self) -> None:
        """Begin to bring it to the device, if it isn't there."""

    def tensor(self) -> Tensor:
        """The tensor, [numel], on the device; to be read until `release`."""

    def read(self) -> None:
        """Whoever asked for the tensor holds it himself from now on, or has read it."""

    def release(self) -> None:
        """Give the memory up, once."""


class Places(Protocol):
    """Memory for checkpoints."""

    def begin_pass(self) -> None:
        """A forward begins."""

    def put(self, source: Tensor) -> Place:
        """Keep a copy of source [numel]."""

    def describe(self) -> tuple[str, ...]:
        """Statistics since the beginning, line by line."""


class GivenUp:
    """Places whose checkpoints are gone, on their way to being released.

    A graph may end in any thread (collectives in flight hold on to it for a while) and, by the garbage collector, at
    any moment; what is kept of places isn't made for that.  So they are released here, one after the other, and never
    while somebody `hold`s.
    """

    def __init__(self) -> None:
        self._places: deque[Place] = deque()
        self._lock = RLock()
        self._num_holding = 0

    def add(self, place: Place) -> None:
        """The place is not needed any more."""
        self._places.append(place)
        self._release_all()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Places are being taken and read inside; what is given up meanwhile is released at the end."""
        self._release_all()
        with self._held():
            yield
        self._release_all()

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock:
            self._num_holding += 1
            try:
                yield
            finally:
                self._num_holding -= 1

    def _release_all(self) -> None:
        """Unless another thread, or a caller of this one, is at work: then that one does it when it is done."""
        while self._places and self._lock.acquire(blocking=False):
            try:
                if self._num_holding or not self._places:
                    return
                with self._held():
                    self._places.popleft().release()
            finally:
                self._lock.release()


class OnDevice:
    """Every copy has memory of its own."""

    def __init__(self, device: torch.device, *, ledger: AnyLedger) -> None:
        self._device = device
        self._ledger = ledger

    def begin_pass(self) -> None:
        """Nothing is made in advance."""

    def put(self, source: Tensor) -> Place:
        return _filled(self.room(source.numel(), source.dtype), source)

    def describe(self) -> tuple[str, ...]:
        return ()

    def room(self, numel: int, dtype: torch.dtype) -> Place:
        """A place whose tensor is still undefined."""
        tensor = torch.empty(numel, dtype=dtype, device=self._device)
        self._ledger.tag(tensor, "activation_checkpoints")
        return _Alone(tensor)


def _filled(place: Place, source: Tensor) -> Place:
    place.tensor().copy_(source)
    place.read()
    return place


class _Alone:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def leave(self) -> None:
        """It is a copy."""

    def fetch(self) -> None:
        """It is there."""

    def tensor(self) -> Tensor:
        assert self._tensor is not None, "a place is read before it is released"
        return self._tensor

    def read(self) -> None:
        """Backward may walk the graph once more."""

    def release(self) -> None:
        self._tensor = None


class InArena:
    """Copies lie in one arena with room for `number` of the first one's size (paper section 6.3).

    Where the number isn't known, the arena is made when the second pass begins, of the size of the first, and made anew
    when a pass was larger.  What doesn't fit has memory of its own; `num_outside` counts it.
    """

    def __init__(self, number: int | None, device: torch.device, *, ledger: AnyLedger) -> None:
        self.arena: Arena | None = None
        self.num_outside = 0
        self._number = number
        self._device = device
        self._ledger = ledger
        self._outside = OnDevice(device, ledger=ledger)
        self._pass_bytes = 0

    def begin_pass(self) -> None:
        capacity = 0 if self.arena is None else self.arena.statistics.capacity_bytes
        is_free = self.arena is None or not self.arena.statistics.live_bytes
        if self._number is None and self._pass_bytes > capacity and is_free:
            self.arena = None  # before the larger one comes
            self._make(self._pass_bytes)
        self._pass_bytes = 0

    def put(self, source: Tensor) -> Place:
        return _filled(self.room(source.numel(), source.dtype), source)

    def room(self, numel: int, dtype: torch.dtype) -> Place:
        """A place whose tensor is still undefined."""
        nbytes = -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self.arena is None and self._number is not None:
            self._make(self._number * nbytes)
        self._pass_bytes += nbytes
        if self.arena is None:
            return self._outside.room(numel, dtype)
        block = self.arena.allocate(numel, dtype)
        if block is None:
            self.num_outside += 1
            return self._outside.room(numel, dtype)
        return _InBlock(block)

    def describe(self) -> tuple[str, ...]:
        if self.arena is None:
            return ()
        return (f"checkpoint arena: {self.arena.statistics.describe()}, {self.num_outside} checkpoints outside",)

    def _make(self, nbytes: int) -> None:
        self.arena = Arena(
            nbytes, self._device, category="activation_checkpoints", ledger=self._ledger, alignment=_ALIGNMENT
        )


class _InBlock:
    """A block of the arena, which moves when the arena is compacted, but not while its tensor is being read."""

    def __init__(self, block: ArenaBlock) -> None:
        self._block = block
        self._is_pinned = False

    def leave(self) -> None:
        """It is a copy."""

    def fetch(self) -> None:
        """It is there."""

    def tensor(self) -> Tensor:
        if not self._is_pinned:
            self._block.pin()
            self._is_pinned = True
        return self._block.tensor

    def read(self) -> None:
        if self._is_pinned:
            self._block.unpin()
            self._is_pinned = False

    def release(self) -> None:
        self.read()
        self._block.release()


class OnHost:
    """Copies go to host memory (Pa+cpu), and come back into `rooms` on the device for a while."""

    def __init__(self, host: HostMemory, rooms: OnDevice | InArena) -> None:
        self.host = host
        self.rooms = rooms

    def begin_pass(self) -> None:
        """Host buffers are made when they are needed, and used again."""

    def put(self, source: Tensor) -> Place:
        return _InHost(self.host.store(source), self.rooms)

    def describe(self) -> tuple[str, ...]:
        host = self.host
        moved = f"{format_bytes(host.sent_bytes)} sent, {format_bytes(host.fetched_bytes)} fetched"
        return (f"checkpoints in host memory: at most {format_bytes(host.peak_bytes)}, {moved}", *self.rooms.describe())


class _InHost:
    def __init__(self, stored: HostTensor, rooms: OnDevice | InArena) -> None:
        self._stored = stored
        self._rooms = rooms
        self._room: Place | None = None

    def leave(self) -> None:
        self._stored.sent()

    def fetch(self) -> None:
        if self._room is None:
            self._room = self._rooms.room(self._stored.numel, self._stored.dtype)
            self._stored.prefetch(self._room.tensor())

    def tensor(self) -> Tensor:
        self.fetch()
        return self._stored.load()

    def read(self) -> None:
        self._stored.release_copy()
        self._give_room_back()

    def release(self) -> None:
        self._stored.release()
        self._give_room_back()

    def _give_room_back(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.release()
