"""Tests of the mesh: a rank's coordinates, the members of its axes, and the gathering of JSON from all ranks."""

from typing import Any

import pytest
import torch
from support.each import each
from support.processes import SCRATCH_BYTES, drop_meshes, mesh_in_worker, run_ranks

from megazero.comm import startup
from megazero.comm.mesh import (
    ACTIVATIONS,
    CHANNELS,
    GRADIENTS,
    channel_key,
    channel_keys,
    gather_json,
    gather_json_on_first,
)
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology

CPU = torch.device("cpu")


def place(rank: int) -> dict[str, Any]:
    """Return, for every axis, this rank's coordinate, its rank on the axis, and the members' gathered global ranks."""
    mesh = mesh_in_worker(rank, tp=2, dp=2)
    assert mesh.world is mesh.axis("world")
    assert mesh.device == CPU and mesh.rank == rank
    found: dict[str, Any] = {}
    for name in ("pp", "dp", "tp", "world"):
        axis = mesh.axis(name)
        members = torch.empty(axis.size, dtype=torch.int64)
        axis.all_gather_into(members, torch.tensor([rank])).wait()
        found[name] = (mesh.coordinate(name), axis.rank, members.tolist())
    return found


@pytest.mark.gloo
def test_axes_of_two_by_two_ranks() -> None:
    everyone = [0, 1, 2, 3]
    assert run_ranks(4, place) == [
        {"pp": (0, 0, [0]), "dp": (0, 0, [0, 2]), "tp": (0, 0, [0, 1]), "world": (0, 0, everyone)},
        {"pp": (0, 0, [1]), "dp": (0, 0, [1, 3]), "tp": (1, 1, [0, 1]), "world": (1, 1, everyone)},
        {"pp": (0, 0, [2]), "dp": (1, 1, [0, 2]), "tp": (0, 0, [2, 3]), "world": (2, 2, everyone)},
        {"pp": (0, 0, [3]), "dp": (1, 1, [1, 3]), "tp": (1, 1, [2, 3]), "world": (3, 3, everyone)},
    ]


@each("num_stages", range(2, 9))
def test_what_a_stage_sends_and_receives_has_four_groups(num_stages: int) -> None:
    """A stage exchanges activations and gradients with the stages before and behind, each over a group of its own."""
    for stage in range(num_stages):
        links = ((stage - 1) % num_stages, stage)
        keys = [channel_key(key, link, num_stages) for key in CHANNELS for link in links]
        assert len(set(keys)) == 4, (stage, keys)


@each("num_stages", range(1, 9))
def test_every_channel_has_its_group_and_every_group_its_use(num_stages: int) -> None:
    links = range(num_stages if num_stages > 1 else 0)
    used = {channel_key(key, link, num_stages) for key in (ACTIVATIONS, GRADIENTS) for link in links}
    assert sorted(channel_keys(num_stages)) == sorted(used)


VALUES = [
    {"text": 'Größe, 漢字, 🦆, \x00, "quoted", end', "deep": {"list": [1, [2.5, None]], "yes": True}},
    [],
    "",
    {"long": "ü" * 3000, "exact": 2**53 + 1, "small": 1e-300},
]


def exchange(rank: int, size: int) -> tuple[list[Any], list[Any]]:
    mesh = mesh_in_worker(rank, dp=size)
    return gather_json(mesh.control, VALUES[rank]), gather_json_on_first(mesh, VALUES[rank])


@pytest.mark.gloo
@pytest.mark.parametrize("size", [1, 2, 4])
def test_json_of_any_length_reaches_every_rank_or_the_first(size: int) -> None:
    everyone = VALUES[:size]
    assert run_ranks(size, exchange, size) == [(everyone, [] if rank else everyone) for rank in range(size)]


def same_length(rank: int) -> list[Any]:
    return gather_json(mesh_in_worker(rank, dp=2).control, {"rank": rank})


@pytest.mark.gloo
def test_json_of_equal_length() -> None:
    assert run_ranks(2, same_length) == [[{"rank": 0}, {"rank": 1}]] * 2


def over_own_group(rank: int) -> tuple[bool, list[Any], dict[str, list[str]], int]:
    """Gather on a mesh whose default group carries no CPU tensors, as far as it can tell."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(startup, "carries_cpu_tensors", lambda group: False)
        mesh = startup.make_mesh(Topology(dp=2), rank, CPU, FusedBuffers(SCRATCH_BYTES, CPU))
    everyone = gather_json(mesh.control, VALUES[rank])
    mesh.control.barrier()
    axes = {axis: list(calls) for axis, calls in mesh.meter.bytes_by_axis().items()}
    numbered = sum(begun.axis == "control" for begun in mesh.meter.flight.begun)
    drop_meshes(rank)
    return mesh.control is mesh.world, everyone, axes, numbered


@pytest.mark.gloo
def test_what_hosts_exchange_goes_beside_a_group_that_carries_a_gpus_tensors_only() -> None:
    counted = {"world": ["all_gather", "scalars"]}
    assert run_ranks(2, over_own_group) == [(False, VALUES[:2], counted, 3)] * 2


def over_the_default_group(rank: int) -> tuple[bool, bool, set[str]]:
    mesh = mesh_in_worker(rank, dp=2, is_late=False)
    gather_json(mesh.control, rank)
    return mesh.control is mesh.world, "control" in mesh.communicators, set(mesh.meter.bytes_by_axis())


@pytest.mark.gloo
def test_gloo_needs_no_other_group() -> None:
    assert run_ranks(2, over_the_default_group) == [(True, False, {"world"})] * 2
