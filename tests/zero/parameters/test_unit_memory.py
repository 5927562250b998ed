"""Tests of the memory of a unit in each of its states, which stays the same storage when it is resized."""

import pytest
import torch
from support.late_copies import late_copies
from support.processes import mesh_in_worker, run_ranks
from torch import nn

from megazero.comm.local import LocalCommunicator
from megazero.comm.metered import Meter
from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.errors import CollectiveError
from megazero.memory.homes import HostHome
from megazero.parallel.param_spec import Unit, spec_of
from megazero.zero.layout import LayoutRules, Slot, build_layout
from megazero.zero.parameters.guard import PartitionedParameter, attach_handle
from megazero.zero.parameters.unit_memory import (
    GatheredUnit,
    UnitBuckets,
    UnitMemory,
    UnitState,
    partitioned_units,
)
from megazero.zero.plan import resolve
from megazero.zero.shards import Shards

WIDTH = 5
NUMEL = 32  # 30 elements of a layer, padded to a multiple of 2 ranks x 16


class Nobody:
    def touched(self, name: str, call: str) -> None:
        raise AssertionError(f"{call} of {name}")


def make_memory(rank: int, *, autograd_retains_memory: bool = False) -> tuple[nn.Linear, UnitMemory, Shards]:
    layer, shards = make_shards(ZeroConfig(zero_stage=3), rank, 2)
    communicator = mesh_in_worker(rank, dp=2).gathering
    return layer, UnitMemory(shards, communicator, autograd_retains_memory=autograd_retains_memory), shards


def make_shards(
    zero: ZeroConfig, rank: int, partitions: int, host: HostHome | None = None, bucket: int = 1000
) -> tuple[nn.Linear, Shards]:
    torch.manual_seed(2)
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    for name, parameter in parameters.items():
        attach_handle(parameter, name, Nobody())
    plan = resolve(zero, PrecisionConfig(precision="fp64"))
    placed = [Slot(spec_of(name, p), p.dtype, True, 0) for name, p in parameters.items()]
    layout = build_layout([Unit("layer", tuple(parameters))], placed, LayoutRules(partitions, bucket))
    return layer, Shards(plan, layout, rank, parameters, host=host)


def states_on_rank(rank: int) -> None:
    torch.manual_seed(2)
    expected = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    layer, memory, shards = make_memory(rank)
    (unit,) = partitioned_units(shards, dict(layer.named_parameters()))
    memory.attach(unit)
    flat = shards.flat(unit.sections[0])
    assert (unit.name, unit.numel, unit.names, unit.releases_early) == ("layer", NUMEL, ["weight", "bias"], True)
    assert isinstance(layer.weight, PartitionedParameter)
    for turn in range(2):
        assert unit.state is UnitState.PARTITIONED and flat.untyped_storage().nbytes() == 0
        memory.allocate(unit)
        for bucket in (*unit.buckets, *unit.buckets):  # a second launch of a bucket does nothing
            memory.launch(UnitBuckets(unit, [bucket], bucket.numel))
        assert unit.state is UnitState.IN_FLIGHT and flat.untyped_storage().nbytes() == NUMEL * 8
        assert memory.live_numel == NUMEL
        memory.wait(unit, f"turn {turn}")
        assert unit.state is UnitState.WHOLE and not unit.works
        assert torch.equal(flat[:25].view(WIDTH, WIDTH), expected.weight)
        assert torch.equal(flat[25:30], expected.bias)
        assert memory.unit_of(flat[3:]) is unit and memory.unit_of(torch.ones(2)) is None
        memory.release(unit)
        assert (memory.live_numel, memory.peak_live_numel, memory.live) == (0, NUMEL, {})


@pytest.mark.gloo
def test_states_of_a_unit() -> None:
    run_ranks(2, states_on_rank)


@pytest.mark.parametrize("bucket", [1000, 16])
def test_one_rank_waits_for_what_comes_from_host_memory(bucket: int) -> None:
    """Its gather has nothing to do, and so its work ends before the copy has been made."""
    torch.manual_seed(2)
    expected = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with late_copies(waits_ahead=False):
        host = HostHome(torch.device("cpu"))
    zero = ZeroConfig(zero_stage=3, offload_optimizer="cpu", offload_param="cpu")
    layer, shards = make_shards(zero, 0, 1, host, bucket)
    memory = UnitMemory(shards, LocalCommunicator(), autograd_retains_memory=False)
    (unit,) = partitioned_units(shards, dict(layer.named_parameters()), 1000)
    memory.attach(unit)
    memory.allocate(unit)
    (group,) = unit.groups
    assert group.buckets == list(unit.buckets) and len(group.buckets) == (1 if bucket == 1000 else 2)
    memory.launch(group)
    memory.wait(unit, "a use")
    assert torch.equal(shards.flat(unit.sections[0])[:25].view(WIDTH, WIDTH), expected.weight)


def shared_on_rank(rank: int) -> None:
    """Memory that is shared, that autograd retains, or that NumPy has seen is not freed when a unit is released."""
    for why in ("shared", "asked for", "numpy"):
        layer, memory, shards = make_memory(rank, autograd_retains_memory=why == "asked for")
        (unit,) = partitioned_units(shards, dict(layer.named_parameters()))
        memory.attach(unit)
        memory.allocate(unit)
        for bucket in unit.buckets:
            memory.launch(UnitBuckets(unit, [bucket], bucket.numel))
        memory.wait(unit, why)
        flat = shards.flat(unit.sections[0])
        values = flat.clone()
        if why == "numpy":
            flat.numpy()
        unit.shared = why == "shared"
        memory.release(unit)
        assert torch.equal(flat, values) and memory.unit_of(flat) is None
        fresh = shards.flat(unit.sections[0])
        assert fresh.untyped_storage().nbytes() == 0 and memory.unit_of(fresh) is unit


@pytest.mark.gloo
def test_memory_of_others_is_left_to_them() -> None:
    run_ranks(2, shared_on_rank)


class Layers(nn.Module):
    """Three layers, of which the second has another number format."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.second = nn.Linear(WIDTH, 7, dtype=torch.bfloat16)
        self.third = nn.Linear(3, WIDTH, dtype=torch.float64)


def make_units(rank: int, *, compares_labels: bool = False) -> tuple[Shards, UnitMemory, list[GatheredUnit], Meter]:
    """Return three units of two ranks, whose buckets have 32 elements, and the meter of their gathers."""
    layers, mesh = Layers(), mesh_in_worker(rank, dp=2)
    parameters = dict(layers.named_parameters())
    for name, parameter in parameters.items():
        attach_handle(parameter, name, Nobody())
    units = [Unit(name, (f"{name}.weight", f"{name}.bias")) for name, _ in layers.named_children()]
    placed = [Slot(spec_of(name, p), p.dtype, True, 0) for name, p in parameters.items()]
    layout = build_layout(units, placed, LayoutRules(2, 32))
    plan = resolve(ZeroConfig(zero_stage=3), PrecisionConfig(precision="fp64"))
    shards = Shards(plan, layout, rank, parameters)
    memory = UnitMemory(shards, mesh.gathering, autograd_retains_memory=False, compares_labels=compares_labels)
    found = list(partitioned_units(shards, parameters))
    for unit in found:
        memory.attach(unit)
        memory.allocate(unit)
    mesh.meter.reset()
    return shards, memory, found, mesh.meter


def together_on_rank(rank: int) -> None:
    shards, memory, units, meter = make_units(rank)
    first, second, third = units
    assert [len(unit.groups) for unit in units] == [1, 2, 1]
    memory.launch(*first.groups, *second.groups, *third.groups)
    assert meter.count("dp", "all_gather").calls == 2, "one message of each number format"
    memory.launch(*third.groups, *first.groups)
    assert meter.count("dp", "all_gather").calls == 2, "what has been begun is left out"
    for unit in (third, first):
        memory.wait(unit, "a use")
    assert [unit.state.name for unit in units] == ["WHOLE", "IN_FLIGHT", "WHOLE"]
    memory.release(second)
    for unit, layer in ((first, Layers().first), (third, Layers().third)):
        expected = torch.cat([layer.weight.view(-1), layer.bias])
        assert torch.equal(shards.flat(unit.sections[0])[: expected.numel()], expected)
    memory.release(first)
    memory.release(third)
    assert (memory.live_numel, memory.live) == (0, {})


@pytest.mark.gloo
def test_units_that_are_gathered_together_are_used_and_released_one_by_one() -> None:
    run_ranks(2, together_on_rank)


def mismatch_on_rank(rank: int, mine: list[list[int]]) -> str:
    """Gather different units where ranks compare them first, so that no message is left behind."""
    _, memory, units, meter = make_units(rank, compares_labels=True)
    for _ in range(2):
        with pytest.raises(CollectiveError) as caught:
            memory.launch(*(group for index in mine[rank] for group in units[index].groups))
    assert meter.count("dp", "all_gather").calls == 1, "that of the labels"
    return str(caught.value)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mine", "names"),
    [
        ([[0, 2], [0]], [("first, third", "first"), ("first", "first and others with it")]),
        (
            [[0, 2], [2, 0]],
            [("first, third", "third and others with it"), ("third, first", "first and others with it")],
        ),
        ([[2], [0]], [("third", "first"), ("first", "third")]),
    ],
)
def test_ranks_that_gather_different_units_together(mine: list[list[int]], names: list[tuple[str, str]]) -> None:
    """The error names the units, also where the first of a message is the same on both ranks."""
    texts = run_ranks(2, mismatch_on_rank, mine)
    for rank, (text, (own, theirs)) in enumerate(zip(texts, names, strict=True)):
        assert f"data-parallel rank {rank} gathers {own} for its next use, rank {1 - rank} {theirs}" in text
