"""Tests arenas: tensors keep values and identity while their memory moves; real tensors, hollow ones, and a ledger."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.each import each
from torch import Tensor

from megazero.memory.arena import Arena, ArenaBlock
from megazero.memory.ledger import Ledger
from megazero.planner.dry.hollow import Hollow

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8]


def arena_of(capacity: int, alignment: int = 512) -> Arena:
    return Arena(capacity, CPU, category="gradients", alignment=alignment)


def take(arena: Arena, numel: int, dtype: torch.dtype = torch.uint8, *, movable: bool = True) -> ArenaBlock:
    block = arena.allocate(numel, dtype, movable=movable)
    assert block is not None
    return block


@each("dtype", DTYPES)
@each("numel", [0, 1, 7])
def test_a_block_is_a_dense_tensor_of_the_size_asked_for(dtype: torch.dtype, numel: int) -> None:
    arena = arena_of(1024)
    take(arena, 3)
    block = take(arena, numel, dtype)
    assert (block.tensor.shape, block.tensor.dtype, block.tensor.device) == ((numel,), dtype, CPU)
    assert block.tensor.is_contiguous()
    assert arena.contains(block.tensor) and arena.contains(block.tensor[:1].view(-1, 1))
    block.tensor.copy_(torch.arange(numel))
    assert block.tensor.tolist() == list(range(numel))


def test_holds_only_its_own() -> None:
    arena = arena_of(512)
    assert not arena.contains(torch.zeros(4))
    assert not arena.contains(take(arena_of(512), 4).tensor)
    assert not arena.contains(take(arena, 4).tensor.clone())


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "allocate fixed", "release", "pin", "unpin"]),
        st.integers(0, 40),
        st.sampled_from(DTYPES),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_any_history_leaves_every_tensor_its_values(actions: list[tuple[str, int, torch.dtype]]) -> None:
    arena = arena_of(320, alignment=8)
    live: list[tuple[ArenaBlock, Tensor, Tensor]] = []  # block, its tensor, its values
    pinned: list[tuple[ArenaBlock, int]] = []
    for action, which, dtype in actions:
        if action.startswith("allocate"):
            occupied = -(-which * dtype.itemsize // 8) * 8
            free = arena.statistics.free_bytes
            block = arena.allocate(which, dtype, movable=action == "allocate")
            if block is not None:
                values = torch.randint(0, 256, (which,)).to(dtype)
                block.tensor.copy_(values)
                live.append((block, block.tensor, values))
            else:
                assert occupied > free or pinned or any(not b._block.is_movable for b, _, _ in live)
        elif live:
            block = live[which % len(live)][0]
            if action == "release":
                live.pop(which % len(live))[0].release()
                pinned = [(other, address) for other, address in pinned if other is not block]
            elif action == "pin":
                block.pin()
                pinned.append((block, block.tensor.data_ptr()))
            elif pinned:
                pinned.pop()[0].unpin()
        for block, tensor, values in live:
            assert block.tensor is tensor and arena.contains(tensor)
            assert torch.equal(tensor, values)
        assert all(block.tensor.data_ptr() == address for block, address in pinned)


def test_a_tensor_moves_and_stays_the_same_object() -> None:
    arena = arena_of(3 * 512)
    hole, block = take(arena, 512), take(arena, 65, torch.float64)
    block.tensor.copy_(torch.arange(65))
    tensor, address = block.tensor, block.tensor.data_ptr()
    hole.release()
    assert arena.allocate(512, torch.uint8) is not None  # goes into the hole, the first fit
    assert tensor.data_ptr() == address

    arena = arena_of(3 * 512)
    hole, block = take(arena, 512), take(arena, 64, torch.float64)
    block.tensor.copy_(torch.arange(64))
    tensor, address = block.tensor, block.tensor.data_ptr()
    hole.release()
    take(arena, 1024).tensor.fill_(255)
    assert tensor.data_ptr() == address - 512
    assert tensor is block.tensor and tensor.tolist() == list(range(64))
    assert (arena.statistics.num_compactions, arena.statistics.moved_bytes) == (1, 512)


# Sizes and distances of moves, in bytes, longer than, shorter than and equal to the staging piece and to each other.
@each("distance", [1, 3, 512])
@each("nbytes", [1, 2, 511, 512, 513, 3000, 9 << 20])
def test_overlapping_moves_keep_every_byte(distance: int, nbytes: int) -> None:
    arena = arena_of(nbytes + 2 * distance, alignment=1)
    hole, block = take(arena, distance), take(arena, nbytes)
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    block.tensor.copy_(values)
    hole.release()
    take(arena, 2 * distance).tensor.zero_()
    assert torch.equal(block.tensor, values)
    assert arena.statistics.moved_bytes == nbytes


def test_pinned_and_fixed_blocks_stay() -> None:
    for movable in (False, True):
        arena = arena_of(3 * 512)
        hole, block = take(arena, 512), take(arena, 512, movable=movable)
        if movable:
            block.pin()
        hole.release()
        assert arena.allocate(1024, torch.uint8) is None
        if movable:
            block.unpin()
            assert arena.allocate(1024, torch.uint8) is not None


def test_autograd_does_not_notice_a_move() -> None:
    arena = arena_of(3 * 512)
    hole, block = take(arena, 512), take(arena, 64, torch.float64)
    block.tensor.fill_(3.0)
    version = block.tensor._version
    hole.release()
    take(arena, 1024)
    assert block.tensor._version == version and block.tensor.grad_fn is None


def test_blocks_have_versions_of_their_own() -> None:
    """Writing to one block does not invalidate what autograd has saved of another."""
    arena = arena_of(1024)
    saved, other = take(arena, 4, torch.float64), take(arena, 4, torch.float64)
    saved.tensor.fill_(3.0)
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    product = (weight * saved.tensor).sum()
    other.tensor.zero_()
    product.backward()
    assert weight.grad is not None and weight.grad.tolist() == [3.0] * 4


def test_a_block_is_released_once() -> None:
    block = take(arena_of(512), 0)
    block.release()
    for use in (block.release, block.pin, block.unpin):
        with pytest.raises(AssertionError, match="released once"):
            use()


def test_what_does_not_fit_is_none_and_counted() -> None:
    arena = arena_of(1024)
    take(arena, 512)
    assert arena.allocate(129, torch.float32) is None
    assert arena.statistics.failed_requests == 1
    take(arena, 128, torch.float32)
    assert arena.statistics.fragmentation == 0


def test_the_ledger_counts_an_arena_once() -> None:
    with Ledger(CPU) as ledger:
        arena = Arena(4096, CPU, category="gradients", ledger=ledger)
        assert ledger.live_bytes()["gradients"] == 4096
        blocks = [take(arena, 5, torch.float32) for _ in range(3)]
        for block in blocks:
            block.tensor.zero_()
        assert ledger.live_bytes()["gradients"] == 4096
        assert sum(ledger.live_bytes().values()) == 4096
        blocks.clear()
        del arena, block
        assert sum(ledger.live_bytes().values()) == 0


def test_hollow_tensors_are_allocated_moved_and_released() -> None:
    with Hollow():
        arena = Arena(3 * 512, CPU, category="gradients")
        hole, block = take(arena, 512), take(arena, 64, torch.float64)
        assert arena.contains(block.tensor.view(8, 8)) and not arena.contains(torch.empty(3))
        hole.release()
        assert block.tensor.storage_offset() == 64
        large = take(arena, 512, torch.float16)
        assert block.tensor.storage_offset() == 0 and large.tensor.shape == (512,)
        large.release()
        block.release()
    assert arena.statistics.live_bytes == 0


@pytest.mark.cuda
@pytest.mark.parametrize("distance", [512, 1 << 20])
def test_moves_on_a_gpu(distance: int) -> None:
    nbytes = 9 << 20
    device = torch.device("cuda", 0)
    arena = Arena(nbytes + 2 * distance, device, category="gradients")
    hole, block = take(arena, distance), take(arena, nbytes)
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    block.tensor.copy_(values)
    hole.release()
    take(arena, 2 * distance).tensor.zero_()
    assert torch.equal(block.tensor, values)
