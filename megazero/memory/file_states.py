"""States at home in files (ZeRO-Infinity, arXiv 2104.07857): flat tensors of which blocks come to host memory for use.

A state has a file of its own, in blocks; what is updated at once is a block.  A block that is used is read into a
*buffer* of host memory, and written from there:

    in the file --fetch--> being read --view--> in memory --store--> being written --> in the file

`fetch` and `store` only begin to read and write, so that one block is read and another one written while a third is
used.  A block may also be viewed without either: it comes then, stays as long as something refers to its elements, and
is written back, if it has changed, when its buffer is wanted.  As long as no more elements are referred to at once, all
states together have a constant number of buffers.

Once a file has failed, every later use of the states raises the same error.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megazero.errors import FileError, Problem
from megazero.memory.block_file import AlignedMemory, BlockFile, BlockIO, Transfer, aligned
from megazero.memory.copies import ARRIVED, Arrival
from megazero.memory.ledger_interface import NullLedger


class FileSlice(NamedTuple):
    """Elements of a state in a file, all in one block, which come to memory when they are asked for."""

    state: "FileState"
    within: slice

    @property
    def dtype(self) -> torch.dtype:
        return self.state.dtype

    def view(self) -> Tensor:
        return self.state[self.within]

    def fetch(self) -> bool:
        """Begin to read the elements' block if a buffer is free; return False if none is."""
        return self.state.fetch(self.within)

    def leave(self) -> None:
        """Let the buffer of the elements' block, which have not changed, be free once nothing refers to them."""
        self.state.leave(self.within, ARRIVED)


@dataclass(eq=False)
class _Block:
    """A block of a state; its buffer, where it has one, and what is being done with that.

    lease: the whole buffer.  buffer: the part of it that the block takes.
    start, stop: elements.  offset: in the file, in bytes.  is_written: whether the file has it; until then it is zeros.
    references: those to the buffer's memory while nothing refers to the elements.
    is_wanted: whether it has been fetched, and not been stored since.
    arrival: that of the copies from the buffer to the device.
    """

    file: BlockFile
    dtype: torch.dtype
    start: int
    stop: int
    offset: int
    is_written: bool = False
    lease: Tensor | None = None
    buffer: Tensor | None = None
    references: int = 0
    is_wanted: bool = False
    transfer: Transfer | None = None
    arrival: Arrival = ARRIVED

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize

    def wait(self) -> None:
        """Wait until the block has been read or written."""
        if self.transfer is not None:
            self.transfer.wait()
            self.transfer = None

    @property
    def is_done(self) -> bool:
        """True if the block has been read or written."""
        return self.transfer is None or self.transfer.is_done

    @property
    def is_referred_to(self) -> bool:
        """True if there are tensors of the block's elements."""
        return self.buffer is not None and _references(self.buffer) > self.references


class FileState:
    """A flat tensor at home in a file; a slice of it, which must lie in one block, is a tensor in host memory."""

    def __init__(self, states: "FileStates", file: BlockFile, dtype: torch.dtype, starts: Sequence[int]) -> None:
        """starts: the first elements of the blocks, and behind the last one the number of elements."""
        self.dtype = dtype
        self._states = states
        self._file = file
        self._starts = starts
        self._blocks: list[_Block] = []
        offset = 0
        for start, stop in pairwise(starts):
            self._blocks.append(_Block(file, dtype, start, stop, offset))
            offset += aligned(self._blocks[-1].nbytes)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self._starts[-1] * self.dtype.itemsize

    def __getitem__(self, within: slice) -> Tensor:
        if within.start == within.stop:
            return torch.empty(0, dtype=self.dtype)
        block = self._block_at(within)
        return self._states.view(block)[within.start - block.start : within.stop - block.start]

    def fetch(self, within: slice) -> bool:
        """Begin to read the elements' block if a buffer is free; return False if none is."""
        return self._states.fetch(self._block_at(within))

    def store(self, within: slice, arrival: Arrival) -> None:
        """Begin to write the elements' block, whose buffer is free then; arrival: that of copies from the buffer."""
        self._states.store(self._block_at(within), arrival)

    def overwrite(self, within: slice) -> Tensor:
        """Return elements that are about to be written, as are all others of their block: it is not read."""
        block = self._block_at(within)
        whole = self._states.view(block, is_read=False)
        return whole[within.start - block.start : within.stop - block.start]

    def leave(self, within: slice, arrival: Arrival) -> None:
        """Let the buffer of the elements' block, which have not changed, be free after copies from it have arrived."""
        self._states.leave(self._block_at(within), arrival)

    def close(self) -> None:
        """Give the file's space back to the file system; nothing refers to elements, and the state is lost."""
        self._states.discard(self._file, self._blocks)

    def _block_at(self, within: slice) -> _Block:
        block = self._blocks[bisect_right(self._starts, within.start) - 1]
        assert within.stop <= block.stop, "a slice of a state in a file lies in one block"
        return block


def cache_notice(folder: Path) -> str:
    """Return a line on files of `folder` that are not read and written past the system's cache."""
    given = f"notice: the file system of {folder} has no direct access to its disk"
    return f"{given}: states in files pass through the system's cache, which takes host memory"


class FileStates:
    """The states of one rank that live in files under one folder, and the buffers through which they pass."""

    def __init__(
        self,
        folder: Path,
        *,
        num_buffers: int,
        memory: AlignedMemory,
        io: BlockIO,
        writes_behind: bool = True,
        record: Callable[[Literal["read", "write"], int], None] = lambda way, nbytes: None,
    ) -> None:
        """num_buffers: the blocks that are in memory at once, unless more are referred to.

        writes_behind: False: `store` returns when the block has been written.
        record: called with the way and the bytes of every block.
        """
        make_folder(folder)
        self._folder = folder
        self._num_buffers = num_buffers
        self._memory = memory
        self._io = io
        self._writes_behind = writes_behind
        self._record = record
        self._files: list[BlockFile] = []
        self._buffer_bytes = 0  # those of the largest block
        self._held: dict[_Block, None] = {}  # with a buffer that is not being written, the longest unused first
        self._leaving: deque[_Block] = deque()  # being written, oldest first
        self._failure: FileError | None = None

    @property
    def is_direct(self) -> bool:
        """True if the files are read and written past the system's cache."""
        return all(file.is_direct for file in self._files)

    @property
    def file_bytes(self) -> int:
        """The bytes that the files take, whose blocks begin at multiples of ALIGNMENT."""
        return sum(file.nbytes for file in self._files)

    def allocate(self, name: str, dtype: torch.dtype, starts: Sequence[int]) -> FileState:
        """Make the file of a state of zeros; raise FileError if it cannot be made.

        starts: the first elements of the blocks, and behind the last one the number of elements.
        """
        nbytes = sum(aligned((b - a) * dtype.itemsize) for a, b in pairwise(starts))
        self._files.append(BlockFile(self._folder, name, nbytes, self._io))
        largest = max((b - a) * dtype.itemsize for a, b in pairwise(starts))
        assert largest <= self._buffer_bytes or not self._held, "files are made before they are used"
        self._buffer_bytes = max(self._buffer_bytes, largest)
        return FileState(self, self._files[-1], dtype, tuple(starts))

    def fetch(self, block: _Block) -> bool:
        """Begin to read a block if a buffer is free; return False if none is."""
        self._check_sound()
        if block.buffer is None and not self._make_room(waits=False):
            return False
        self._hold(block)
        block.is_wanted = True
        return True

    def view(self, block: _Block, *, is_read: bool = True) -> Tensor:
        """Return a block's elements, which may be written to; is_read: whether the block is read, if it is in the file.

        Elements of a block that is not read are undefined.
        """
        self._check_sound()
        if block.buffer is None:
            self._make_room(waits=True)
        self._hold(block, is_read=is_read)
        self._wait(block)
        assert block.buffer is not None
        return block.buffer[: block.nbytes].view(block.dtype)

    def store(self, block: _Block, arrival: Arrival) -> None:
        """Begin to write a block, if it is in memory; its buffer is free once it is written and copies have arrived."""
        if block not in self._held:  # it has not been used
            return
        self._wait(block)
        del self._held[block]
        block.arrival, block.is_wanted = arrival, False
        self._write(block)
        if not self._writes_behind:
            self._finish_writing()

    def leave(self, block: _Block, arrival: Arrival) -> None:
        """Free the buffer of a block that has been fetched and has not changed, once copies from it have arrived."""
        block.arrival, block.is_wanted = arrival, False

    def forget_fetches(self) -> None:
        """Let buffers be free of blocks that have been fetched and not been used."""
        for block in self._held:
            block.is_wanted = False

    def discard(self, file: BlockFile, blocks: Sequence[_Block]) -> None:
        """Close one file; buffers of its blocks are freed after what is being read and written, and not written."""
        for block in blocks:
            if block.buffer is None:
                continue
            if block.transfer is not None:
                block.transfer.finish()
                block.transfer = None
            self._held.pop(block, None)
            if block in self._leaving:
                self._leaving.remove(block)
            self._free(block)
        self._files.remove(file)
        file.close()

    def close(self) -> None:
        """Give the files' space back to the file system."""
        for file in self._files:
            file.close()
        self._io.close()

    def _check_sound(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _hold(self, block: _Block, *, is_read: bool = True) -> None:
        """Let a block be in a buffer, as the last used one, into which it is being read unless that is not needed."""
        if block.buffer is None:
            block.lease = self._memory.lease(self._buffer_bytes)
            block.buffer = block.lease[: aligned(block.nbytes)]
            block.references = _references(block.buffer)
            if block.is_written and is_read:
                block.transfer = block.file.read(block.offset, block.buffer)
                self._record("read", block.nbytes)
            elif is_read:
                block.buffer.zero_()
        elif block in self._leaving:
            self._leaving.remove(block)  # it is used again before its buffer has been freed
        self._held.pop(block, None)
        self._held[block] = None

    def _make_room(self, *, waits: bool) -> bool:
        """Free buffers until a block can have one; return False if those of the configured number are all in use.

        waits: for what is being written, too.
        """
        while len(self._held) + len(self._leaving) >= self._num_buffers:
            if self._leaving and (waits or self._leaving[0].is_done):
                self._finish_writing()
                continue
            idle = next((block for block in self._held if self._is_idle(block, waits=waits)), None)
            if idle is None:
                return False
            self._put_back(idle)
        return True

    def _is_idle(self, block: _Block, *, waits: bool) -> bool:
        """Return True if a block's buffer is not needed; waits: until it has been read, which refers to it too."""
        if block.is_wanted:
            return False
        if waits:
            self._wait(block)
        return block.is_done and not block.is_referred_to

    def _put_back(self, block: _Block) -> None:
        """Free the buffer of a block to which nothing refers, after it is written if it has changed."""
        assert block.buffer is not None
        self._wait(block)  # what could not be read must not be taken for a change
        del self._held[block]
        if block.is_written and block.file.holds(block.offset, block.buffer):
            self._free(block)
        else:
            self._write(block)

    def _write(self, block: _Block) -> None:
        assert block.buffer is not None
        block.transfer = block.file.write(block.offset, block.buffer)
        block.is_written = True
        self._record("write", block.nbytes)
        self._leaving.append(block)

    def _finish_writing(self) -> None:
        """Wait until the oldest block that is being written is in the file."""
        block = self._leaving.popleft()
        self._wait(block)
        if block.is_referred_to:
            self._held[block] = None  # its elements go on being the state
        else:
            self._free(block)

    def _free(self, block: _Block) -> None:
        assert block.lease is not None
        block.arrival.finish()
        block.arrival = ARRIVED
        self._memory.free(block.lease)
        block.lease = block.buffer = None

    def _wait(self, block: _Block) -> None:
        try:
            block.wait()
        except FileError as error:
            self._failure = error
            raise


def make_folder(folder: Path) -> None:
    """Make a folder for files of states unless it exists; raise FileError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"files of states are in a folder, which cannot be made: {error.strerror}"
        legal = "a folder that exists, or may be made, on a local disk"
        raise FileError(Problem(str(folder), rule, legal)) from error


def file_bandwidth(folder: Path, nbytes: int, io: BlockIO) -> float | None:
    """Return the bytes a second that are written to a new file in the folder and read, each way counted.

    None where no such file can be made: a disk may have room for the states and for nothing else.
    """
    memory = AlignedMemory(is_pinned=False, ledger=NullLedger()).lease(nbytes).zero_()
    try:
        file = BlockFile(folder, "rate", memory.nbytes, io)
    except FileError:
        return None
    start = time.perf_counter()
    file.write(0, memory).wait()
    file.read(0, memory).wait()
    seconds = time.perf_counter() - start
    file.close()
    return 2 * memory.nbytes / seconds


def _references(buffer: Tensor) -> int:
    """Return the number of tensors, and other things, that refer to a buffer's memory."""
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata))
