"""Files for model states that leave memory for a while (ZeRO-Infinity's NVMe home), read and written a block at a time.

A *block* is the part of a request between two multiples of `block_bytes` in the file; it is read or written by one call
of the system, in one of the threads of a `BlockIO`, from or into the caller's memory: past the page cache, and so
without a copy, from and at multiples of 4096.  Its checksum is computed before it is written and compared after it has
been read, so that states damaged on the disk end the run and train nothing.

    write(offset, memory) -> transfer      memory must not change until transfer.wait()
    read(offset, memory)  -> transfer      memory is undefined until transfer.wait()

A file is preallocated, so that a full disk is found at the beginning, and has no name: it is unlinked as soon as it is
open.  Its space is free again when the process ends, however it ends, also by SIGKILL, and two jobs with one folder
never meet.  Nothing of a file outlives its process, so nothing is synced.

Threads don't survive a fork: a forked child must leave its parent's files alone.
"""

import errno
import os
import secrets
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread, current_thread
from weakref import finalize

from torch import Tensor
from xxhash import xxh3_64_intdigest

from megazero.errors import ConfigError, FileError, MemoryLimitError, Problem
from megazero.memory.host import host_bytes
from megazero.memory.ledger_interface import AnyLedger
from megazero.operating_system import ALIGNMENT, bypass_page_cache, free_space, reserve_space
from megazero.units import format_bytes

# The system reads and writes less than 2 GiB in one call.
MAX_BLOCK_BYTES = 1 << 30
_OTHER_DISK = "another disk: this one, or its file system, loses data"


def aligned(nbytes: int) -> int:
    """Return the smallest multiple of ALIGNMENT that is no less."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class AlignedMemory:
    """A pool of buffers in host memory whose addresses are multiples of ALIGNMENT, for files to be read into directly.

    is_pinned: whether a GPU copies them beside the computation.  allocated_bytes: what the pool has allocated, in use
    or not.  live_bytes, peak_bytes: in use, now and at most.
    """

    def __init__(self, *, is_pinned: bool, ledger: AnyLedger) -> None:
        self._is_pinned = is_pinned
        self._ledger = ledger
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.allocated_bytes = 0
        self.live_bytes = 0
        self.peak_bytes = 0

    def lease(self, nbytes: int) -> Tensor:
        """Lease a buffer, uint8 [nbytes rounded up to ALIGNMENT], contents undefined, until it is freed."""
        size = aligned(nbytes)
        free = self._free[size]
        buffer = free.pop() if free else self._new_buffer(size)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return buffer

    def free(self, buffer: Tensor) -> None:
        """Make a leased buffer available again, once; no transfer of it may be running."""
        self._free[buffer.nbytes].append(buffer)
        self.live_bytes -= buffer.nbytes

    def _new_buffer(self, size: int) -> Tensor:
        # Pinned memory usually begins a page; torch rounds its size up to a power of two, which a few bytes may double.
        for slack in (0, ALIGNMENT) if self._is_pinned else (ALIGNMENT,):
            memory = host_bytes(size + slack, is_pinned=self._is_pinned, ledger=self._ledger)
            begin = -memory.data_ptr() % ALIGNMENT
            if begin <= slack:
                break
        self.allocated_bytes += memory.nbytes
        return memory[begin : begin + size]


class Transfer:
    """A read or a write of a range of a file, which may still be running."""

    def __init__(self, num_blocks: int) -> None:
        self._num_left = num_blocks
        self._lock = Lock()
        self._end = Event()
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """True if all blocks have been read or written, or have failed."""
        return self._end.is_set()

    def wait(self) -> None:
        """Wait for all blocks; raise FileError, at every call, if one of them could not be read or written."""
        self.finish()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until the memory is no longer in use, and raise nothing."""
        self._end.wait()

    def end_block(self, error: BaseException | None = None) -> None:
        """Count a block as read or written, or as failed by `error`."""
        with self._lock:
            self._error = self._error or error
            self._num_left -= 1
            if not self._num_left:
                self._end.set()


class BlockIO:
    """The threads that read and write the blocks of a rank's files, in the order of the requests.

    block_bytes: the most bytes of one call of the system, a multiple of ALIGNMENT.  queue_depth: the number of calls
    that run at the same time, each in a thread.  The threads end when the process does, after all requests.

    Some times a block, a thread takes python's lock, which others that compute in python alone hold for 5 ms at a time:
    beside them larger blocks are faster.  Beside operations of torch, which release it, there is no difference.
    """

    def __init__(self, *, block_bytes: int = 1 << 20, queue_depth: int = 8) -> None:
        if not ALIGNMENT <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % ALIGNMENT:
            rule = f"a multiple of {ALIGNMENT}, at most {MAX_BLOCK_BYTES}, is read or written at once"
            raise ConfigError(Problem(f"blocks of {block_bytes} bytes", rule, f"{1 << 20}, say"))
        if queue_depth < 1:
            raise ConfigError(
                Problem(f"a queue depth of {queue_depth}", "at least one block is read at once", "8, say")
            )
        self.block_bytes = block_bytes
        self.queue_depth = queue_depth
        self._requests: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threads: list[Thread] = []
        try:
            for _ in range(queue_depth):
                thread = Thread(target=_serve, args=(self._requests,), daemon=True)
                thread.start()
                threads.append(thread)
        except RuntimeError as error:
            _end_threads(self._requests, threads)
            given = f"{queue_depth} threads that read and write files, of which {len(threads)} could be started"
            rule = f"the system has memory for them, and allows as many: {error}"
            legal = "a smaller aio_queue_depth, or higher limits (ulimit -d, ulimit -v, ulimit -u)"
            raise MemoryLimitError(Problem(given, rule, legal)) from error
        # Runs at the latest when python exits: its own end of a thread that holds tensors can abort the process.
        self._end = finalize(self, _end_threads, self._requests, threads)

    def submit(self, request: Callable[[], object]) -> None:
        """Call `request`, which raises nothing, in one of the threads."""
        assert self._end.alive, "the threads have been ended"
        self._requests.put(request)

    def close(self) -> None:
        """End the threads, after all requests; harmless a second time."""
        self._end()


def _serve(requests: SimpleQueue[Callable[[], object] | None]) -> None:
    while (request := requests.get()) is not None:
        request()
        del request  # it retains the caller's memory


def _end_threads(requests: SimpleQueue[Callable[[], object] | None], threads: Sequence[Thread]) -> None:
    for _ in threads:
        requests.put(None)
    for thread in threads:
        if thread is not current_thread():  # which may be the last to use the `BlockIO`
            thread.join()


class _Block:
    """A block of a file that has been written, or is being written.

    transfer: the last one.  checksum: of what it is to contain, even if its write fails, so that older contents are
    never taken for these.
    """

    __slots__ = ("checksum", "nbytes", "offset", "transfer")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.transfer: Transfer | None = None
        self.checksum = 0


# What a thread does with a block and its memory.
_Work = Callable[[_Block, memoryview], None]


class BlockFile:
    """A preallocated file without a name, written and read in blocks that have checksums.

    name: the beginning of its name in `path`, which is for messages.  nbytes: its size, rounded up to ALIGNMENT.
    is_direct: whether it is read and written past the page cache, which some file systems do not allow.
    read_bytes, written_bytes: requested since the beginning.

    Raises FileError where the file cannot be made.
    """

    def __init__(self, folder: Path, name: str, nbytes: int, io: BlockIO) -> None:
        assert nbytes > 0, "a file has at least one block"
        self.path = folder / f"{name}.{secrets.token_hex(8)}"
        self.nbytes = aligned(nbytes)
        self._io = io
        # A file object closes its descriptor, and so frees the space, also when `close` is not called.
        self._file = open(_new_file(self.path), "r+b", buffering=0)  # noqa: SIM115 (lives until close)
        self.is_direct = self._prepare()
        self._blocks: dict[int, _Block] = {}
        self._offsets: list[int] = []  # of blocks, in ascending order
        self.read_bytes = 0
        self.written_bytes = 0

    def write(self, offset: int, memory: Tensor) -> Transfer:
        """Begin to write aligned memory, uint8 of a multiple of ALIGNMENT bytes, which must not change until the end.

        A range is written again as the same blocks, after the last transfer of it has been waited for.
        """
        parts = self._parts(offset, memory)
        blocks = [self._blocks.get(at) or self._new_block(at, len(part)) for at, part in parts]
        self.written_bytes += memory.nbytes
        return self._start(self._write_block, blocks, [part for _, part in parts])

    def read(self, offset: int, memory: Tensor) -> Transfer:
        """Begin to read into aligned memory, uint8, of which the contents are undefined until the end.

        The range is one that has been written, as the same blocks, and the last transfer of it has been waited for.
        """
        parts = self._parts(offset, memory)
        assert all(at in self._blocks for at, _ in parts), f"no such range has been written at {offset} of {self.path}"
        self.read_bytes += memory.nbytes
        return self._start(self._read_block, [self._blocks[at] for at, _ in parts], [part for _, part in parts])

    def holds(self, offset: int, memory: Tensor) -> bool:
        """Return True if aligned memory has the checksums of the range that has been written, as the same blocks."""
        return all(self._blocks[at].checksum == xxh3_64_intdigest(part) for at, part in self._parts(offset, memory))

    def close(self) -> None:
        """Free the file's space after all transfers, whose errors are not raised here; harmless a second time."""
        for transfer in {block.transfer for block in self._blocks.values()}:
            if transfer is not None:
                transfer.finish()
        self._file.close()

    def _prepare(self) -> bool:
        """Reserve the file's space; return True if it is then read and written past the page cache."""
        free = free_space(self._file.fileno())
        try:
            reserve_space(self._file.fileno(), self.nbytes)
            return bypass_page_cache(self._file.fileno(), ALIGNMENT)
        except OSError as error:
            self._file.close()
            given = f"a file of {self.nbytes} bytes ({format_bytes(self.nbytes)}) in {self.path.parent}"
            left = "" if free is None else f", where {free} bytes ({format_bytes(free)}) are free"
            legal = "a folder on a disk with more free space, or more processes that share the states"
            if error.errno == errno.EFBIG:
                rule = f"a file of this process may be that large: {error.strerror}"
                legal = "a larger limit of the size of files (ulimit -f), or more processes that share the states"
                raise FileError(Problem(given, rule, legal)) from error
            raise FileError(Problem(given, f"must fit there{left}: {error.strerror}", legal)) from error

    def _parts(self, offset: int, memory: Tensor) -> list[tuple[int, memoryview]]:
        """Return offset and memory of each block of a request."""
        assert not self._file.closed, f"{self.path} has been closed"
        end, size = offset + memory.nbytes, self._io.block_bytes
        assert memory.nbytes and not (offset | memory.nbytes | memory.data_ptr()) % ALIGNMENT, (
            f"{memory.nbytes} bytes at address {memory.data_ptr():#x} and offset {offset}: no multiples of {ALIGNMENT}"
        )
        assert offset >= 0 and end <= self.nbytes, f"{offset} to {end} is not within {self.nbytes} bytes"
        cuts = [offset, *range((offset // size + 1) * size, end, size), end]
        view = memory.numpy().data
        return [(at, view[at - offset : cut - offset]) for at, cut in pairwise(cuts)]

    def _new_block(self, offset: int, nbytes: int) -> _Block:
        """Return a block that is written for the first time, and overlaps none."""
        index = bisect(self._offsets, offset)
        for other in (self._blocks[at] for at in self._offsets[max(index - 1, 0) : index + 1]):
            assert other.offset + other.nbytes <= offset or offset + nbytes <= other.offset, (
                f"{nbytes} bytes at {offset} of {self.path} overlap the {other.nbytes} at {other.offset}"
            )
        self._offsets.insert(index, offset)
        self._blocks[offset] = _Block(offset, nbytes)
        return self._blocks[offset]

    def _start(self, work: _Work, blocks: Sequence[_Block], parts: Sequence[memoryview]) -> Transfer:
        for block, part in zip(blocks, parts, strict=True):
            assert block.nbytes == len(part), f"the block at {block.offset} has {block.nbytes} bytes, not {len(part)}"
            assert block.transfer is None or block.transfer.is_done, (
                f"the last transfer of the block at {block.offset} of {self.path} has not been waited for"
            )
        transfer, num_begun = Transfer(len(blocks)), 0
        try:
            for block, part in zip(blocks, parts, strict=True):
                block.transfer = transfer
                self._io.submit(partial(self._attempt, work, block, part, transfer))
                num_begun += 1
        except BaseException as error:  # an interrupt, say: no thread is to wait for blocks that have not begun
            for _ in blocks[num_begun:]:
                transfer.end_block(error)
            raise
        return transfer

    def _attempt(self, work: _Work, block: _Block, part: memoryview, transfer: Transfer) -> None:
        """Read or write a block in a thread; whatever is raised there, `Transfer.wait` raises."""
        failure = None
        try:
            work(block, part)
        except BaseException as error:
            failure = error
        part.release()  # before the thread that waits counts the references to the memory
        transfer.end_block(failure)

    def _write_block(self, block: _Block, part: memoryview) -> None:
        block.checksum = xxh3_64_intdigest(part)
        done = 0
        try:
            while done < len(part):
                done += os.pwrite(self._file.fileno(), part[done:], block.offset + done)
        except OSError as error:
            raise self._error(block, f"must be written: {error.strerror}", "a disk that has space and works") from error

    def _read_block(self, block: _Block, part: memoryview) -> None:
        try:
            done = os.preadv(self._file.fileno(), [part], block.offset)
        except OSError as error:
            raise self._error(block, f"must be readable: {error.strerror}", _OTHER_DISK) from error
        if done < len(part):
            raise self._error(block, f"must have {len(part)} bytes; {done} could be read", _OTHER_DISK)
        if xxh3_64_intdigest(part) != block.checksum:
            raise self._error(block, "must contain what was written there; its checksum differs", _OTHER_DISK)

    def _error(self, block: _Block, rule: str, legal: str) -> FileError:
        return FileError(Problem(f"the block at offset {block.offset} of {self.path}", rule, legal))


def _new_file(path: Path) -> int:
    """Open a new file and remove its name; return the descriptor."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
    except OSError as error:
        rule = f"must be a folder that files can be made in: {error.strerror}"
        raise FileError(Problem(str(path.parent), rule, "an existing folder on a local disk")) from error
    return file
