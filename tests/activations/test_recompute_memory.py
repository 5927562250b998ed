"""Tests of the memory of recomputation: saved tensors are freed, inputs are kept in their store, and backward holds one
segment at a time.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from support.recomputed_programs import CPU, KEEPINGS, PROGRAMS, WIDTH, Parts, layer, outcome, plain, recomputation
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megazero.activations.copy_stores import ArenaStore, HostStore
from megazero.activations.recompute import Recomputation
from megazero.comm.interface import Communicator
from megazero.comm.startup import make_mesh
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.parallel.topology import Topology
from megazero.planner.dry.hollow import Hollow


class Alive:
    """Records by name, through weak references, which storages are alive."""

    def __init__(self) -> None:
        self._seen: dict[str, list[weakref.ref[torch.UntypedStorage]]] = {}

    def watch(self, name: str, tensor: Tensor) -> Tensor:
        self._seen.setdefault(name, []).append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def of(self, name: str) -> list[bool]:
        return [ref() is not None for ref in self._seen.get(name, [])]


def test_weak_references_to_storages_die_with_their_memory() -> None:
    """The other tests rely on this."""
    alive, tensor = Alive(), torch.ones(3)
    view = alive.watch("one", tensor)[1:]
    del tensor
    assert alive.of("one") == [True] and view.shape == (2,)
    del view
    assert alive.of("one") == [False]


def test_what_is_computed_again_does_not_wait_for_the_collection_of_garbage() -> None:
    """The exception that ends the second run has its frames, which from Python 3.12 on refer to the exception."""
    alive = Alive()

    def part(x: Tensor) -> Tensor:
        y = alive.watch("saved", x.exp())
        return alive.watch("saved", y.sin()).cos() * 1

    x = torch.ones(3, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        recomputation(KEEPINGS[0]).run(part, x).sum().backward()
        assert alive.of("saved") == [False] * 4
    finally:
        gc.enable()


@each("keeping", KEEPINGS)
def test_what_autograd_saves_is_gone_after_forward(keeping: str) -> None:
    alive = Alive()

    def part(x: Tensor) -> Tensor:
        y = alive.watch("saved", x.exp())
        z = alive.watch("saved", y.sin())
        return z.cos() * 1

    y = recomputation(keeping).run(part, torch.ones(5, requires_grad=True) * 1)
    assert alive.of("saved") == [False, False]
    kept = plain(part, torch.ones(5, requires_grad=True) * 1)
    assert alive.of("saved") == [False, False, True, True], "plain autograd keeps them"
    y.sum().backward()
    kept.sum().backward()


def alive_in_the_next_layer(rank: int, size: int, keeping: str) -> list[tuple[bool, ...]]:
    """Return, for every layer of a forward, which layers' inputs still have their own memory while it runs."""
    axis: Communicator | None = mesh_in_worker(rank, tp=size, is_late=False).axis("tp") if size > 1 else None
    runs, alive = recomputation(keeping, partition_over=axis), Alive()
    found: list[tuple[bool, ...]] = []

    def part(x: Tensor) -> Tensor:
        found.append(tuple(alive.of("input")))
        return x.exp().sin() * 1

    x = alive.watch("input", torch.ones(5, 7, requires_grad=True) * 1)
    for _ in range(4):
        x = alive.watch("input", runs.run(part, x))
    x.sum().backward()
    return found[:4]


KEPT = [(True,) * number for number in range(1, 5)]
FREED = [(False,) * number + (True,) for number in range(4)]


@each("keeping", KEEPINGS)
def test_a_copied_input_is_freed_before_the_next_layer(keeping: str) -> None:
    assert alive_in_the_next_layer(0, 1, keeping) == (KEPT if keeping == "itself" else FREED)


@pytest.mark.gloo
def test_a_sliced_input_is_freed_before_the_next_layer() -> None:
    for keeping in KEEPINGS:
        assert run_ranks(2, alive_in_the_next_layer, 2, keeping) == [FREED] * 2


@each("keeping", KEEPINGS)
def test_one_segment_at_a_time_is_there_in_backward(keeping: str) -> None:
    """Backward holds saved tensors of one layer at a time, counted at each layer's second run and first gradient."""
    runs, alive = recomputation(keeping), Alive()
    again, arriving = [], []

    def part(number: int, x: Tensor) -> Tensor:
        again.append(sum(alive.of("made")))
        y = alive.watch("made", x.exp())
        y.register_hook(lambda _: arriving.append(sum(alive.of("made"))))
        z = alive.watch("made", y.sin())
        return alive.watch("made", z.cos()).tanh()

    x = torch.ones(5, requires_grad=True) * 1
    for number in range(4):
        x = runs.run(part, number, x)
    assert sum(alive.of("made")) == 0
    del again[:]
    x.sum().backward()
    assert again == [0] * 4, "the layer after has left nothing"
    assert len(arriving) == 4 and max(arriving) <= 2, "what backward has gone through is gone"
    assert sum(alive.of("made")) == 0


def peak_of_layers(runs: Any, count: int) -> int:
    """Return the peak bytes of `count` layers, without their inputs [64, 6]."""
    torch.manual_seed(1)
    m = Parts()
    with Ledger(CPU) as ledger:
        leaf = torch.ones(64, WIDTH, requires_grad=True)
        ledger.reset()
        x: Tensor = leaf * 1
        for _ in range(count):
            x = runs(layer, m, x)
        del leaf
        x.sum().backward()
        del x
        return ledger.take().peak_bytes - count * 64 * WIDTH * 4


def test_the_peak_grows_by_an_input_a_layer() -> None:
    """The peak of plain autograd grows by everything that a layer saves."""
    two, eight = (peak_of_layers(recomputation().run, count) for count in (2, 8))
    assert abs(eight - two) <= 64 * WIDTH * 4
    plain_two, plain_eight = (peak_of_layers(plain, count) for count in (2, 8))
    assert plain_eight - plain_two > 6 * 3 * 64 * WIDTH * 4
    assert eight < plain_eight / 2


def test_nested_calls_keep_nothing_of_their_own_after_forward() -> None:
    """The input of an inner call is recomputed with the rest of the outer call."""
    runs, alive = recomputation(), Alive()

    def outer(x: Tensor) -> Tensor:
        y = alive.watch("inner input", x.exp())
        return runs.run(lambda y: y.sin().cos(), y)

    y = runs.run(outer, torch.ones(5, requires_grad=True) * 1)
    assert alive.of("inner input") == [False]
    y.sum().backward()
    assert not any(alive.of("inner input"))


def held(runs: Recomputation) -> list[int]:
    """Return the bytes in use in the arena and on the host."""
    copies = runs.checkpoints.copies
    arena = copies.device_store if isinstance(copies, HostStore) else copies
    in_arena = arena.arena.statistics.live_bytes if isinstance(arena, ArenaStore) and arena.arena is not None else 0
    return [in_arena, copies.host.live_bytes if isinstance(copies, HostStore) else 0]


@each("keeping", KEEPINGS)
@each("name", PROGRAMS)
def test_every_program_gives_all_places_back(name: str, keeping: str) -> None:
    runs = recomputation(keeping)
    outcome(PROGRAMS[name], runs.run, torch.float32)
    assert held(runs) == [0, 0]


@each("keeping", KEEPINGS)
def test_a_graph_that_is_dropped_gives_everything_back(keeping: str) -> None:
    runs, alive = recomputation(keeping), Alive()
    x = runs.run(torch.exp, alive.watch("input", torch.ones(40, requires_grad=True) * 1))
    y = runs.run(torch.sin, alive.watch("input", x * 1))
    assert keeping == "itself" or sum(held(runs)) > 0
    del x, y
    assert held(runs) == [0, 0] and alive.of("input") == [False, False]


@each("keeping", KEEPINGS)
def test_an_error_in_the_function_leaves_nothing(keeping: str) -> None:
    runs = recomputation(keeping)

    def fails(x: Tensor) -> Tensor:
        x.exp()
        raise KeyError

    with pytest.raises(KeyError):
        runs.run(fails, torch.ones(40, requires_grad=True) * 1)
    assert held(runs) == [0, 0]
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("keeping", KEEPINGS)
def test_a_rank_of_many_with_hollow_tensors(keeping: str) -> None:
    """Shapes, bytes sent and bytes kept with hollow tensors are those of real tensors."""
    rows, size = 1000, 8
    with fake_ranks(size), Hollow(), Ledger(CPU) as ledger:
        mesh = make_mesh(Topology(tp=size), 1, CPU, FusedBuffers(0, CPU))
        runs = recomputation(keeping, partition_over=mesh.axis("tp"), ledger=ledger)
        m = Parts()
        x = torch.ones(rows, WIDTH, requires_grad=True) * 1
        for _ in range(4):
            x = runs.run(layer, m, torch.nn.functional.dropout(x))
        kept = ledger.live_bytes()["activation_checkpoints"]
        x.sum().backward()
        assert m.a.weight.grad is not None and m.a.weight.grad.shape == (WIDTH, WIDTH)
    one = rows * WIDTH * 4 // size  # 3,000 bytes; the arena counts in units of 64
    in_arenas = {"arena": 8 * 3008, "small arena": 3008 + 3 * one}
    assert kept == in_arenas.get(keeping, 0 if keeping.startswith("host") else 4 * one)
    assert mesh.meter.bytes_by_axis() == {"tp": {"all_gather": 4 * one * (size - 1)}}
    assert held(runs) == [0, 0]
