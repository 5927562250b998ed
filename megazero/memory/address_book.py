"""The address book: which block occupies which addresses of one piece of memory; first fit, and defragmentation.  Pure.

A *block* is a live run of addresses, a *gap* a free run between two of them; neighbouring free runs are one gap.  A
request takes the first gap that is large enough.  Where free memory would do in total but no gap does, blocks *slide*
down over the gaps below them until one is large enough (ZeRO, section 6.3).  As little slides as possible: of all
runs of neighbouring gaps that together suffice, the one with the fewest bytes between its gaps.

A block that was allocated as not movable, or that is pinned, is a *wall*: it stays, and nothing slides past it.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from megazero.units import format_bytes


class Block:
    """A live run of addresses; `start` changes when it slides, `nbytes` is a multiple of the book's alignment."""

    __slots__ = ("is_movable", "nbytes", "num_pins", "start")

    def __init__(self, start: int, nbytes: int, *, is_movable: bool) -> None:
        self.start = start
        self.nbytes = nbytes
        self.is_movable = is_movable
        self.num_pins = 0

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    @property
    def is_wall(self) -> bool:
        return not self.is_movable or self.num_pins > 0


class Move(NamedTuple):
    """A move of bytes [source, source + block.nbytes) down to `target`; the two ranges may overlap."""

    block: Block
    source: int
    target: int


class Grant(NamedTuple):
    """A request's block, and the moves that must be carried out first, one after the other in this order."""

    block: Block
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class ArenaStatistics:
    """The figures of an arena: bytes as they are occupied, alignment included, and counts since the beginning.

    high_water_bytes: the most that was live at once.  failed_requests: those that were answered with None.
    """

    capacity_bytes: int
    live_bytes: int
    largest_free_bytes: int
    high_water_bytes: int
    num_compactions: int
    moved_bytes: int
    failed_requests: int

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.live_bytes

    @property
    def fragmentation(self) -> float:
        """The part of free memory outside the largest gap; 0 where nothing is free."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0

    def describe(self) -> str:
        """Return the figures as text for a report."""
        return (
            f"{format_bytes(self.capacity_bytes)}, high water {format_bytes(self.high_water_bytes)},"
            f" largest free block {format_bytes(self.largest_free_bytes)}, fragmentation {self.fragmentation:.2f},"
            f" {self.num_compactions} compactions"
        )


class _Gap(NamedTuple):
    """A free run, before block number `place` (or after the last one)."""

    start: int
    nbytes: int
    place: int


class AddressBook:
    """The addresses [0, capacity), capacity rounded down to a multiple of `alignment`.

    compacts: whether blocks slide; if not, this is a plain first-fit allocator of the same capacity.
    """

    def __init__(self, capacity: int, *, alignment: int = 512, compacts: bool = True) -> None:
        assert capacity >= 0 and alignment > 0, f"no memory has {capacity} bytes in units of {alignment}"
        self.capacity = capacity // alignment * alignment
        self._alignment = alignment
        self._compacts = compacts
        self._blocks: list[Block] = []  # by address; those of no bytes are not kept
        self._live_bytes = self._high_water = 0
        self._num_compactions = self._moved_bytes = self._failed_requests = 0

    def allocate(self, nbytes: int, *, movable: bool = True) -> Grant | None:
        """Allocate the first gap of at least `nbytes`, if need be after moves; None if there is none."""
        nbytes = -(-nbytes // self._alignment) * self._alignment
        if not nbytes:
            return Grant(Block(0, 0, is_movable=movable), ())
        gaps = self._gaps()
        large_enough = [gap.start for gap in gaps if gap.nbytes >= nbytes]
        start = large_enough[0] if large_enough else None
        moves: tuple[Move, ...] = ()
        if start is None and self._compacts:
            run = self._cheapest_run(gaps, nbytes)
            if run:
                moves = self._slide(run)
                start = run[-1].start + run[-1].nbytes - sum(gap.nbytes for gap in run)
        if start is None:
            self._failed_requests += 1
            return None
        block = Block(start, nbytes, is_movable=movable)
        insort(self._blocks, block, key=attrgetter("start"))
        self._live_bytes += nbytes
        self._high_water = max(self._high_water, self._live_bytes)
        return Grant(block, moves)

    def free(self, block: Block) -> None:
        """Free the block's addresses; each block once."""
        if block.nbytes:
            assert block in self._blocks, "a block is freed once"
            self._blocks.remove(block)
            self._live_bytes -= block.nbytes

    def pin(self, block: Block) -> None:
        """Keep the block from moving until it has been unpinned as often as pinned."""
        block.num_pins += 1

    def unpin(self, block: Block) -> None:
        assert block.num_pins, "a block is unpinned as often as it was pinned"
        block.num_pins -= 1

    @property
    def statistics(self) -> ArenaStatistics:
        return ArenaStatistics(
            capacity_bytes=self.capacity,
            live_bytes=self._live_bytes,
            largest_free_bytes=max((gap.nbytes for gap in self._gaps()), default=0),
            high_water_bytes=self._high_water,
            num_compactions=self._num_compactions,
            moved_bytes=self._moved_bytes,
            failed_requests=self._failed_requests,
        )

    def _gaps(self) -> list[_Gap]:
        """Return the gaps in the order of addresses; none is empty."""
        gaps, start = [], 0
        for place, block in enumerate(self._blocks):
            if block.start > start:
                gaps.append(_Gap(start, block.start - start, place))
            start = block.stop
        if self.capacity > start:
            gaps.append(_Gap(start, self.capacity - start, len(self._blocks)))
        return gaps

    def _cheapest_run(self, gaps: Sequence[_Gap], nbytes: int) -> Sequence[_Gap]:
        """Return neighbouring gaps of `nbytes` in all, with no wall and the fewest bytes between; empty if none fit."""
        best, best_cost = gaps[:0], 0
        first = free = 0
        for last, gap in enumerate(gaps):
            if last and any(block.is_wall for block in self._blocks[gaps[last - 1].place : gap.place]):
                first, free = last, 0
            free += gap.nbytes
            while free - gaps[first].nbytes >= nbytes:
                free -= gaps[first].nbytes
                first += 1
            cost = gap.start + gap.nbytes - gaps[first].start - free
            if free >= nbytes and (not best or cost < best_cost):
                best, best_cost = gaps[first : last + 1], cost
        return best

    def _slide(self, run: Sequence[_Gap]) -> tuple[Move, ...]:
        """Close all gaps of the run but the last, which grows by them; from the lowest address up."""
        moves, target = [], run[0].start
        for block in self._blocks[run[0].place : run[-1].place]:
            moves.append(Move(block, block.start, target))
            block.start = target
            target = block.stop
        self._num_compactions += 1
        self._moved_bytes += sum(move.block.nbytes for move in moves)
        return tuple(moves)
