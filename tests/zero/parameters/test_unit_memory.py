"""Tests of the memory of a unit in each of its states, which stays the same storage when it is resized."""

import pytest
import torch
from support.late_copies import late_copies
from support.processes import mesh_in_worker, run_ranks
from torch import nn

from megazero.comm.local import LocalCommunicator
from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.memory.homes import HostHome
from megazero.parallel.param_spec import Unit, spec_of
from megazero.zero.layout import LayoutRules, Slot, build_layout
from megazero.zero.parameters.guard import PartitionedParameter, attach_handle
from megazero.zero.parameters.unit_memory import UnitMemory, UnitState, partitioned_units
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
            memory.launch(unit, [bucket])
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
    (together,) = unit.gathers
    assert together == list(unit.buckets) and len(together) == (1 if bucket == 1000 else 2)
    memory.launch(unit, together)
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
            memory.launch(unit, [bucket])
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
