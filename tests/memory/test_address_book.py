"""Tests the address book against a map of bytes: which requests fit, which blocks slide or stay, and its statistics."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.each import each

from megazero.memory.address_book import AddressBook, Block

FREE = -1

# An action and a number: the bytes of a request, or else a number that picks a live block.
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "allocate fixed", "free", "pin", "unpin"]), st.integers(0, 70)), max_size=60
)


class ByteMap:
    """Memory as an array with one number per byte: the request that occupies it."""

    def __init__(self, book: AddressBook, capacity: int) -> None:
        self.book = book
        self.bytes: NDArray[np.int64] = np.full(capacity, FREE)
        self.live: dict[int, Block] = {}
        self.most_live = self.failed = self.moved = self.compactions = 0

    def allocate(self, number: int, nbytes: int, *, movable: bool) -> bool:
        """Carry out a request and its moves; return True if it was granted."""
        walls = {key: block.start for key, block in self.live.items() if block.is_wall}
        grant = self.book.allocate(nbytes, movable=movable)
        if grant is None:
            self.failed += 1
            return False
        for block, source, target in grant.moves:
            assert target < source and block.start == target
            piece = self.bytes[source : source + block.nbytes].copy()
            assert len(set(piece)) == 1, "every byte of the block is still there when it moves"
            self.bytes[source : source + block.nbytes] = FREE
            assert (self.bytes[target : target + block.nbytes] == FREE).all()
            self.bytes[target : target + block.nbytes] = piece
            self.moved += block.nbytes
        self.compactions += bool(grant.moves)
        assert all(self.live[key].start == start for key, start in walls.items()), "walls stay"
        block = grant.block
        assert block.nbytes >= nbytes and (self.bytes[block.start : block.stop] == FREE).all()
        self.bytes[block.start : block.stop] = number
        self.live[number] = block
        self.most_live = max(self.most_live, self.num_live)
        return True

    def free(self, number: int) -> None:
        self.book.free(self.live.pop(number))
        self.bytes[self.bytes == number] = FREE

    @property
    def num_live(self) -> int:
        return int((self.bytes != FREE).sum())

    def gaps(self) -> list[int]:
        """Return the lengths of the free runs, by address."""
        marks = "".join("." if owner == FREE else "x" for owner in self.bytes)
        return [len(run) for run in marks.split("x") if run]

    def check(self) -> None:
        for number, block in self.live.items():
            expected = np.flatnonzero(self.bytes == number)
            assert expected.tolist() == list(range(block.start, block.stop))
        seen = self.book.statistics
        free = len(self.bytes) - self.num_live
        largest = max(self.gaps(), default=0)
        assert (seen.capacity_bytes, seen.live_bytes, seen.free_bytes) == (len(self.bytes), self.num_live, free)
        assert (seen.largest_free_bytes, seen.high_water_bytes) == (largest, self.most_live)
        assert (seen.failed_requests, seen.moved_bytes) == (self.failed, self.moved)
        assert seen.num_compactions == self.compactions
        assert seen.fragmentation == pytest.approx((free - largest) / free if free else 0.0)


def play(memory: ByteMap, actions: list[tuple[str, int]], alignment: int) -> None:
    pinned: list[Block] = []
    for number, (action, which) in enumerate(actions):
        if action.startswith("allocate"):
            occupied = -(-which // alignment) * alignment
            fits_plainly = occupied <= max(memory.gaps(), default=0)
            has_walls = any(block.is_wall for block in memory.live.values() if block.nbytes)
            fits_in_total = occupied <= len(memory.bytes) - memory.num_live
            granted = memory.allocate(number, which, movable=action == "allocate")
            assert granted >= fits_plainly and granted <= fits_in_total
            assert granted == fits_in_total or has_walls
        elif memory.live:
            key = sorted(memory.live)[which % len(memory.live)]
            if action == "free":
                memory.free(key)
            elif action == "pin":
                memory.book.pin(memory.live[key])
                pinned.append(memory.live[key])
            elif pinned:
                memory.book.unpin(pinned.pop(which % len(pinned)))
        memory.check()


@given(ACTIONS, st.sampled_from([1, 4, 16]))
def test_any_history(actions: list[tuple[str, int]], alignment: int) -> None:
    play(ByteMap(AddressBook(160, alignment=alignment), 160), actions, alignment)


@given(ACTIONS)
def test_without_walls_a_request_fails_only_if_it_does_not_fit_in_total(actions: list[tuple[str, int]]) -> None:
    movable = [(action, which) for action, which in actions if action in ("allocate", "free")]
    play(ByteMap(AddressBook(160, alignment=1), 160), movable, 1)


@given(ACTIONS)
def test_a_plain_allocator_of_the_same_capacity_moves_nothing(actions: list[tuple[str, int]]) -> None:
    memory = ByteMap(AddressBook(160, alignment=1, compacts=False), 160)
    for number, (action, which) in enumerate(actions):
        if action.startswith("allocate"):
            fits = which <= max(memory.gaps(), default=0) or not which
            assert memory.allocate(number, which, movable=True) == fits
        elif action == "free" and memory.live:
            memory.free(sorted(memory.live)[which % len(memory.live)])
        memory.check()
    assert memory.compactions == 0


def holes(pattern: str) -> tuple[AddressBook, list[Block]]:
    """Return a book with holes: runs of a letter are blocks, one byte a letter, capitals fixed; dots are freed."""
    runs = [pattern[0]]
    for letter in pattern[1:]:
        if runs[-1][0] == letter:
            runs[-1] += letter
        else:
            runs.append(letter)
    book = AddressBook(len(pattern), alignment=1)
    grants = [book.allocate(len(run), movable=run.islower()) for run in runs]
    blocks = [grant.block for grant in grants if grant is not None]
    for run, block in zip(runs, blocks, strict=True):
        if run[0] == ".":
            book.free(block)
    return book, [block for run, block in zip(runs, blocks, strict=True) if run[0] != "."]


@each(
    ("pattern", "nbytes", "start", "moves"),
    [
        ("aa..bb...", 2, 2, []),  # the first gap that is large enough, not the best
        ("aa..bbb.", 3, 5, [(4, 2)]),
        ("..aaa..b..", 4, 6, [(7, 5)]),  # one byte slides rather than three
        ("a.b.c.", 3, 3, [(2, 1), (4, 2)]),
        ("a.B.c.", 2, 4, [(4, 3)]),  # only above the wall
        ("a..B.c.", 3, None, []),
        (".a.B", 2, 1, [(1, 0)]),
        ("...", 4, None, []),
    ],
)
def test_what_slides(pattern: str, nbytes: int, start: int | None, moves: list[tuple[int, int]]) -> None:
    book, _ = holes(pattern)
    grant = book.allocate(nbytes)
    found = (None, []) if grant is None else (grant.block.start, [move[1:] for move in grant.moves])
    assert found == (start, moves)


def test_a_pinned_block_slides_again_when_it_is_unpinned_as_often() -> None:
    book, (_, second) = holes("a.b.")
    for _ in range(2):
        book.pin(second)
    assert book.allocate(2) is None
    book.unpin(second)
    assert book.allocate(2) is None
    book.unpin(second)
    assert book.allocate(2) is not None
    with pytest.raises(AssertionError, match="unpinned as often"):
        book.unpin(second)


def test_a_block_is_freed_once() -> None:
    book, (block,) = holes("a.")
    book.free(block)
    with pytest.raises(AssertionError, match="freed once"):
        book.free(block)


def test_capacity_and_sizes_are_multiples_of_the_alignment() -> None:
    book = AddressBook(1300, alignment=512)
    first, second = book.allocate(1), book.allocate(512)
    assert first is not None and second is not None
    assert (book.capacity, first.block.nbytes, second.block.start) == (1024, 512, 512)
    assert book.allocate(1) is None
    empty = book.allocate(0)
    assert empty is not None and empty.block.nbytes == 0


# Long-lived blocks interleaved with short-lived ones (ZeRO, section 6.3).

LAYERS = 8


def forward_with_checkpoints(rest: AddressBook, checkpoints: AddressBook) -> int:
    """Allocate two activations and a checkpoint for each layer, freeing activations once the next layer's are there."""
    previous: list[Block] = []
    for _ in range(LAYERS):
        first, _, second = take(rest, 4), take(checkpoints, 2), take(rest, 4)
        for block in previous:
            rest.free(block)
        previous = [first, second]
    for block in previous:
        rest.free(block)
    return 2 * LAYERS


def backward(rest: AddressBook, gradients: AddressBook) -> int:
    """Allocate scratch, the input's gradient and a kept gradient for each layer; free its output's gradient after."""
    above = take(rest, 3)
    for _ in range(LAYERS):
        scratch, below, _ = take(rest, 1), take(rest, 3), take(gradients, 1)
        rest.free(scratch)
        rest.free(above)
        above = below
    rest.free(above)
    return LAYERS


def take(book: AddressBook, nbytes: int) -> Block:
    grant = book.allocate(nbytes)
    assert grant is not None
    return grant.block


@pytest.mark.parametrize(("step", "capacity", "large"), [(forward_with_checkpoints, 32, 16), (backward, 22, 14)])
def test_long_lived_blocks_fragment_a_plain_memory_and_not_arenas(
    step: Callable[[AddressBook, AddressBook], int], capacity: int, large: int
) -> None:
    """A request of `large` bytes fails when only long-lived blocks are left, since the free bytes are in pieces."""
    plain = AddressBook(capacity, alignment=1, compacts=False)
    long_lived = step(plain, plain)
    seen = plain.statistics
    assert seen.live_bytes == long_lived
    assert seen.free_bytes > 0.3 * capacity and seen.free_bytes >= large
    assert plain.allocate(large) is None

    arena = AddressBook(long_lived, alignment=1, compacts=False)
    rest = AddressBook(capacity - long_lived, alignment=1, compacts=False)  # both have the capacity of the plain memory
    step(rest, arena)
    assert arena.statistics.free_bytes == 0
    assert rest.allocate(large) is not None

    sliding = AddressBook(capacity, alignment=1)
    step(sliding, sliding)
    assert sliding.allocate(large) is not None
    assert sliding.statistics.num_compactions == 1
