"""A model of PyTorch's caching allocator on CUDA: what it takes from the device for the tensors it gives out.  Pure.

The allocator rounds a tensor up to a multiple of 512 bytes and cuts it out of a *segment*, which it has taken from the
device before or takes now:

    a tensor of at most 1 MiB      from segments of 2 MiB, which have only such tensors
    below 10 MiB                   from segments of 20 MiB
    10 MiB and more                from a segment of its size, rounded up to 2 MiB

Of the free blocks of its kind a tensor gets the smallest that is large enough, and what is left of it stays free,
unless that is less than 512 bytes among small ones or at most 1 MiB among large ones.  Neighbouring free blocks are
joined.  A segment of which nothing is given out stays with the allocator until the device has no memory left; then all
of those are returned, and if that is not enough the run ends.  So a run needs the segments that are in use at the same
moment, `needed_peak`, and takes at most `reserved_peak` where there is enough.
"""

import bisect
from dataclasses import dataclass, field
from typing import Protocol

from megazero.errors import MemoryLimitError, Problem

ROUNDING = 512
_MIB = 1 << 20
_SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _LARGEST_SHARED, _ROUND_SEGMENT = _MIB, 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB


class AllocatorModel(Protocol):
    """The interface of an allocator to a planner."""

    needed_peak: int
    reserved_peak: int

    def changed(self, key: int, nbytes: int) -> None:
        """Give out so many bytes for a storage, another number than before, or none, which frees it."""

    def reset_peaks(self) -> None:
        """Begin the peaks anew, from what is in use now."""


@dataclass(eq=False)
class _Segment:
    """Memory taken from the device; used: the bytes of it that are given out."""

    nbytes: int
    is_small: bool
    used: int = 0


@dataclass(eq=False)
class _Block:
    """A run of bytes of a segment, between its neighbours in memory."""

    segment: _Segment
    nbytes: int
    is_free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass(eq=False)
class _Pool:
    """Free blocks of one kind, ordered by size and age."""

    order: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], _Block] = field(default_factory=dict)
    keys: dict[int, tuple[int, int]] = field(default_factory=dict)  # by the block's identity
    count: int = 0

    def put(self, block: _Block) -> None:
        self.count += 1
        key = (block.nbytes, self.count)
        bisect.insort(self.order, key)
        self.blocks[key], self.keys[id(block)] = block, key

    def take(self, block: _Block) -> None:
        key = self.keys.pop(id(block))
        del self.order[bisect.bisect_left(self.order, key)], self.blocks[key]

    def unused(self) -> list[_Block]:
        """Return the blocks that are whole segments."""
        return [block for block in self.blocks.values() if not block.segment.used]

    def smallest(self, nbytes: int) -> _Block | None:
        """Return the smallest free block of at least so many bytes; None if there is none."""
        place = bisect.bisect_left(self.order, (nbytes, 0))
        return self.blocks[self.order[place]] if place < len(self.order) else None


class CachingAllocator:
    """The segments and blocks of one device.

    limit: the bytes of the device; beyond it a tensor raises MemoryLimitError.  None: there is enough.
    allocated: bytes given out, rounded.  reserved: bytes of all segments.  needed: of those in use.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated = self.reserved = self.needed = 0
        self.needed_peak = self.reserved_peak = 0
        self._small, self._large = _Pool(), _Pool()
        self._given: dict[int, _Block] = {}

    def changed(self, key: int, nbytes: int) -> None:
        """Give out so many bytes for a storage, another number than before, or none, which frees it."""
        if key in self._given:
            self._free(self._given.pop(key))
        if nbytes:
            self._given[key] = self._allocate(-(-nbytes // ROUNDING) * ROUNDING)
            if self.needed > self.needed_peak:
                self.needed_peak = self.needed
            if self.reserved > self.reserved_peak:
                self.reserved_peak = self.reserved

    def reset_peaks(self) -> None:
        """Begin the peaks anew, from what is in use now."""
        self.needed_peak, self.reserved_peak = self.needed, self.reserved

    def _allocate(self, nbytes: int) -> _Block:
        is_small = nbytes <= _SMALL
        pool = self._small if is_small else self._large
        block = pool.smallest(nbytes)
        if block is None:
            segment = _Segment(_segment_bytes(nbytes), is_small)
            self._make_room(segment.nbytes)
            self.reserved += segment.nbytes
            block = _Block(segment, segment.nbytes)
        else:
            pool.take(block)
        rest = block.nbytes - nbytes
        if rest >= ROUNDING if is_small else rest > _SMALL:
            left = _Block(block.segment, rest, before=block, after=block.after)
            if block.after is not None:
                block.after.before = left
            block.nbytes, block.after = nbytes, left
            pool.put(left)
        block.is_free = False
        self.needed += 0 if block.segment.used else block.segment.nbytes
        block.segment.used += block.nbytes
        self.allocated += block.nbytes
        return block

    def _make_room(self, nbytes: int) -> None:
        """Return all unused segments if the device has no room for another one; raise if it has none even then."""
        if self.limit is None or self.reserved + nbytes <= self.limit:
            return
        for pool in (self._small, self._large):
            for block in pool.unused():
                pool.take(block)
                self.reserved -= block.nbytes
        if self.reserved + nbytes > self.limit:
            free = self.reserved - self.allocated
            given = f"a segment of {nbytes} bytes beside {self.reserved}, of which {free} are free in pieces"
            raise MemoryLimitError(Problem(given, f"the device has {self.limit} bytes", "fewer or smaller tensors"))

    def _free(self, block: _Block) -> None:
        pool = self._small if block.segment.is_small else self._large
        self.allocated -= block.nbytes
        block.segment.used -= block.nbytes
        self.needed -= 0 if block.segment.used else block.segment.nbytes
        block.is_free = True
        if block.after is not None and block.after.is_free:
            pool.take(block.after)
            _join(block, block.after)
        if block.before is not None and block.before.is_free:
            pool.take(block.before)
            block = _join(block.before, block)
        pool.put(block)


def _join(first: _Block, second: _Block) -> _Block:
    """Make one free block of two neighbours, and return it."""
    first.nbytes, first.after = first.nbytes + second.nbytes, second.after
    if second.after is not None:
        second.after.before = first
    return first


def _segment_bytes(nbytes: int) -> int:
    """Return the size of the segment that the allocator takes for a block that fits nowhere."""
    if nbytes <= _SMALL:
        return _SMALL_SEGMENT
    if nbytes < _LARGEST_SHARED:
        return _LARGE_SEGMENT
    return -(-nbytes // _ROUND_SEGMENT) * _ROUND_SEGMENT


class ExactAllocator:
    """An allocator that takes what it gives out, to the byte."""

    def __init__(self) -> None:
        self.allocated = self.needed_peak = self.reserved_peak = 0
        self._given: dict[int, int] = {}

    def changed(self, key: int, nbytes: int) -> None:
        """Give out so many bytes for a storage, another number than before, or none, which frees it."""
        self.allocated += nbytes - self._given.pop(key, 0)
        if nbytes:
            self._given[key] = nbytes
        self.needed_peak = max(self.needed_peak, self.allocated)
        self.reserved_peak = self.needed_peak

    def reset_peaks(self) -> None:
        """Begin the peaks anew, from what is in use now."""
        self.needed_peak = self.reserved_peak = self.allocated
