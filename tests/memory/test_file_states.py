"""Tests of states in files against plain tensors: what is written is read, through a constant number of buffers."""

import os
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from time import sleep

import pytest
import torch
from support.each import each
from support.late_copies import LateCopies, late_copies
from torch import Tensor

from megazero.errors import FileError
from megazero.memory.block_file import AlignedMemory, BlockIO
from megazero.memory.copies import ARRIVED, Arrival
from megazero.memory.file_states import FileSlice, FileState, FileStates, file_bandwidth
from megazero.memory.ledger_interface import NullLedger

# Blocks of a page and more, of less, of one element.
STARTS = (0, 3000, 3001, 3100, 5148)
BLOCKS = tuple(slice(start, stop) for start, stop in pairwise(STARTS))


class Files:
    """States in files of a folder, and the pool of their buffers."""

    def __init__(self, folder: Path, num_buffers: int, *, writes_behind: bool = True) -> None:
        self.memory = AlignedMemory(is_pinned=False, ledger=NullLedger())
        self.moved = {"read": 0, "write": 0}
        io = BlockIO(block_bytes=4096, queue_depth=2)
        self.states = FileStates(
            folder, num_buffers=num_buffers, memory=self.memory, io=io, writes_behind=writes_behind, record=self._record
        )

    def _record(self, way: str, nbytes: int) -> None:
        self.moved[way] += nbytes


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path / "new" / "folder", 2)
    yield made
    made.states.close()


def part_of(block: slice, draw: random.Random) -> slice:
    start = draw.randrange(block.start, block.stop)
    return slice(start, draw.randrange(start, block.stop) + 1)


def test_a_state_that_is_closed_leaves_the_others(tmp_path: Path) -> None:
    """Its buffers, one of which is being written, are those of other blocks from then on."""
    with late_copies():
        files = Files(tmp_path, 3)
        closed, other = (files.states.allocate(name, torch.float32, STARTS) for name in ("closed", "other"))
        other[BLOCKS[0]].fill_(1)
        for block in BLOCKS[:2]:
            closed[block].fill_(2)
        closed.store(BLOCKS[1], ARRIVED)
        assert files.memory.live_bytes == 3 * (most := files.memory.allocated_bytes // 3 - 4096)
        closed.close()
        assert files.memory.live_bytes == most
        for block in BLOCKS[1:]:
            other[block].fill_(3)
        assert bool((other[BLOCKS[0]] == 1).all()) and bool((other[BLOCKS[3]] == 3).all())
        assert files.memory.allocated_bytes == 3 * (most + 4096)
        files.states.close()


@each("writes_behind", [True, False])
@each("num_buffers", [1, 2, 5])
@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_states_hold_what_a_tensor_holds(
    dtype: torch.dtype, num_buffers: int, writes_behind: bool, tmp_path: Path
) -> None:
    """Blocks are fetched, read, written, stored and overwritten in any order, and no buffer has them when they must."""
    draw = random.Random(f"{dtype} {num_buffers} {writes_behind}")
    with late_copies():
        files = Files(tmp_path, num_buffers, writes_behind=writes_behind)
        states = [files.states.allocate(name, dtype, STARTS) for name in ("master", "moments")]
        plain = [torch.zeros(STARTS[-1], dtype=dtype) for _ in states]
        assert [state.nbytes for state in states] == [tensor.nbytes for tensor in plain]
        link = LateCopies(torch.device("cpu"))
        copies: list[tuple[Arrival, Tensor, Tensor]] = []
        for _ in range(400):
            number, block = draw.randrange(len(states)), draw.choice(BLOCKS)
            state, tensor, part = states[number], plain[number], part_of(block, draw)
            act = draw.choice(("fetch", "read", "read", "read", "write", "store", "leave", "overwrite", "forget"))
            while copies and act in ("write", "overwrite"):  # what is being copied is not written to
                check_copy(*copies.pop(0))
            if act == "fetch":
                state.fetch(part)
            elif act == "read":
                assert torch.equal(state[part], tensor[part])
            elif act == "write":
                state[part].copy_(values := torch.randn(part.stop - part.start).to(dtype))
                tensor[part] = values
            elif act in ("store", "leave"):
                copied = torch.empty(part.stop - part.start, dtype=dtype)
                arrival = link.copy(copied, state[part])
                (state.store if act == "store" else state.leave)(part, arrival)
                copies.append((arrival, copied, tensor[part].clone()))
            elif act == "overwrite":
                state.overwrite(block).copy_(values := torch.randn(block.stop - block.start).to(dtype))
                tensor[block] = values
            else:
                files.states.forget_fetches()
        for state, tensor in zip(states, plain, strict=True):
            for block in BLOCKS:
                assert torch.equal(state[block], tensor[block])
        for copy in copies:
            check_copy(*copy)
        files.states.close()


def check_copy(arrival: Arrival, copied: Tensor, wanted: Tensor) -> None:
    arrival.finish()
    assert torch.equal(copied, wanted), "the buffer has stayed until the copy was made"


def test_what_is_referred_to_stays_the_state(files: Files) -> None:
    state = files.states.allocate("master", torch.float32, STARTS)
    first = state[slice(1, 5)]
    for block in BLOCKS[1:]:
        state[block].fill_(7.0)
    first.fill_(3.0)
    assert torch.equal(state[slice(0, 6)], torch.tensor([0.0, 3, 3, 3, 3, 0]))
    state.store(BLOCKS[0], ARRIVED)
    for block in BLOCKS[1:]:
        assert bool((state[block] == 7.0).all())
    first.fill_(4.0)
    assert state[slice(1, 5)].tolist() == [4.0] * 4
    del first
    for block in BLOCKS[1:]:
        state.fetch(block)
        state[block].add_(1.0)
    assert state[slice(0, 6)].tolist() == [0.0, 4, 4, 4, 4, 0]


def test_buffers_are_as_many_as_wanted_and_unchanged_blocks_are_not_written(files: Files) -> None:
    state = files.states.allocate("master", torch.float32, STARTS)
    for block in BLOCKS:
        state[block].fill_(1.0)
    allocated = files.memory.allocated_bytes
    for block in BLOCKS:
        state[block].add_(1.0)
    written, nbytes = files.moved["write"], 4 * STARTS[-1]
    for _ in range(3):
        assert all(bool((state[block] == 2.0).all()) for block in BLOCKS)
    assert files.memory.allocated_bytes == allocated == 2 * (12288 + 4096), "with room to be aligned"
    assert files.moved["write"] - written <= 2 * 4 * 3000, "those in the buffers before are written, and no others"
    assert files.moved["read"] >= 3 * (nbytes - 2 * 4 * 3000)


def test_no_more_is_fetched_than_there_are_buffers(files: Files) -> None:
    state = files.states.allocate("master", torch.float32, STARTS)
    assert [state.fetch(block) for block in BLOCKS] == [True, True, False, False]
    assert state.fetch(BLOCKS[0]), "it is there"
    state[BLOCKS[0]].fill_(1.0)
    state.store(BLOCKS[0], ARRIVED)
    state[BLOCKS[3]].fill_(2.0)  # it waits until a buffer is free
    assert state[BLOCKS[1]].tolist() == [0.0], "what is fetched is not put back for others"
    assert not state.fetch(BLOCKS[2])
    files.states.forget_fetches()
    assert any(state.fetch(BLOCKS[2]) or sleep(0.01) for _ in range(3000)), "once the idle ones have been written"


def test_a_buffer_is_used_for_another_block_than_one_that_nobody_waits_for(tmp_path: Path) -> None:
    with late_copies():
        files = Files(tmp_path, 2)
        state = files.states.allocate("master", torch.float32, STARTS)
        for number, block in enumerate(BLOCKS):
            state[block].fill_(number)
        assert not state.fetch(BLOCKS[0]), "the last two are being written"
        assert state[BLOCKS[2]].tolist() == [2.0] * 99, "one has been"
        assert state.fetch(BLOCKS[0])
        files.states.forget_fetches()
        kept = state[BLOCKS[3]]
        assert state[BLOCKS[2]].tolist() == [2.0] * 99 and bool((kept == 3).all())
        assert files.memory.peak_bytes == 2 * 12288
        files.states.close()


def test_a_slice_comes_when_it_is_asked_for(files: Files) -> None:
    state = files.states.allocate("exp_avg", torch.bfloat16, STARTS)
    part = FileSlice(state, slice(3005, 3010))
    assert part.dtype == torch.bfloat16 and files.memory.live_bytes == 0
    part.view().fill_(2.0)
    assert state[slice(3004, 3006)].tolist() == [0.0, 2.0]
    assert state[slice(9, 9)].numel() == 0


def damage(state: FileState, block: slice) -> str:
    """Flip a bit of the block in its file, and return the file's path."""
    own = state._block_at(block)
    descriptor = os.open(f"/proc/self/fd/{own.file._file.fileno()}", os.O_RDWR)
    byte = os.pread(descriptor, 1, own.offset)[0]
    os.pwrite(descriptor, bytes([byte ^ 4]), own.offset)
    os.fdatasync(descriptor)
    os.close(descriptor)
    return str(own.file.path)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="a file without a name is opened through /proc")
def test_after_damage_no_state_is_used_any_more(files: Files) -> None:
    state = files.states.allocate("master", torch.float32, STARTS)
    for block in BLOCKS:
        state[block].fill_(1.0)
    path = damage(state, BLOCKS[0])
    for use in (lambda: state[BLOCKS[0]], lambda: state[BLOCKS[0]], lambda: state.fetch(BLOCKS[1])):
        with pytest.raises(FileError, match="checksum") as caught:
            use()
        assert path in str(caught.value) and "offset 0" in str(caught.value)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="a file without a name is opened through /proc")
def test_damage_that_was_fetched_is_not_written_back(files: Files) -> None:
    """A damaged block that nobody has used is not taken for one that has changed when its buffer is wanted."""
    state = files.states.allocate("master", torch.float32, STARTS)
    for block in BLOCKS:
        state[block].fill_(1.0)
    damage(state, BLOCKS[0])
    assert any(state.fetch(BLOCKS[0]) or sleep(0.01) for _ in range(3000))
    while not state._block_at(BLOCKS[0]).is_done:
        sleep(0.01)
    files.states.forget_fetches()
    with pytest.raises(FileError, match="checksum"):
        for block in BLOCKS[1:]:
            state[block].add_(1.0)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError) as caught:
        Files(tmp_path / "file" / "below", 2)
    assert str(tmp_path / "file" / "below") in str(caught.value) and "directory" in str(caught.value).lower()


def test_a_rate_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    io = BlockIO()
    rate = file_bandwidth(tmp_path, 100_000, io)
    assert rate is not None and rate > 0
    assert file_bandwidth(tmp_path / "nowhere", 100_000, io) is None
    io.close()
    assert list(tmp_path.iterdir()) == []
