"""Copies, reads and writes that finish as late as they may: when somebody waits for them.

Until then their targets are full of NaN, and so is the memory of what is in a file alone.  What is queued `ahead`
waits, unless ranks are alone: the gather of one rank does nothing, and so waits for nothing.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import RLock
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from megazero.memory.block_file import AlignedMemory, BlockIO, Transfer


class _Memory(NamedTuple):
    """Memory that is copied from or to, which the copy does not keep alive: whoever begins a copy retains it."""

    address: int
    numel: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Memory":
        assert tensor.is_contiguous(), "states are flat"
        return cls(tensor.data_ptr(), tensor.numel(), tensor.dtype)

    def tensor(self) -> Tensor:
        """Return a flat tensor in the memory."""
        content = (ctypes.c_byte * (self.numel * self.dtype.itemsize)).from_address(self.address)
        return torch.frombuffer(content, dtype=self.dtype) if self.numel else torch.empty(0, dtype=self.dtype)


class LateCopies:
    """A stream of copies, which are made in order, once the arrival of one of them or of a later one is waited for."""

    def __init__(self, device: torch.device, *, waits_ahead: bool = True) -> None:
        self._waits_ahead = waits_ahead
        self._queue: deque[tuple[int, _Memory, _Memory]] = deque()
        self._number = 0
        self._making = RLock()  # by one thread at a time

    def copy(self, target: Tensor, source: Tensor) -> "_LateArrival":
        self._queue.append((self._number, _Memory.of(target), _Memory.of(source)))
        target.fill_(torch.nan if target.is_floating_point() else -1)
        self._number += 1
        return _LateArrival(self, self._number - 1, waits_ahead=self._waits_ahead)

    def make(self, last: int) -> None:
        """Make the copies up to the one with this number."""
        with self._making:
            while self._queue and self._queue[0][0] <= last:
                _, target, source = self._queue.popleft()
                target.tensor().copy_(source.tensor())


class _LateArrival:
    def __init__(self, stream: LateCopies, number: int, *, waits_ahead: bool) -> None:
        self._stream = stream
        self._number = number
        self._waits_ahead = waits_ahead

    def wait(self) -> None:
        self._stream.make(self._number)

    def ahead(self) -> AbstractContextManager[object]:
        if self._waits_ahead:
            self.wait()
        return nullcontext()

    def finish(self) -> None:
        self.wait()


@contextmanager
def late_copies(*, waits_ahead: bool = True) -> Iterator[None]:
    """Let all be late that engines made inside copy between a home and the device, and read from files and write."""
    requests: deque[Callable[[], None]] = deque()
    making = RLock()

    def submit(io: BlockIO, request: Callable[[], None]) -> None:
        requests.append(request)

    def finish(transfer: Transfer) -> None:
        with making:
            while not transfer.is_done:
                requests.popleft()()

    with (
        patch("megazero.memory.homes.copy_stream", partial(LateCopies, waits_ahead=waits_ahead)),
        patch.object(BlockIO, "submit", submit),
        patch.object(Transfer, "finish", finish),
        patch.object(AlignedMemory, "lease", _poisoned(AlignedMemory.lease)),
        patch.object(AlignedMemory, "free", _poisoned(AlignedMemory.free)),
    ):
        yield


def _poisoned(call: Callable[[AlignedMemory, Any], Any]) -> Callable[[AlignedMemory, Any], Any]:
    """Return the call of a pool that fills the buffer, which it takes or returns, with NaN of every format."""

    def filled(pool: AlignedMemory, given: Any) -> Any:
        found = call(pool, given)
        (given if found is None else found).fill_(0xFF)
        return found

    return filled
