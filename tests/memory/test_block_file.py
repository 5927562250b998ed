"""Tests files of model states on real file systems: contents, damage, full and failing disks, and what they leave."""

import os
import random
import re
import resource
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from support.each import each
from support.mounts import ext4_disk, free_bytes, mounted, small_disk
from support.warm_python import warm_python
from torch import Tensor

from megazero.errors import ConfigError, FileError
from megazero.memory.block_file import ALIGNMENT, AlignedMemory, BlockFile, BlockIO, Transfer
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_interface import NullLedger

BLOCK = 16 * ALIGNMENT
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def io() -> Iterator[BlockIO]:
    with closing(BlockIO(block_bytes=BLOCK, queue_depth=3)) as threads:
        yield threads


@pytest.fixture
def pool() -> AlignedMemory:
    return AlignedMemory(is_pinned=False, ledger=NullLedger())


def random_buffer(pool: AlignedMemory, nbytes: int) -> Tensor:
    return pool.lease(nbytes).random_()


def read_back(file: BlockFile, offset: int, nbytes: int, pool: AlignedMemory) -> Tensor:
    memory = pool.lease(nbytes).fill_(0)
    file.read(offset, memory).wait()
    return memory


def failure(transfer: Transfer) -> FileError:
    with pytest.raises(FileError) as caught:
        transfer.wait()
    return caught.value


@contextmanager
def descriptor(file: BlockFile) -> Iterator[int]:
    """Open the file, which has no name, a second time, through the page cache."""
    links = {Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")}
    (link,) = (link for link in links if link.is_symlink() and str(link.readlink()) == f"{file.path} (deleted)")
    second = os.open(link, os.O_RDWR)
    try:
        yield second
    finally:
        os.close(second)


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let this process write no file beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@each("nbytes", [1, ALIGNMENT, ALIGNMENT + 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 5, 200_001])
@each("offset", [0, 5 * ALIGNMENT, BLOCK])
def test_what_is_written_is_in_the_file_and_read_back(
    nbytes: int, offset: int, io: BlockIO, pool: AlignedMemory, tmp_path: Path
) -> None:
    written = random_buffer(pool, nbytes)
    with closing(BlockFile(tmp_path, "states", offset + nbytes, io)) as file:
        assert file.nbytes == offset + written.nbytes
        file.write(offset, written).wait()
        with descriptor(file) as second:
            assert os.fstat(second).st_size == file.nbytes
            assert os.pread(second, file.nbytes, offset) == bytes(written.tolist())
        assert torch.equal(read_back(file, offset, nbytes, pool), written)
        assert (file.written_bytes, file.read_bytes) == (written.nbytes, written.nbytes)
        assert file.path.parent == tmp_path and os.listdir(tmp_path) == []


def test_files_are_direct_where_the_file_system_allows_it(io: BlockIO, tmp_path: Path) -> None:
    allowed = True
    try:
        os.close(os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        allowed = False
    with closing(BlockFile(tmp_path, "states", 1, io)) as file:
        assert file.is_direct == allowed


def test_many_transfers_in_any_order(io: BlockIO, pool: AlignedMemory, tmp_path: Path) -> None:
    order = random.Random(5)
    sizes = [order.randrange(1, 3 * BLOCK) for _ in range(60)]
    buffers = [random_buffer(pool, size) for size in sizes]
    offsets = [sum(buffer.nbytes for buffer in buffers[:index]) for index in range(len(buffers))]
    with closing(BlockFile(tmp_path, "states", offsets[-1] + buffers[-1].nbytes, io)) as file:
        for _ in range(2):  # the second time over what is there
            shuffled = order.sample(range(60), 60)
            for transfer in order.sample([file.write(offsets[index], buffers[index]) for index in shuffled], 60):
                transfer.wait()
            copies = {index: pool.lease(sizes[index]).fill_(0) for index in order.sample(range(60), 60)}
            reads = [file.read(offsets[index], copy) for index, copy in copies.items()]
            for transfer in reads:
                transfer.wait()
                assert transfer.is_done
            assert all(torch.equal(buffers[index], copy) for index, copy in copies.items())
            for buffer in buffers:
                buffer.random_()


@each(("at", "block"), [(0, 0), (8 * BLOCK - 1, 7 * BLOCK), (2 * BLOCK + 5, 2 * BLOCK), (2 * BLOCK - 1, BLOCK)])
@each("offset", [0, 5 * ALIGNMENT])
def test_a_flipped_bit_is_found(
    at: int, block: int, offset: int, io: BlockIO, pool: AlignedMemory, tmp_path: Path
) -> None:
    """Blocks lie between multiples of the block size in the file; the first one may begin later."""
    at, block = max(at, offset), max(block, offset)
    memory = random_buffer(pool, 8 * BLOCK - offset)
    with closing(BlockFile(tmp_path, "states", 8 * BLOCK, io)) as file:
        file.write(offset, memory).wait()
        with descriptor(file) as second:
            (byte,) = os.pread(second, 1, at)
            os.pwrite(second, bytes([byte ^ 0x10]), at)
        transfer = file.read(offset, pool.lease(memory.nbytes))
        error = failure(transfer)
        assert error.problems[0].given == f"the block at offset {block} of {file.path}"
        assert str(error).startswith("file error: ") and "must contain what was written there" in str(error)
        assert failure(transfer) is error and transfer.is_done
        file.write(offset, memory).wait()
        assert torch.equal(read_back(file, offset, memory.nbytes, pool), memory)


def test_a_torn_block_is_found_and_the_others_stay_readable(io: BlockIO, pool: AlignedMemory, tmp_path: Path) -> None:
    with closing(BlockFile(tmp_path, "states", 4 * BLOCK, io)) as file, descriptor(file) as second:
        memory = random_buffer(pool, 4 * BLOCK)
        parts = [memory[index * BLOCK : (index + 1) * BLOCK] for index in range(4)]
        file.write(0, memory).wait()
        old = os.pread(second, BLOCK // 2, BLOCK + BLOCK // 2)
        file.write(BLOCK, parts[1].random_()).wait()
        os.pwrite(second, old, BLOCK + BLOCK // 2)
        reads = [(part, copy, file.read(at, copy)) for at, part, copy in zip(
            range(0, 4 * BLOCK, BLOCK), parts, [pool.lease(BLOCK) for _ in range(4)], strict=True
        )]  # fmt: skip
        torn = reads.pop(1)
        assert f"the block at offset {BLOCK} of {file.path}" in str(failure(torn[2]))
        for part, copy, transfer in reads:
            transfer.wait()
            assert torch.equal(part, copy)


@each("size", [BLOCK, BLOCK + 3 * ALIGNMENT, BLOCK + 10_001, 2 * BLOCK - 1])
def test_a_truncated_file_is_found(size: int, io: BlockIO, pool: AlignedMemory, tmp_path: Path) -> None:
    with closing(BlockFile(tmp_path, "states", 2 * BLOCK, io)) as file:
        memory = random_buffer(pool, 2 * BLOCK)
        file.write(0, memory).wait()
        with descriptor(file) as second:
            os.ftruncate(second, size)
        error = failure(file.read(0, pool.lease(2 * BLOCK)))
        assert error.problems[0].given == f"the block at offset {BLOCK} of {file.path}"
        assert error.problems[0].rule == f"must have {BLOCK} bytes; {size - BLOCK} could be read"


def test_a_read_that_the_disk_fails(io: BlockIO, pool: AlignedMemory, tmp_path: Path) -> None:
    """All but the first MiB of the disk is taken away."""
    with ext4_disk(tmp_path) as (folder, disk), closing(BlockFile(folder, "states", 1 << 20, io)) as file:
        memory = random_buffer(pool, 1 << 20)
        file.write(0, memory).wait()
        with descriptor(file) as second:
            os.fdatasync(second)
            size = disk.stat().st_size
            os.truncate(disk, 1 << 20)
            os.posix_fadvise(second, 0, 0, os.POSIX_FADV_DONTNEED)
            error = failure(file.read(0, pool.lease(1 << 20)))
            os.truncate(disk, size)
        assert error.problems[0].rule == "must be readable: Input/output error"
        assert re.fullmatch(rf"the block at offset \d+ of {file.path}", error.problems[0].given)


@each("taken", [0, 300_000])
def test_a_full_disk_is_found_at_the_beginning(taken: int, io: BlockIO, tmp_path: Path) -> None:
    with small_disk(tmp_path / f"disk{taken}") as folder:
        (folder / "other").write_bytes(bytes(taken))
        free, opened = free_bytes(folder), os.listdir("/proc/self/fd")
        with pytest.raises(FileError) as caught:
            BlockFile(folder, "states", (1 << 20) + 1, io)
        given, rule = caught.value.problems[0].given, caught.value.problems[0].rule
        assert given == f"a file of {(1 << 20) + ALIGNMENT} bytes (1.0 MiB) in {folder}"
        assert f"{free} bytes" in rule and rule.endswith("free: No space left on device")
        assert free_bytes(folder) == free and os.listdir(folder) == ["other"]
        assert os.listdir("/proc/self/fd") == opened
        with closing(BlockFile(folder, "states", free, io)):
            assert free_bytes(folder) == 0
        assert free_bytes(folder) == free


def test_a_file_that_is_too_large_is_found_at_the_beginning(io: BlockIO, tmp_path: Path) -> None:
    with largest_file(BLOCK), pytest.raises(FileError, match="File too large"):
        BlockFile(tmp_path, "states", BLOCK + 1, io)


def test_a_disk_that_is_full_later(io: BlockIO, pool: AlignedMemory, tmp_path: Path) -> None:
    """Some file systems need new space for every write, whatever was reserved; here the file has lost its own."""
    with small_disk(tmp_path / "disk") as folder, closing(BlockFile(folder, "states", 4 * BLOCK, io)) as file:
        memory = random_buffer(pool, 4 * BLOCK)
        with descriptor(file) as second:
            os.ftruncate(second, 0)
        (folder / "other").write_bytes(bytes(free_bytes(folder) - BLOCK))
        error = failure(file.write(0, memory))
        assert error.problems[0].rule == "must be written: No space left on device"
        assert re.fullmatch(rf"the block at offset \d+ of {file.path}", error.problems[0].given)
        (folder / "other").unlink()
        file.write(0, memory).wait()
        assert torch.equal(read_back(file, 0, memory.nbytes, pool), memory)


def test_what_a_failed_write_has_left_is_not_read_as_its_contents(
    io: BlockIO, pool: AlignedMemory, tmp_path: Path
) -> None:
    """The older contents of a block are whole, or overwritten in part; neither is what was written last."""
    with closing(BlockFile(tmp_path, "states", 3 * BLOCK, io)) as file:
        for limit in (2 * BLOCK, 2 * BLOCK + ALIGNMENT):
            older, newer = (random_buffer(pool, 3 * BLOCK) for _ in range(2))
            file.write(0, older).wait()
            with largest_file(limit):
                error = failure(file.write(0, newer))
            assert error.problems[0].given == f"the block at offset {2 * BLOCK} of {file.path}"
            assert error.problems[0].rule == "must be written: File too large"
            error = failure(file.read(0, pool.lease(3 * BLOCK)))
            assert f"the block at offset {2 * BLOCK} of {file.path}\n    rule:  must contain what was" in str(error)


def test_folders_in_which_no_file_can_be_made(io: BlockIO, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    places = {"missing": "No such file or directory", "file": "Not a directory"}
    for name, reason in places.items():
        with pytest.raises(FileError) as caught:
            BlockFile(tmp_path / name, "states", BLOCK, io)
        problem = caught.value.problems[0]
        assert (problem.given, problem.rule.partition(": ")[2]) == (str(tmp_path / name), reason)
        assert problem.legal
    error = pytest.raises(FileError, match=r"^file error: .*/readable\n.*: Read-only file system")
    with mounted(tmp_path / "readable", "-t", "tmpfs", "-o", "ro", "none") as folder, error:
        BlockFile(folder, "states", BLOCK, io)


def test_a_file_system_without_direct_access(io: BlockIO, pool: AlignedMemory, tmp_path: Path) -> None:
    ramfs = mounted(tmp_path / "disk", "-t", "ramfs", "none")
    with ramfs as folder, closing(BlockFile(folder, "states", 3 * BLOCK, io)) as file:
        assert not file.is_direct and os.listdir(folder) == []
        memory = random_buffer(pool, 3 * BLOCK)
        file.write(0, memory).wait()
        assert torch.equal(read_back(file, 0, memory.nbytes, pool), memory)


USER = """
import os, sys
from pathlib import Path
from megazero.memory.block_file import AlignedMemory, BlockFile, BlockIO
from megazero.memory.ledger_interface import NullLedger

pool = AlignedMemory(is_pinned=False, ledger=NullLedger())
memory, copy = pool.lease(500_000).random_(), pool.lease(500_000)
file = BlockFile(Path(sys.argv[1]), "states", memory.nbytes, BlockIO())
file.write(0, memory).wait()
print(os.getpid(), flush=True)
for line in sys.stdin:
    file.read(0, copy).wait()
    print((memory == copy).all().item(), flush=True)
"""


def test_two_processes_share_a_folder_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", mib=8) as folder:
        free = free_bytes(folder)
        users = [
            subprocess.Popen(
                [warm_python(), "-c", USER, str(folder)],
                env=ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        numbers = [int(user.stdout.readline()) for user in users if user.stdout]
        assert os.listdir(folder) == [] and free_bytes(folder) <= free - 1_000_000
        for index, user in enumerate(users):
            assert user.stdin is not None and user.stdout is not None
            user.stdin.write("read\n")
            user.stdin.flush()
            assert user.stdout.readline() == "True\n"
            os.kill(numbers[index], 9)
            assert user.wait() == -9
            user.stdin.close()
            user.stdout.close()
        assert free_bytes(folder) == free and os.listdir(folder) == []


UNFINISHED = """
import ctypes, sys, time
from pathlib import Path
from megazero.memory.block_file import AlignedMemory, BlockFile, BlockIO
from megazero.memory.ledger_interface import NullLedger

def running():
    pool, io = AlignedMemory(is_pinned=False, ledger=NullLedger()), BlockIO(block_bytes=4096)
    memory, copy = pool.lease(16 << 20), pool.lease(16 << 20)
    file = BlockFile(Path(sys.argv[1]), "states", memory.nbytes, io)
    file.write(0, memory).wait()
    for _ in range(io.queue_depth):
        io.submit(lambda: time.sleep(0.1))
    return file.read(0, copy)

# Python's own end, which a process of `warm_python` does not have otherwise.
ctypes.pythonapi.Py_Exit(8 if running().is_done else 7)
"""


def test_a_process_ends_while_transfers_are_running(tmp_path: Path) -> None:
    words = [warm_python(), "-c", UNFINISHED, str(tmp_path)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")


def test_close_waits_for_transfers_and_drops_their_errors(pool: AlignedMemory, tmp_path: Path) -> None:
    gate = Event()
    with closing(BlockIO(block_bytes=BLOCK, queue_depth=1)) as io:
        file = BlockFile(tmp_path, "states", 2 * BLOCK, io)
        memory = random_buffer(pool, 2 * BLOCK)
        file.write(0, memory).wait()
        with descriptor(file) as second:
            os.ftruncate(second, BLOCK)
        io.submit(gate.wait)
        transfer = file.read(0, pool.lease(2 * BLOCK))
        closer = Thread(target=file.close)
        closer.start()
        assert closer.is_alive() and not transfer.is_done
        gate.set()
        closer.join()
        assert transfer.is_done and "could be read" in str(failure(transfer))
        with pytest.raises(AssertionError, match="has been closed"):
            file.read(0, memory)
        file.close()


def test_space_comes_back_without_close(io: BlockIO, pool: AlignedMemory, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as folder:
        free = free_bytes(folder)
        file = BlockFile(folder, "states", BLOCK, io)
        with pytest.warns(ResourceWarning):
            del file
        assert free_bytes(folder) == free


def test_an_interrupted_request_ends(pool: AlignedMemory, tmp_path: Path) -> None:
    class Interrupted(BlockIO):
        num_requests = 0

        def submit(self, request: Callable[[], object]) -> None:
            self.num_requests += 1
            if self.num_requests == 3:
                raise KeyboardInterrupt
            super().submit(request)

    with closing(Interrupted(block_bytes=BLOCK)) as io:
        file = BlockFile(tmp_path, "states", 4 * BLOCK, io)
        with pytest.raises(KeyboardInterrupt):
            file.write(0, random_buffer(pool, 4 * BLOCK))
        file.close()


def test_memory_is_not_retained_after_a_transfer(pool: AlignedMemory, tmp_path: Path) -> None:
    with closing(BlockIO(block_bytes=BLOCK, queue_depth=1)) as io, closing(BlockFile(tmp_path, "s", BLOCK, io)) as file:
        memory = random_buffer(pool, BLOCK)
        released = weakref.ref(memory.untyped_storage())
        file.write(0, memory).wait()
        del memory
        for _ in range(1000):  # the thread is a moment behind
            if released() is not None:
                time.sleep(0.01)
        assert released() is None


def test_wrong_calls(io: BlockIO, pool: AlignedMemory, tmp_path: Path) -> None:
    gate = Event()
    with closing(BlockFile(tmp_path, "states", 4 * BLOCK, io)) as file:
        memory = random_buffer(pool, 2 * BLOCK)
        file.write(BLOCK, memory).wait()
        for offset, part, told in (
            (0, memory, "no such range has been written at 0"),
            (BLOCK, memory[: BLOCK // 2], f"has {BLOCK} bytes, not {BLOCK // 2}"),
            (BLOCK + ALIGNMENT, memory[:ALIGNMENT], "no such range"),
            (3 * BLOCK, memory, "is not within"),
            (BLOCK, memory[ALIGNMENT // 2 : -ALIGNMENT // 2], "no multiples of 4096"),
            (BLOCK, memory[:100], "no multiples of 4096"),
            (BLOCK, memory[:0], "no multiples of 4096"),
            (BLOCK + 512, memory[:BLOCK], "no multiples of 4096"),
        ):
            with pytest.raises(AssertionError, match=told):
                file.read(offset, part)
        for offset, nbytes, told in (
            (BLOCK, ALIGNMENT, f"has {BLOCK} bytes, not {ALIGNMENT}"),
            (BLOCK + ALIGNMENT, ALIGNMENT, f"overlap the {BLOCK} at {BLOCK}"),
            (3 * BLOCK - ALIGNMENT, 2 * ALIGNMENT, f"overlap the {BLOCK} at {2 * BLOCK}"),
        ):
            with pytest.raises(AssertionError, match=told):
                file.write(offset, memory[:nbytes])
        for _ in range(io.queue_depth):
            io.submit(gate.wait)
        running = file.read(BLOCK, memory)
        for again in (file.read, file.write):
            with pytest.raises(AssertionError, match="has not been waited for"):
                again(BLOCK, memory)
        gate.set()
        running.wait()
    io.close()
    with pytest.raises(AssertionError, match="have been ended"):
        io.submit(gate.set)


@each(
    ("settings", "given"),
    [
        ({"block_bytes": 0}, "blocks of 0 bytes"),
        ({"block_bytes": 4097}, "blocks of 4097 bytes"),
        ({"block_bytes": -4096}, "blocks of -4096 bytes"),
        ({"block_bytes": 1 << 31}, "blocks of 2147483648 bytes"),
        ({"queue_depth": 0}, "a queue depth of 0"),
    ],
)
def test_illegal_sizes(settings: dict[str, int], given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BlockIO(**settings)
    assert caught.value.problems[0].given == given and caught.value.problems[0].legal


def test_buffers_are_aligned_and_used_again() -> None:
    with Ledger(torch.device("cpu")) as ledger:
        pool = AlignedMemory(is_pinned=False, ledger=ledger)
        sizes = [1, 4096, 4097, 8192, 100_000, 3_000_000]
        buffers = [pool.lease(size) for size in sizes]
        rounded = [4096, 4096, 8192, 8192, 102_400, 3_002_368]
        assert [(buffer.nbytes, buffer.dtype) for buffer in buffers] == [(size, torch.uint8) for size in rounded]
        assert [buffer.data_ptr() % 4096 for buffer in buffers] == [0] * len(sizes)
        assert pool.live_bytes == pool.peak_bytes == sum(rounded)
        storages = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
        assert pool.allocated_bytes == storages == ledger.elsewhere_bytes()
        assert sum(ledger.live_bytes().values()) == 0
        freed = {buffers[index].data_ptr() for index in (2, 4)}
        for index in (2, 4):
            pool.free(buffers[index])
        assert pool.live_bytes == sum(rounded) - 8192 - 102_400
        assert {pool.lease(5000).data_ptr(), pool.lease(102_400).data_ptr()} == freed
        assert (pool.allocated_bytes, pool.live_bytes, pool.peak_bytes) == (storages, sum(rounded), sum(rounded))
        assert pool.lease(5000).data_ptr() not in {buffer.data_ptr() for buffer in buffers}
