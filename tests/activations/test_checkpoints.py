"""Tests of activation checkpoints, whole, in slices, in an arena or on the host: their values, order and memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.each import each
from support.late_communicator import LateCommunicator, forget_unfinished
from support.processes import mesh_in_worker, run_ranks
from support.recomputed_programs import (
    CPU,
    KEEPINGS,
    PROGRAMS,
    outcome,
    places_of,
    plain,
    recomputation,
    same,
)
from support.thread_world import run_threads
from torch import Tensor, nn

from megazero.activations.checkpoints import ActivationCheckpoints
from megazero.activations.copy_stores import ArenaStore, HostStore
from megazero.activations.recompute import Recomputation
from megazero.comm.interface import Communicator, ReduceKind, Work
from megazero.errors import UsageError
from megazero.generators import DefaultGenerators
from megazero.memory.ledger import Ledger

SIZES = [2, 3, 4]


def checkpoints(
    keeping: str = "itself", partition_over: Communicator | None = None, **more: Any
) -> ActivationCheckpoints:
    return ActivationCheckpoints(partition_over=partition_over, copies=places_of(keeping, more.get("ledger")), **more)


def various() -> list[Tensor]:
    """Return activations of many shapes and strides; few have a number of elements that the number of ranks divides."""
    grid = torch.arange(35.0).view(5, 7)
    found = [torch.tensor([1.5]), torch.arange(2.0), torch.arange(5.0), grid, grid.t(), grid[:, 1:4], grid[::2]]
    found += [grid[:1].expand(3, 7), grid.view(5, 1, 7).transpose(0, 2), grid[2, 3:4], torch.arange(13.0).bfloat16()]
    return [*found, torch.arange(24.0, dtype=torch.float64).view(2, 3, 4).permute(2, 0, 1)]


def is_dense(tensor: Tensor) -> bool:
    return torch.empty_like(tensor).stride() == tensor.stride() and tensor.untyped_storage().nbytes() <= (
        tensor.nbytes + tensor.storage_offset() * tensor.itemsize
    )


def check_return(keeping: str, partition_over: Communicator | None) -> None:
    keeps = checkpoints(keeping, partition_over)
    keeps.begin_pass()
    given = various()
    expected = [tensor.clone() for tensor in given]
    kept = keeps.save(given)
    kept.release_source()
    if keeping != "itself" or (partition_over is not None and partition_over.size > 1):
        for tensor in given:
            tensor.untyped_storage().fill_(7)
    for _ in range(2):
        for tensor, before, values in zip(kept.restore(), given, expected, strict=True):
            assert tensor.dtype == values.dtype and torch.equal(tensor, values)
            assert not tensor.requires_grad
            assert not is_dense(before) or tensor.stride() == before.stride()


@each("keeping", KEEPINGS)
def test_what_comes_back_is_what_was_given(keeping: str) -> None:
    check_return(keeping, None)


@pytest.mark.parametrize("size", [1, *SIZES])
def test_slices_come_back_whole(size: int) -> None:
    def every_keeping(world: LateCommunicator) -> None:
        for keeping in KEEPINGS:
            check_return(keeping, world)

    assert run_threads(size, every_keeping) == [None] * size


def different_bits(rank: int, size: int) -> list[tuple[str, str]]:
    """Run every program: on two ranks with checkpoints kept in every way, on more ranks in one way each."""
    mesh = mesh_in_worker(rank, tp=size)
    axis = mesh.axis("tp")
    dtypes = {"autocast": torch.float32}
    found = []
    for index, (name, body) in enumerate(PROGRAMS.items()):
        expected = outcome(body, plain, dtypes.get(name, torch.float64))
        for keeping in KEEPINGS if size == 2 else [list(KEEPINGS)[(index + size) % len(KEEPINGS)]]:
            runs = recomputation(keeping, partition_over=axis)
            if not same(outcome(body, runs.run, dtypes.get(name, torch.float64)), expected):
                found.append((name, keeping))
    forget_unfinished(mesh)  # gathers of checkpoints that no backward has used
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("size", SIZES)
def test_every_program_in_slices_has_the_same_bits(size: int) -> None:
    assert run_ranks(size, different_bits, size) == [[]] * size


class Recording:
    """A communicator that records the beginnings of gathers and their waits, in order."""

    def __init__(self, inner: Communicator, events: list[str]) -> None:
        self._inner, self._events, self._number = inner, events, 0
        self.size, self.rank = inner.size, inner.rank

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return self._inner.all_reduce_scalars(tensor, kind)

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        self._number += 1
        work, number, events = self._inner.all_gather_into(output, input), self._number, self._events
        events.append(f"gather {number}: {output.numel()}")

        class Noted:
            def wait(self) -> None:
                events.append(f"wait {number}")
                work.wait()

        return Noted()


def gathers_of_four_layers(rank: int, size: int) -> tuple[list[str], dict[str, dict[str, int]]]:
    """Run four layers, of which layer n works on [n + 4, 5] float32 elements; return their events and the traffic."""
    mesh, events = mesh_in_worker(rank, tp=size), []
    runs = recomputation(partition_over=Recording(mesh.axis("tp"), events))
    weight = nn.Parameter(torch.rand(5))

    def part(number: int, x: Tensor) -> Tensor:
        events.append(f"layer {number}")
        return torch.cat([x, (x[:1] * weight).exp()])

    runs.checkpoints.begin_pass()
    x = torch.ones(4, 5) * 0.1
    for number in range(4):
        x = runs.run(part, number, x)
    x.sum().backward()
    return events, mesh.meter.bytes_by_axis()


@pytest.mark.gloo
@pytest.mark.parametrize("size", SIZES)
def test_slices_are_gathered_one_checkpoint_ahead(size: int) -> None:
    gathered = [-(-5 * rows // size) * size for rows in (7, 6, 5, 4)]
    expected = [f"layer {number}" for number in range(4)]
    expected += [f"gather 1: {gathered[0]}", f"gather 2: {gathered[1]}", "wait 1", "layer 3"]
    expected += [f"gather 3: {gathered[2]}", "wait 2", "layer 2"]
    expected += [f"gather 4: {gathered[3]}", "wait 3", "layer 1", "wait 4", "layer 0"]
    for events, sent in run_ranks(size, gathers_of_four_layers, size):
        assert events == expected
        assert sent == {"tp": {"all_gather": sum(4 * numel * (size - 1) // size for numel in gathered)}}


class Refusing:
    """An axis of two ranks on which a gather fails."""

    size, rank = 2, 0

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        raise AssertionError("gathered")


@each("keeping", KEEPINGS)
def test_what_is_no_activation_is_kept_as_it_is(keeping: str) -> None:
    """Parameters, leaves that need gradients, ids, masks, scalars and empty tensors are neither copied nor sliced."""
    leaf = torch.ones(4, requires_grad=True)
    given = [nn.Parameter(torch.ones(4)), leaf, torch.arange(6), torch.ones(5) > 0, torch.tensor(2.5), torch.ones(0, 3)]
    kept = checkpoints(keeping, Refusing()).save(given)
    kept.release_source()
    kept.gather()
    brought = kept.restore()
    assert brought[0] is given[0] and brought[1] is leaf
    assert all(a.data_ptr() == b.data_ptr() and torch.equal(a, b) for a, b in zip(brought, given, strict=True))


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.arange(3), torch.ones(3) > 0], ids=["floats", "ids", "mask"])
def test_an_input_kept_by_reference_may_not_be_written_to(tensor: Tensor) -> None:
    tensor = tensor.clone()
    weight = torch.ones(3, requires_grad=True)
    y = recomputation().run(lambda x: (x * weight).exp(), tensor)
    tensor[1] = 0
    with pytest.raises(UsageError, match=r"an input of \[3\] has been written to since it was read"):
        y.sum().backward()


def test_the_functions_own_writing_is_seen_too() -> None:
    weight = torch.ones(3, requires_grad=True)
    y = recomputation().run(lambda x: (x.add_(1) * weight).exp(), torch.ones(3))
    with pytest.raises(UsageError, match="has been written to since it was read"):
        y.sum().backward()


@each("keeping", KEEPINGS[1:])
def test_an_input_that_a_copy_is_kept_of_may_be_written_to(keeping: str) -> None:
    x, weight = torch.full((3,), 2.0), torch.ones(3, requires_grad=True)
    y = recomputation(keeping).run(lambda x: (x * weight).exp(), x)
    x.zero_()
    y.sum().backward()
    assert torch.allclose(weight.grad, torch.full((3,), 2 * torch.e**2))


def test_hooks_on_saved_tensors_have_the_inputs_too() -> None:
    """The hooks see the inputs, as in plain PyTorch, where the first layer saves its input; they see no parameters."""
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor + 1

    x, weight = torch.zeros(3), nn.Parameter(torch.ones(3))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor - 1):
        y = recomputation().run(lambda x, weight: (x * weight).exp(), x, weight)
    assert packed == [(3,)]
    x.fill_(5)
    y.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(3))


def on_the_way_back(runs: Recomputation, look: Callable[[], int], count: int = 6) -> list[int]:
    """Return look() of every layer's second run, beginning with the last layer; inputs are [4, 6] of float32."""
    seen: list[int] = []

    def part(x: Tensor) -> Tensor:
        seen.append(look())
        return (x * x).tanh() * x

    runs.checkpoints.begin_pass()
    leaf = torch.ones(4, 6, requires_grad=True)
    x = leaf * 0.5
    for _ in range(count):
        x = runs.run(part, x)
    del seen[:]
    x.sum().backward()
    return seen


def rooms_in_use(world: LateCommunicator) -> tuple[list[int], int, int, int]:
    runs = recomputation("host and arena", partition_over=world)
    copies = runs.checkpoints.copies
    assert isinstance(copies, HostStore) and isinstance(copies.device_store, ArenaStore)
    store, unit = copies.device_store, {1: 128, 2: 64, 3: 64}[world.size]  # for checkpoints of 96, 48 and 32 bytes
    seen = on_the_way_back(runs, lambda: 0 if store.arena is None else store.arena.statistics.live_bytes // unit)
    assert store.arena is not None and store.arena.statistics.capacity_bytes == 3 * unit
    return seen, store.arena.statistics.live_bytes, store.num_outside, copies.host.live_bytes


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [3, 3, 3, 3, 2, 1]), (2, [2, 2, 2, 2, 1, 0]), (3, [2, 2, 2, 2, 1, 0])]
)
def test_from_the_host_three_are_on_their_way_at_most(size: int, expected: list[int]) -> None:
    """One checkpoint is in use, which leaves the arena once gathered, one is being gathered and one being fetched."""
    assert run_threads(size, rooms_in_use) == [(expected, 0, 0, 0)] * size


def test_from_the_host_two_are_fetched_ahead() -> None:
    runs = recomputation("host")
    host = runs.checkpoints.copies.host
    assert on_the_way_back(runs, lambda: host.fetched_bytes // 96) == [3, 4, 5, 6, 6, 6]
    assert (host.sent_bytes, host.fetched_bytes, host.live_bytes) == (6 * 96, 6 * 96, 0)


def looks_of_an_unknown_model(world: LateCommunicator) -> tuple[list[int], list[str]]:
    events: list[str] = []
    partition_over = Recording(world, events)
    kept = ActivationCheckpoints(partition_over=partition_over, is_replicated=False, copies=places_of("host", None))
    host = kept.copies.host
    runs = Recomputation(DefaultGenerators(CPU), kept)
    return on_the_way_back(runs, lambda: host.fetched_bytes // 48), [event.split(":")[0] for event in events]


def test_of_an_unknown_model_slices_are_fetched_ahead_and_gathered_when_needed() -> None:
    """A gather that only some ranks begin would never end, whereas a copy from the host involves only one rank."""
    for fetched, events in run_threads(2, looks_of_an_unknown_model):
        assert fetched == [3, 4, 5, 6, 6, 6]
        assert events == [f"{event} {number}" for number in range(1, 7) for event in ("gather", "wait")]


def test_a_pass_begins_with_nothing_before_it() -> None:
    """The first checkpoint of a pass does not prefetch the last one of a pass whose backward is still to come."""
    runs = recomputation("host")
    host = runs.checkpoints.copies.host
    x = torch.ones(24, requires_grad=True)
    first = runs.run(torch.exp, x * 1)
    runs.checkpoints.begin_pass()
    runs.run(torch.exp, x * 2).sum().backward()
    assert host.fetched_bytes == 96
    first.sum().backward()
    assert host.fetched_bytes == 2 * 96


def test_a_checkpoint_that_is_gone_is_not_brought_back() -> None:
    runs = recomputation("host")
    host = runs.checkpoints.copies.host
    x = torch.ones(24, requires_grad=True)
    kept = [runs.run(torch.exp, x * factor) for factor in range(3)]
    del kept[1]
    kept[1].sum().backward()
    assert host.fetched_bytes == 96 and host.live_bytes == 96


def checkpoint_bytes(world: Communicator | None, keeping: str) -> int:
    with Ledger(CPU) as ledger:
        runs = recomputation(keeping, partition_over=world, ledger=ledger)
        x = torch.ones(5, 7, requires_grad=True) * 1
        for _ in range(4):
            x = runs.run(lambda x: x.exp().sin(), x)
        return ledger.live_bytes()["activation_checkpoints"]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("size", "keeping", "nbytes"),
    [
        (1, "itself", 4 * 35 * 4),
        (2, "itself", 4 * 18 * 4),
        (4, "itself", 4 * 9 * 4),
        (1, "arena", 8 * 192),  # 140 bytes
        (2, "arena", 8 * 128),  # 72 bytes
        (4, "arena", 8 * 64),  # 36 bytes
        (1, "small arena", 192 + 3 * 140),
        (2, "host", 0),
    ],
)
def test_the_ledger_counts_checkpoints_to_the_byte(size: int, keeping: str, nbytes: int) -> None:
    found = run_ranks(size, bytes_on_a_rank, size, keeping) if size > 1 else [bytes_on_a_rank(0, 1, keeping)]
    assert found == [nbytes] * size


def bytes_on_a_rank(rank: int, size: int, keeping: str) -> int:
    return checkpoint_bytes(mesh_in_worker(rank, tp=size).axis("tp") if size > 1 else None, keeping)


def test_views_of_parameters_are_no_checkpoints_to_the_ledger() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    with Ledger(CPU) as ledger:
        ledger.tag(weight, "parameters")
        y = recomputation(ledger=ledger).run(lambda w: w.exp(), weight.t())
        assert ledger.live_bytes()["activation_checkpoints"] == 0 and ledger.live_bytes()["parameters"] == 36
        y.sum().backward()


def test_an_end_without_backward_gives_everything_back() -> None:
    for keeping in KEEPINGS[1:]:
        runs = recomputation(keeping)
        x = runs.run(torch.exp, runs.run(torch.exp, torch.ones(9, requires_grad=True) * 1))
        copies = runs.checkpoints.copies
        arena = copies.device_store if isinstance(copies, HostStore) else copies
        del x
        if isinstance(arena, ArenaStore) and arena.arena is not None:
            assert arena.arena.statistics.live_bytes == 0
        assert not isinstance(copies, HostStore) or copies.host.live_bytes == 0
