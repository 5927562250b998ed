"""Temporaries that lie in an arena: what a pool of constant-size buffers lends, side by side in memory allocated once.

The arena is made of equal *slots*, and a lease takes as many neighbouring ones as it needs.  Leases of up to a slot
therefore never fragment it; they don't move either, because a collective may be under way in them.
"""

import torch
from torch import Tensor

from megazero.memory.address_book import ArenaStatistics
from megazero.memory.arena import Arena
from megazero.memory.lease import Lease, Scratch
from megazero.memory.ledger_interface import AnyLedger


class ArenaScratch:
    """Lends `num_slots` slots of `slot_bytes` bytes; what finds no room comes from `fallback`.

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
    def statistics(self) -> ArenaStatistics:
        return self._arena.statistics

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor was lent from the arena."""
        return self._arena.holds(tensor)

    def lease(self, numel: int, dtype: torch.dtype) -> Lease:
        """A tensor of `numel` elements of `dtype`, contents undefined, until it is released."""
        return self._arena.allocate(numel, dtype, movable=False) or self._fallback.lease(numel, dtype)
