"""Constant-size buffers (ZeRO, section 6.2): temporaries that never grow with the model.

A pool has buffers of one stated number of bytes.  A temporary is *leased* and *released*; the pool makes a new buffer
only when all are leased, and `num_buffers` is therefore the largest number that was ever leased at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megazero.memory.ledger_interface import AnyLedger, NullLedger


class FusedBuffers:
    """A pool of equal buffers of `buffer_bytes` bytes on `device`."""

    def __init__(
        self,
        buffer_bytes: int,
        device: torch.device,
        *,
        ledger: AnyLedger | None = None,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        """allocate: makes the memory of a buffer, uint8 [bytes]; by default the device's, which the ledger counts."""
        self.buffer_bytes = buffer_bytes
        self._ledger = ledger or NullLedger()
        self._device = device
        self._allocate = allocate or self._allocate_on_device
        self._free: list[Tensor] = []
        self.num_buffers = 0

    @property
    def total_bytes(self) -> int:
        """The bytes of all the pool's buffers, leased or not."""
        return self.num_buffers * self.buffer_bytes

    def resize(self, buffer_bytes: int) -> None:
        """Change the size of the pool's buffers while none is leased."""
        assert len(self._free) == self.num_buffers, "buffers are resized only while none is leased"
        self._free.clear()
        self.num_buffers = 0
        self.buffer_bytes = buffer_bytes

    def lease(self, numel: int, dtype: torch.dtype) -> "BufferLease":
        """Lease a tensor of `numel` elements of `dtype`, contents undefined, until it is released."""
        nbytes = numel * dtype.itemsize
        assert nbytes <= self.buffer_bytes, f"{nbytes} bytes leased from buffers of {self.buffer_bytes}"
        if not self._free:
            self._free.append(self._allocate(self.buffer_bytes))
            self.num_buffers += 1
        storage = self._free.pop()
        return BufferLease(self, storage, storage[:nbytes].view(dtype))

    def keep(self, nbytes: int) -> Tensor:
        """Allocate memory beside the buffers that is never returned, uint8 [nbytes], contents undefined."""
        return self._allocate(nbytes)

    def _allocate_on_device(self, nbytes: int) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._ledger.tag(buffer, "communication_buffers")
        return buffer

    def free(self, storage: Tensor) -> None:
        """Make a released buffer available again."""
        self._free.append(storage)


class BufferLease:
    """A leased buffer, which is also a context manager that releases it."""

    def __init__(self, pool: FusedBuffers, storage: Tensor, tensor: Tensor) -> None:
        self._pool = pool
        self._storage: Tensor | None = storage
        self.tensor = tensor

    def release(self) -> None:
        assert self._storage is not None, "a buffer is released once"
        self._pool.free(self._storage)
        self._storage = None

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *exc: object) -> None:
        self.release()
