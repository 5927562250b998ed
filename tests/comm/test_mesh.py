"""Tests of the mesh: a rank's coordinates, the members of its axes, and the gathering of JSON from all ranks."""

from typing import Any

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks

from megazero.comm.mesh import ACTIVATIONS, CHANNELS, GRADIENTS, channel_key, channel_keys, gather_json

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


@pytest.mark.parametrize("num_stages", range(2, 9))
def test_what_a_stage_sends_and_receives_has_four_groups(num_stages: int) -> None:
    """A stage exchanges activations and gradients with the stages before and behind, each over a group of its own."""
    for stage in range(num_stages):
        links = ((stage - 1) % num_stages, stage)
        keys = [channel_key(key, link, num_stages) for key in CHANNELS for link in links]
        assert len(set(keys)) == 4, (stage, keys)


@pytest.mark.parametrize("num_stages", range(1, 9))
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


def exchange(rank: int, size: int) -> list[Any]:
    mesh = mesh_in_worker(rank, dp=size)
    return gather_json(mesh.world, VALUES[rank], CPU)


@pytest.mark.gloo
@pytest.mark.parametrize("size", [1, 2, 4])
def test_json_of_any_length_reaches_every_rank(size: int) -> None:
    assert run_ranks(size, exchange, size) == [VALUES[:size]] * size


def same_length(rank: int) -> list[Any]:
    return gather_json(mesh_in_worker(rank, dp=2).world, {"rank": rank}, CPU)


@pytest.mark.gloo
def test_json_of_equal_length() -> None:
    assert run_ranks(2, same_length) == [[{"rank": 0}, {"rank": 1}]] * 2
