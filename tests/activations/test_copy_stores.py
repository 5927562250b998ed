"""Tests of stores of copies: stored values come back from every kind of store, and all memory is released."""

from collections.abc import Callable
from threading import Thread

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.each import each
from support.recomputed_programs import CPU, places_of
from torch import Tensor

from megazero.activations.copy_stores import ArenaStore, CopyStore, DeviceStore, HostStore, ReleaseQueue, StoredCopy
from megazero.memory.host import HostMemory
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_interface import NullLedger

KINDS: dict[str, Callable[[], CopyStore]] = {
    "on the device": lambda: DeviceStore(CPU, ledger=NullLedger()),
    **{keeping: lambda keeping=keeping: places_of(keeping) for keeping in ("arena", "small arena")},
    "unknown number": lambda: ArenaStore(None, CPU, ledger=NullLedger()),
    **{keeping: lambda keeping=keeping: places_of(keeping) for keeping in ("host", "host and arena")},
}


def source(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(0, 100, (numel,)).to(dtype)


def arena_of(copies: CopyStore) -> ArenaStore | None:
    copies = copies.device_store if isinstance(copies, HostStore) else copies
    return copies if isinstance(copies, ArenaStore) else None


def live_bytes(copies: CopyStore) -> int:
    """Return the bytes in use in the arena and in host buffers."""
    arena = arena_of(copies)
    in_arena = 0 if arena is None or arena.arena is None else arena.arena.statistics.live_bytes
    return in_arena + (copies.host.live_bytes if isinstance(copies, HostStore) else 0)


@each("dtype", [torch.float64, torch.float32, torch.bfloat16])
@each("kind", KINDS)
def test_a_copy_comes_back_as_it_was(kind: str, dtype: torch.dtype) -> None:
    copies = KINDS[kind]()
    for _ in range(2):
        copies.begin_pass()
        given = [source(numel, dtype) for numel in (7, 7, 1, 3)]
        expected = [tensor.clone() for tensor in given]
        kept = [copies.store(tensor) for tensor in given]
        for place, tensor in zip(kept, given, strict=True):
            place.release_source()
            tensor.fill_(-1)
        kept[1].prefetch()
        for place, values in zip(kept, expected, strict=True):
            assert place.tensor().shape == values.shape and torch.equal(place.tensor(), values)
            place.unpin()
            assert torch.equal(place.tensor(), values), "it may be read again"
        for place in kept:
            place.release()
        assert live_bytes(copies) == 0


ACTIONS = st.lists(st.tuples(st.sampled_from(["put", "put", "fetch", "hold", "read", "release"]), st.integers(0, 30)))


@given(st.sampled_from(list(KINDS)), ACTIONS)
def test_any_history(kind: str, actions: list[tuple[str, int]]) -> None:
    """A copy that is being read does not move, and every copy keeps its values, whatever the order of calls."""
    copies = KINDS[kind]()
    live: list[tuple[StoredCopy, Tensor]] = []
    held: dict[StoredCopy, Tensor] = {}
    for action, which in actions:
        if action == "put":
            if which % 7 == 0:
                copies.begin_pass()
            tensor = source(which + 1)
            live.append((copies.store(tensor), tensor.clone()))
            live[-1][0].release_source()
            tensor.zero_()
        elif live:
            place, values = live[which % len(live)]
            if action == "fetch":
                place.prefetch()
            elif action == "hold":
                held[place] = place.tensor().view(-1)
            elif action == "read":
                held.pop(place, None)
                place.unpin()
            else:
                held.pop(place, None)
                place.release()
                live.pop(which % len(live))
        for place, values in live:
            assert place not in held or torch.equal(held[place], values)
    for place, values in live:
        assert torch.equal(place.tensor(), values)
        place.release()
    assert live_bytes(copies) == 0


def test_an_arena_has_room_for_so_many_of_the_first_one() -> None:
    copies = ArenaStore(3, CPU, ledger=NullLedger())
    assert copies.arena is None and copies.describe() == ()
    kept = [copies.store(source(5)) for _ in range(3)]  # 20 bytes each, in units of 64
    assert copies.arena is not None and copies.arena.statistics.capacity_bytes == 3 * 64
    assert all(copies.arena.contains(place.tensor()) for place in kept) and copies.num_outside == 0
    more = copies.store(source(5))
    assert not copies.arena.contains(more.tensor()) and copies.num_outside == 1
    assert "1 activation checkpoints outside" in copies.describe()[0]
    kept[1].release()
    assert copies.arena.contains(copies.store(source(16)).tensor()) and copies.num_outside == 1
    assert not copies.arena.contains(copies.store(source(17)).tensor()) and copies.num_outside == 2


def test_an_arena_of_an_unknown_number_is_as_large_as_the_first_pass() -> None:
    copies = ArenaStore(None, CPU, ledger=NullLedger())
    copies.begin_pass()
    first = [copies.store(source(numel)) for numel in (5, 40)]  # 64 and 192 bytes
    assert copies.arena is None and copies.num_outside == 0
    copies.begin_pass()
    assert copies.arena is not None and copies.arena.statistics.capacity_bytes == 256
    made = copies.arena
    second = [copies.store(source(numel)) for numel in (5, 40, 1)]
    assert [made.contains(place.tensor()) for place in second] == [True, True, False] and copies.num_outside == 1
    copies.begin_pass()
    assert copies.arena is made
    for place in (*first, *second):
        place.release()
    assert made.statistics.live_bytes == 0


def test_a_gap_is_closed_around_what_is_not_being_read() -> None:
    copies = ArenaStore(4, CPU, ledger=NullLedger())
    values = [source(16) for _ in range(4)]
    kept = [copies.store(tensor) for tensor in values]
    kept[0].release()
    kept[2].release()
    held = kept[3].tensor()
    large = copies.store(source(32))  # the second copy moves down; the fourth is being read and must not move
    assert copies.arena is not None and copies.arena.statistics.num_compactions == 1 and copies.num_outside == 0
    assert torch.equal(kept[1].tensor(), values[1]) and torch.equal(held, values[3])
    large.release()
    kept[1].unpin()
    kept[3].unpin()
    kept[1].release()
    copies.store(source(16))
    copies.store(source(16))
    assert torch.equal(kept[3].tensor(), values[3])


def test_what_is_being_read_does_not_move() -> None:
    """A new copy goes outside the arena when it would only fit if a copy that is being read moved."""
    copies = ArenaStore(3, CPU, ledger=NullLedger())
    kept = [copies.store(source(16)) for _ in range(3)]
    held = kept[1].tensor()
    address, values = held.data_ptr(), held.clone()
    kept[0].release()
    kept[2].release()
    large = copies.store(source(32))
    assert copies.num_outside == 1 and held.data_ptr() == address and torch.equal(held, values)
    large.release()
    kept[1].unpin()
    copies.store(source(32))
    assert copies.num_outside == 1


def test_on_the_host_rooms_are_there_from_fetch_to_read() -> None:
    device_store = ArenaStore(2, CPU, ledger=NullLedger())
    copies = HostStore(HostMemory(CPU), device_store)
    kept = [copies.store(source(16)) for _ in range(5)]
    assert copies.host.live_bytes == 5 * 64 and device_store.arena is None
    for place in reversed(kept):
        place.prefetch()
        place.prefetch()
        assert device_store.arena is not None and device_store.arena.statistics.live_bytes == 64
        assert device_store.arena.contains(place.tensor())
        place.unpin()
        assert device_store.arena.statistics.live_bytes == 0
    kept[0].prefetch()
    for place in kept:
        place.release()
    assert live_bytes(copies) == 0 and device_store.num_outside == 0
    assert copies.host.sent_bytes == 5 * 64 and copies.host.fetched_bytes == 6 * 64
    assert copies.describe()[0].startswith("activation checkpoints in host memory: at most 320")


@each(
    ("kind", "kept", "fetched"),
    [("on the device", 3 * 28, 3 * 28), ("arena", 8 * 64, 8 * 64), ("host", 0, 28), ("host and arena", 0, 3 * 64)],
)
def test_a_ledger_counts_what_is_on_the_device(kind: str, kept: int, fetched: int) -> None:
    """The ledger counts copies of 28 bytes on the device, or the whole arena."""
    with Ledger(CPU) as ledger:
        copies = DeviceStore(CPU, ledger=ledger) if kind == "on the device" else places_of(kind, ledger)
        assert copies is not None
        all_places = [copies.store(source(7)) for _ in range(3)]
        for place in all_places:
            place.release_source()
        assert ledger.live_bytes()["activation_checkpoints"] == kept
        all_places[2].prefetch()
        assert ledger.live_bytes()["activation_checkpoints"] == fetched
        for place in all_places:
            place.release()
        expected = {"arena": 8 * 64, "host and arena": 3 * 64}.get(kind, 0)
        assert ledger.live_bytes()["activation_checkpoints"] == expected


class Noting:
    """A stored copy that records the beginning and end of its release."""

    def __init__(self, seen: list[str], name: str, then: Callable[[], None] = lambda: None) -> None:
        self._seen, self._name, self._then = seen, name, then

    def release(self) -> None:
        self._seen.append(f"{self._name} begins")
        self._then()
        self._seen.append(f"{self._name} ends")


def test_nothing_is_released_while_places_are_in_use() -> None:
    seen: list[str] = []
    releases = ReleaseQueue()
    with releases.deferred():
        releases.add(Noting(seen, "a"))
        with releases.deferred():
            releases.add(Noting(seen, "b"))
        thread = Thread(target=releases.add, args=(Noting(seen, "c"),))
        thread.start()
        thread.join()
        assert seen == []
    assert seen == [f"{name} {end}" for name in "abc" for end in ("begins", "ends")]
    releases.add(Noting(seen, "d"))
    assert seen[-2:] == ["d begins", "d ends"]


def test_one_is_released_after_the_other() -> None:
    """A release that begins inside another one, because that frees another graph, runs after it."""
    seen: list[str] = []
    releases = ReleaseQueue()
    releases.add(Noting(seen, "a", lambda: releases.add(Noting(seen, "b"))))
    assert seen == ["a begins", "a ends", "b begins", "b ends"]


def test_an_arena_of_unknown_size_grows_with_its_passes() -> None:
    copies = ArenaStore(None, CPU, ledger=NullLedger())
    for numel, capacity in ((10, None), (100, 64), (10, 448), (10, 448)):
        copies.begin_pass()
        found = None if copies.arena is None else copies.arena.statistics.capacity_bytes
        assert found == capacity
        kept = copies.store(torch.ones(numel))
        kept.release()
    kept = copies.store(torch.ones(1000))  # in the same pass as the 10 elements above
    copies.begin_pass()
    assert copies.arena is not None and copies.arena.statistics.capacity_bytes == 4032 + 64
    kept.release()
