"""Memory and files in which a zero.Init keeps this rank's slices of parameters, until an engine takes them over.

In memory each slice is a tensor at home on the device, or in host memory.  In files, slices are placed one behind the
other in *segments*, of which each has a file; a slice that reaches the end of a segment goes on in the next one:

    segments   [slice|slice|  slice  |   slice -][->   |slice|        slice        |            free]
    blocks     [        |         |             ][          |          |          |                 ]

Blocks of fixed size come to host memory, one at a time, through a constant number of buffers (`FileStates`), so that
small slices share a transfer and large ones need no large buffer.  A segment's file is closed once all slices in it
have been freed; space is not used a second time before.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megazero.memory.block_file import AlignedMemory, BlockIO
from megazero.memory.copies import ARRIVED
from megazero.memory.file_states import FileState, FileStates, cache_notice
from megazero.memory.homes import HostHome, StateHome
from megazero.memory.ledger_interface import NullLedger

_BLOCK_BYTES = 8 << 20  # of a transfer, which the threads of a `BlockIO` divide
_NUM_BUFFERS = 3  # a block is filled while another one is written; a read need not wait for either
_SEGMENT_BYTES = 64 << 20  # of the first segments
_GROWTH = 8  # later segments are one in so many parts of those before, so that there are few files for any model
_ALIGNMENT = 16  # of slices, in bytes: a multiple of every element's size


class StoredSlice(Protocol):
    """A flat tensor, initially of zeros, that is stored somewhere."""

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the elements."""

    def numel(self) -> int:
        """Return the number of elements."""

    def store(self, start: int, values: Tensor) -> None:
        """Store values of the device, in the slice's number format, from element `start` on."""

    def load(self, start: int, into: Tensor) -> Tensor:
        """Return as many elements as `into` has, from `start` on, on the device: in `into`, or where they are."""

    def free(self) -> None:
        """Free what the slice takes, once."""


class SliceStore(Protocol):
    """Memory or files in which slices are stored."""

    def allocate(self, numel: int, dtype: torch.dtype) -> StoredSlice:
        """Allocate a slice of zeros."""


class MemorySlices:
    """Slices in the memory of a home."""

    def __init__(self, home: StateHome) -> None:
        self._home = home

    def allocate(self, numel: int, dtype: torch.dtype) -> StoredSlice:
        return _MemorySlice(self._home, self._home.zeros(numel, dtype))


class _MemorySlice:
    """A slice that is a tensor."""

    def __init__(self, home: StateHome, values: Tensor) -> None:
        self.dtype = values.dtype
        self._home = home
        self._values: Tensor | None = values

    def numel(self) -> int:
        return 0 if self._values is None else self._values.numel()

    def store(self, start: int, values: Tensor) -> None:
        self._home.store(self._part(start, values), values).finish()

    def load(self, start: int, into: Tensor) -> Tensor:
        found, arrival = self._home.bring(self._part(start, into), into)
        arrival.wait()
        return found

    def free(self) -> None:
        self._values = None

    def _part(self, start: int, like: Tensor) -> Tensor:
        assert self._values is not None, "a slice is not used after it has been freed"
        return self._values[start : start + like.numel()]


@dataclass(eq=False)
class _Segment:
    """A file of slices.  filled: the bytes from its beginning that slices have been given.

    num_slices: those that have bytes here, and have not been freed.
    """

    state: FileState
    filled: int = 0
    num_slices: int = 0

    @property
    def free_bytes(self) -> int:
        return self.state.nbytes - self.filled


class _Part(NamedTuple):
    """The bytes of a slice that are in one segment."""

    segment: _Segment
    start: int
    nbytes: int


class FileSlices:
    """Slices in files under one folder.

    The files, the threads that read and write them, and the buffers exist while there are slices.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        is_pinned: bool,
        io_block_bytes: int,
        queue_depth: int,
        notify: Callable[[str], None],
    ) -> None:
        """is_pinned: whether the system may not move the buffers.  io_block_bytes, queue_depth: of the `BlockIO`.

        notify: called with a line where the files pass through the system's cache.
        """
        self._folder = folder
        self._notify = notify
        self._is_pinned = is_pinned and device.type == "cuda"
        self._io_block_bytes, self._queue_depth = io_block_bytes, queue_depth
        self.block_bytes = _BLOCK_BYTES
        self.copies = HostHome(device, is_pinned=is_pinned)
        self._states: FileStates | None = None
        self._segments: list[_Segment] = []  # all but the last are full

    def allocate(self, numel: int, dtype: torch.dtype) -> StoredSlice:
        parts: list[_Part] = []
        left = -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        while left:
            if not (self._segments and self._segments[-1].free_bytes):
                self._segments.append(self._new_segment())
            segment = self._segments[-1]
            part = _Part(segment, segment.filled, min(left, segment.free_bytes))
            segment.filled += part.nbytes
            segment.num_slices += 1
            left -= part.nbytes
            parts.append(part)
        return _FileSlice(self, parts, numel, dtype)

    def free(self, parts: Sequence[_Part]) -> None:
        """Free the parts of a slice; the files of segments without slices are closed."""
        for segment, _, _ in parts:
            segment.num_slices -= 1
            if not segment.num_slices:
                self._segments.remove(segment)
                segment.state.close()
        if not self._segments and self._states is not None:
            self._states.close()
            self._states = None

    def _new_segment(self) -> _Segment:
        is_first = self._states is None
        if self._states is None:
            self._states = FileStates(
                self._folder,
                num_buffers=_NUM_BUFFERS,
                memory=AlignedMemory(is_pinned=self._is_pinned, ledger=NullLedger()),
                io=BlockIO(block_bytes=self._io_block_bytes, queue_depth=self._queue_depth),
            )
        nbytes = max(_SEGMENT_BYTES, sum(segment.state.nbytes for segment in self._segments) // _GROWTH)
        num_blocks = -(-nbytes // self.block_bytes)
        starts = range(0, (num_blocks + 1) * self.block_bytes, self.block_bytes)
        segment = _Segment(self._states.allocate("slices", torch.uint8, starts))
        if is_first and not self._states.is_direct:
            self._notify(cache_notice(self._folder))
        return segment


class _FileSlice:
    """A slice in one or more segments."""

    def __init__(self, slices: FileSlices, parts: Sequence[_Part], numel: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._numel = numel
        self._slices = slices
        self._parts = parts

    def numel(self) -> int:
        return self._numel

    def store(self, start: int, values: Tensor) -> None:
        size = self._slices.block_bytes
        for state, within, elements in self._pieces(start, values.numel()):
            # A block that is replaced is not read.
            target = state.overwrite(within) if within.stop - within.start == size else state[within]
            self._slices.copies.store(target.view(self.dtype), values[elements]).finish()
            if within.stop % size == 0:
                # What follows is in the next block: this one may be written beside it.
                del target
                state.store(within, ARRIVED)

    def load(self, start: int, into: Tensor) -> Tensor:
        for state, within, elements in self._pieces(start, into.numel()):
            # The buffer is free for another block as soon as nothing refers to it.
            self._slices.copies.load(into[elements], state[within].view(self.dtype)).finish()
        return into

    def free(self) -> None:
        self._slices.free(self._parts)
        self._parts = ()

    def _pieces(self, start: int, numel: int) -> Iterator[tuple[FileState, slice, slice]]:
        """Yield, for each block with any of `numel` elements from `start` on, its segment's state and bytes there.

        The third value is the elements' slice, counted from `start`.
        """
        size, itemsize = self._slices.block_bytes, self.dtype.itemsize
        begin, end = start * itemsize, (start + numel) * itemsize  # in the slice, in bytes
        before = 0  # the bytes of earlier parts
        for segment, first, nbytes in self._parts:
            moved = first - before  # from a byte's number in the slice to that in the segment
            at, stop = max(begin, before) + moved, min(end, before + nbytes) + moved
            while at < stop:
                cut = min((at // size + 1) * size, stop)
                elements = slice((at - moved - begin) // itemsize, (cut - moved - begin) // itemsize)
                yield segment.state, slice(at, cut), elements
                at = cut
            before += nbytes
