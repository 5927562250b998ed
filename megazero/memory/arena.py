"""Arenas: tensors in one piece of memory, allocated once, that are moved together when free memory is in pieces.

Defragmentation (ZeRO, section 6.3) separates long-lived tensors from short-lived ones, which have the rest of memory to
themselves.  An `AddressBook` chooses the tensors' addresses; here they are made and moved.

A block's `tensor` is one object for the block's whole life: when the block moves, the object is pointed at the new
place.  Views of it are not.  A block must be *pinned*, or allocated as not movable, while views of its tensor exist,
autograd has saved it, or another stream than the current one works on it.
"""

import torch
from torch import Tensor

from megazero.memory.address_book import ArenaStatistics, Block
from megazero.memory.ledger_figures import Category
from megazero.memory.ledger_interface import AnyLedger, NullLedger

# A move over a shorter distance than this clones so many bytes at a time.
_STAGING_BYTES = 4 << 20


class Arena:
    """A piece of memory of `capacity_bytes` bytes on `device`, allocated at once, its contents undefined.

    alignment: bytes of which every block's address in the arena is a multiple; every element's size divides it.
    """

    def __init__(
        self,
        capacity_bytes: int,
        device: torch.device,
        *,
        category: Category,
        ledger: AnyLedger | None = None,
        alignment: int = 512,
    ) -> None:
        ledger = ledger or NullLedger()
        self._book = ledger.address_book(capacity_bytes, alignment=alignment)
        self._alignment = alignment
        self._storage = torch.empty(self._book.capacity, dtype=torch.uint8, device=device)
        self._tensors: dict[Block, Tensor] = {}  # keys do not own tensors: no reference cycle keeps the memory alive
        ledger.tag(self._storage, category)

    @property
    def statistics(self) -> ArenaStatistics:
        return self._book.statistics

    def allocate(self, numel: int, dtype: torch.dtype, *, movable: bool = True) -> "ArenaBlock | None":
        """Allocate a block of `numel` elements of `dtype`, contents undefined; None if there is no room for it."""
        assert self._alignment % dtype.itemsize == 0, f"{dtype} in an arena of alignment {self._alignment}"
        grant = self._book.allocate(numel * dtype.itemsize, movable=movable)
        if grant is None:
            return None
        for block, source, target in grant.moves:
            self._copy_down(source, target, block.nbytes)
            self._point(self._tensors[block], block)
        tensor = torch.empty(0, dtype=dtype, device=self._storage.device)
        tensor.set_(self._storage.untyped_storage(), grant.block.start // dtype.itemsize, (numel,), (1,))
        self._tensors[grant.block] = tensor
        return ArenaBlock(self, grant.block, tensor)

    def contains(self, tensor: Tensor) -> bool:
        """Return True if the tensor lies in the arena."""
        return bool(tensor.untyped_storage()._cdata == self._storage.untyped_storage()._cdata)

    def pin(self, block: Block) -> None:
        self._book.pin(block)

    def unpin(self, block: Block) -> None:
        self._book.unpin(block)

    def free(self, block: Block) -> None:
        self._book.free(block)
        del self._tensors[block]

    def _copy_down(self, source: int, target: int, nbytes: int) -> None:
        """Copy to a lower address, piece by piece; a piece that overlaps its target is cloned first."""
        distance = source - target
        step = max(distance, _STAGING_BYTES)
        for start in range(0, nbytes, step):
            stop = min(start + step, nbytes)
            piece = self._storage[source + start : source + stop]
            staged = piece if distance >= stop - start else piece.clone()
            self._storage[target + start : target + stop].copy_(staged)

    def _point(self, tensor: Tensor, block: Block) -> None:
        """Point the tensor at the block's address.  Autograd does not record it: the values are the same."""
        moved = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        moved.set_(self._storage.untyped_storage(), block.start // tensor.dtype.itemsize, tensor.shape, (1,))
        tensor.data = moved


class ArenaBlock:
    """A one-dimensional, dense tensor in an arena, until it is released; also a `Lease`."""

    def __init__(self, arena: Arena, block: Block, tensor: Tensor) -> None:
        self._arena = arena
        self._block: Block | None = block
        self.tensor = tensor

    def pin(self) -> None:
        """Keep the block from moving until it is unpinned as often."""
        self._arena.pin(self._live())

    def unpin(self) -> None:
        self._arena.unpin(self._live())

    def release(self) -> None:
        """Free the memory, once; the tensor's contents are undefined from then on."""
        self._arena.free(self._live())
        self._block = None

    def _live(self) -> Block:
        assert self._block is not None, "a block is released once, and of no use afterwards"
        return self._block
