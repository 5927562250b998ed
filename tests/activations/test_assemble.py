"""Tests of assembling recomputation from the configuration: every setting reaches the object that implements it."""

import pytest
import torch
from support.each import each
from support.late_communicator import LateCommunicator
from support.recomputed_programs import CPU
from support.thread_world import run_threads

from megazero.activations.assemble import RankParts, activation_plan, configured_plan, describe, recomputation
from megazero.activations.copy_stores import ArenaStore, DeviceStore, HostStore
from megazero.activations.recompute import Recomputation
from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.config.engine_sections import ActivationConfig
from megazero.generators import DefaultGenerators
from megazero.memory.ledger_interface import NullLedger
from megazero.timers import Timers


def rank_parts(axis: Communicator | None = None, device: torch.device = CPU) -> RankParts:
    return RankParts(axis or LocalCommunicator(), device, DefaultGenerators(CPU), NullLedger(), Timers(CPU))


def full(**changes: object) -> ActivationConfig:
    return ActivationConfig(recompute_granularity="full", **changes)


def runs_of(config: ActivationConfig, num_layers: int = 6) -> Recomputation:
    number = configured_plan(config).num_checkpoints(num_layers)
    found = activation_plan(config, number, rank_parts()).recomputation
    assert found is not None
    return found


def test_without_recomputation_nobody_carries_it_out() -> None:
    plan = activation_plan(ActivationConfig(logits_chunk_bytes=77), 4, rank_parts())
    assert plan.granularity == "none" and plan.recomputation is None and plan.logits_chunk_bytes == 77
    assert [tuple(segment) for segment in plan.segments(4)] == [(0, 4, False)]


def test_selective_recomputes_the_core_and_keeps_its_inputs_themselves() -> None:
    plan = activation_plan(ActivationConfig(recompute_granularity="selective"), 4, rank_parts())
    assert plan.core_recomputation is plan.recomputation is not None
    assert plan.recomputation.checkpoints.copies is None


@each(
    ("changes", "segments"),
    [
        ({}, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        ({"recompute_num_layers": 2}, [(0, 2), (2, 4), (4, 5)]),
        ({"recompute_method": "uniform", "recompute_num_layers": 3}, [(0, 3), (3, 5)]),
        ({"recompute_method": "block", "recompute_num_layers": 2}, [(0, 1), (1, 2)]),
        ({"recompute_method": "block"}, [(0, 1)]),
    ],
)
def test_recomputed_segments(changes: dict[str, object], segments: list[tuple[int, int]]) -> None:
    plan = activation_plan(full(**changes), 5, rank_parts())
    assert [segment[:2] for segment in plan.segments(5) if segment.is_recomputed] == segments
    assert plan.core_recomputation is None and plan == configured_plan(full(**changes)).with_recomputation(
        plan.recomputation
    )


def test_places() -> None:
    assert runs_of(full()).checkpoints.copies is None
    assert isinstance(runs_of(full(contiguous_checkpointing=True)).checkpoints.copies, ArenaStore)
    on_host = runs_of(full(checkpoint_in_cpu=True)).checkpoints.copies
    assert isinstance(on_host, HostStore) and isinstance(on_host.device_store, DeviceStore)
    both = runs_of(full(checkpoint_in_cpu=True, contiguous_checkpointing=True)).checkpoints.copies
    assert isinstance(both, HostStore) and isinstance(both.device_store, ArenaStore)


def arena_bytes(runs: Recomputation, passes: int = 1) -> int:
    """Return the bytes of the arena after `passes` forwards of three calls on 64 bytes each, and their backwards."""
    copies = runs.checkpoints.copies
    arena = copies.device_store if isinstance(copies, HostStore) else copies
    assert isinstance(arena, ArenaStore)
    for _ in range(passes):
        runs.checkpoints.begin_pass()
        x = torch.ones(16, requires_grad=True) * 1
        for _ in range(3):
            x = runs.run(torch.exp, x)
        x.sum().backward()
    return 0 if arena.arena is None else arena.arena.statistics.capacity_bytes


@each(
    ("changes", "number"),
    [
        ({}, 6),
        ({"recompute_num_layers": 4}, 2),
        ({"recompute_method": "block", "recompute_num_layers": 5}, 5),
        ({"number_checkpoints": 9}, 9),
        ({"checkpoint_in_cpu": True}, 3),
        ({"checkpoint_in_cpu": True, "number_checkpoints": 9}, 3),
    ],
)
def test_the_arena_has_room_for_the_checkpoints_of_a_forward(changes: dict[str, object], number: int) -> None:
    assert arena_bytes(runs_of(full(contiguous_checkpointing=True, **changes))) == number * 64


def test_an_arena_where_nobody_knows_the_number() -> None:
    config = full(contiguous_checkpointing=True)
    assert [arena_bytes(recomputation(config, rank_parts(), number=None), passes) for passes in (1, 2)] == [0, 3 * 64]


@pytest.mark.parametrize("partition", [True, False])
def test_slices_only_where_asked_for(partition: bool) -> None:
    def gathers(world: LateCommunicator) -> int:
        calls: list[int] = []
        gather = world.all_gather_into
        world.all_gather_into = lambda output, input: (calls.append(input.numel()), gather(output, input))[1]
        config = full(partition_activations=partition)
        runs = activation_plan(config, 1, rank_parts(world)).recomputation
        assert runs is not None
        x = torch.ones(7, requires_grad=True)
        runs.run(torch.exp, x * 1).sum().backward()
        assert torch.equal(x.grad, torch.ones(7).exp())
        return sum(calls)

    assert run_threads(2, gathers) == ([4, 4] if partition else [0, 0])


def test_times_and_waits() -> None:
    rank = rank_parts()
    off = activation_plan(full(), 2, rank).recomputation
    on = activation_plan(full(profile_backward=True, synchronize_each_layer=True), 2, rank).recomputation
    assert off is not None and on is not None
    assert off.stopwatch is None and on.stopwatch is rank.stopwatch
    assert on.synchronizes is None, "a CPU has no queue"
    gpu = torch.device("cuda", 0)
    waits = [
        recomputation(full(synchronize_each_layer=wait), rank_parts(device=gpu), number=1).synchronizes
        for wait in (True, False)
    ]
    assert waits == [gpu, None]
    assert on.random is rank.random and on.ledger is rank.ledger


@each(
    ("config", "phrase"),
    [
        (ActivationConfig(), "activations: retained until backward"),
        (
            ActivationConfig(recompute_granularity="selective"),
            "activations: retained until backward, the attention core's recomputed",
        ),
        (full(), "activations: recomputed from 6 activation checkpoints, each stored on the device"),
        (
            full(partition_activations=True, checkpoint_in_cpu=True, contiguous_checkpointing=True),
            "activations: recomputed from 6 activation checkpoints, 1/4 of each stored in host memory, in one arena",
        ),
    ],
)
def test_described_in_a_phrase(config: ActivationConfig, phrase: str) -> None:
    assert describe(config, 6, 4) == phrase
