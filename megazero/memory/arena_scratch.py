"""Temporaries in an arena: leases side by side in memory that is allocated once, instead of constant-size buffers.

The arena is made of equal *slots*, and a lease takes as many neighbouring ones as it needs.  Leases of up to a slot
therefore never fragment it; they don't move either, because a collective may be in flight in them.
"""

import torch
from torch import Tensor

from megazero.memory.address_book import ArenaStatistics
from megazero.memory.arena import Arena
from megazero.memory.lease import Lease, Scratch
from megazero.memory.ledger_interface import AnyLedger


class ArenaScratch:
    """A pool of `num_slots` slots of `slot_bytes` bytes; leases that find no room come from `fallback`.

    The arena's failed requests are the leases that fell back.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, device: torch.device, *, fallback: Scratch, ledger: AnyLedger
    ) -> None:
        self._arena = Arena(
            num_slots * slot_bytes, device, category="communication_buffers", ledger=ledger, alignment=slot_bytes
        )
        self._fallback = fallback

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the largest tensor that can be leased."""
        return self._fallback.buffer_bytes

    @property
    def statistics(self) -> ArenaStatistics:
        return self._arena.statistics

    def contains(self, tensor: Tensor) -> bool:
        """Return True if the tensor lies in the arena."""
        return self._arena.contains(tensor)

    def lease(self, numel: int, dtype: torch.dtype) -> Lease:
        """Lease a tensor of `numel` elements of `dtype`, contents undefined, until it is released."""
        return self._arena.allocate(numel, dtype, movable=False) or self._fallback.lease(numel, dtype)

    def keep(self, nbytes: int) -> Tensor:
        """Allocate memory beside the arena that is never returned, uint8 [nbytes], contents undefined."""
        return self._fallback.keep(nbytes)
