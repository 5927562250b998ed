"""Tests meshes over groups that another library made: their axes, and collectives over both axes as over a world."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from megazero.comm.mesh import CONTROL_AXES, Mesh, gather_json, gather_json_on_first
from megazero.comm.startup import second_control
from megazero.errors import TopologyError
from megazero.library.adopted import mesh as adopted_mesh
from megazero.library.adopted.mesh import TwoAxes, adopt, adopt_default, find_groups, is_joined, joined_device
from megazero.memory.fused_buffers import FusedBuffers

CPU = torch.device("cpu")
# Data parallelism is innermost, the opposite of the order in which a Topology numbers ranks.
DATA, TENSOR = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def group_of(groups: tuple[tuple[int, ...], ...], rank: int) -> dist.ProcessGroup:
    made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
    return next(group for ranks, group in made.items() if rank in ranks)


def mpu_of(rank: int, data: Any, tensor: Any, name: str = "get_tensor_model_parallel_group") -> SimpleNamespace:
    """Return an object of functions that return groups, such as Megatron-LM calls mpu."""
    groups = group_of(data, rank), group_of(tensor, rank)
    return SimpleNamespace(**{"get_data_parallel_group": lambda: groups[0], name: lambda: groups[1]})


def scratch() -> FusedBuffers:
    return FusedBuffers(1 << 12, CPU)


def hears(mesh: Mesh, rank: int) -> dict[str, list[int]]:
    """Return, by axis, the ranks that share this rank's group, without the axes on the way to the first rank."""
    found = {}
    for name, axis in mesh.communicators.items():
        if name in CONTROL_AXES:
            continue
        ranks = torch.empty(axis.size, dtype=torch.int64)
        axis.all_gather_into(ranks, torch.tensor([rank])).wait()
        found[name] = ranks.tolist()
        if name != "dp_gather":
            assert (axis.rank, axis.size) == (mesh.coordinate(name), mesh.topology.size(name))
    return found


def adopted(rank: int, name: str) -> tuple[dict[str, list[int]], int]:
    mesh = adopt(mpu_of(rank, DATA, TENSOR, name), CPU, scratch())
    return hears(mesh, rank), mesh.rank


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["get_tensor_model_parallel_group", "get_model_parallel_group"])
def test_ranks_in_another_order(name: str) -> None:
    world = [0, 2, 1, 3]  # by topology: data-parallel index first, then tensor-parallel
    assert run_ranks(4, adopted, name) == [
        (
            {"pp": [r], "dp": list(data), "tp": list(tensor), "ends": [r], "world": world, "dp_gather": list(data)},
            world.index(r),
        )
        for r, (data, tensor) in enumerate(zip(sorted(DATA * 2), TENSOR * 2, strict=True))
    ]


def two_axes(rank: int) -> list[list[float]]:
    mesh = adopt(mpu_of(rank, DATA, TENSOR), CPU, scratch())
    world = mesh.world
    assert isinstance(world._inner, TwoAxes)
    place = world.rank
    total, largest = torch.tensor([2.0**place]), torch.tensor([float(place)])
    world.all_reduce(total).wait()
    world.all_reduce_scalars(largest, "max").wait()
    parts = torch.arange(8, dtype=torch.float64) * (place + 1)
    mine = torch.empty(2, dtype=torch.float64)
    world.reduce_scatter_into(mine, parts).wait()
    sent = [torch.tensor([float(place)]) for _ in range(4)]
    for source, tensor in enumerate(sent):
        world.broadcast(tensor, source).wait()
    world.barrier()
    calls = mesh.meter.bytes_by_axis()
    assert set(calls) == {"world"}, "a collective over both axes is counted once"
    return [total.tolist(), largest.tolist(), mine.tolist(), [tensor.item() for tensor in sent]]


@pytest.mark.gloo
def test_collectives_over_both_axes() -> None:
    found = run_ranks(4, two_axes)
    places = [0, 2, 1, 3]
    for rank, place in enumerate(places):
        total, largest, mine, sent = found[rank]
        assert (total, largest, sent) == ([15.0], [3.0], [0.0, 1.0, 2.0, 3.0])
        assert mine == [10.0 * 2 * place, 10.0 * (2 * place + 1)]  # 1 + 2 + 3 + 4 times the element


def beside_control(rank: int) -> list[list[int]]:
    """Return who is on the second communicators of a mesh of all ranks, and of two meshes beside each other."""
    found = []
    data = group_of(DATA, rank)
    for foreign in (mpu_of(rank, DATA, TENSOR), SimpleNamespace(get_data_parallel_group=lambda: data)):
        mesh = adopt(foreign, CPU, scratch())
        control = second_control(mesh, 1.0)
        assert (control.rank, control.size) == (mesh.control.rank, mesh.control.size)
        mesh.meter.reset()
        found.append(gather_json(control, rank))
        assert mesh.meter.counts() == {}
    return found


@pytest.mark.gloo
def test_a_second_control_has_the_ranks_of_the_first() -> None:
    for rank, found in enumerate(run_ranks(4, beside_control)):
        assert found == [[0, 2, 1, 3], list(DATA[rank // 2])]


def hosts_beside(rank: int) -> tuple[bool, list[int], list[int]]:
    """Gather ranks over `control`, on all ranks and on the mesh's first, where groups seem to carry a GPU's alone."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adopted_mesh, "carries_cpu_tensors", lambda group: False)
        mesh = adopt(mpu_of(rank, DATA, TENSOR), CPU, scratch())
    return mesh.control is mesh.world, gather_json(mesh.control, rank), gather_json_on_first(mesh, rank)


@pytest.mark.gloo
def test_hosts_have_groups_of_their_own_beside_a_gpus() -> None:
    everyone = [0, 2, 1, 3]
    assert run_ranks(4, hosts_beside) == [(False, everyone, everyone if rank == 0 else []) for rank in range(4)]


def device_meshes(rank: int) -> list[Any]:
    flat = adopt(init_device_mesh("cpu", (4,)), CPU, scratch())
    square = adopt(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), CPU, scratch())
    found = [hears(mesh, rank) for mesh in (flat, square)]
    for mesh in (flat, square):
        assert gather_json_on_first(mesh, {"rank": rank}) == [{"rank": each} for each in range(4 if rank == 0 else 0)]
    with pytest.raises(TopologyError, match="known by their names") as caught:
        adopt(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model")), CPU, scratch())
    assert "data, model" in str(caught.value)
    return found


@pytest.mark.gloo
def test_device_meshes() -> None:
    for rank, (flat, square) in enumerate(run_ranks(4, device_meshes)):
        assert flat["dp"] == flat["world"] == flat["dp_gather"] == [0, 1, 2, 3] and flat["tp"] == [rank]
        assert square["world"] == [0, 1, 2, 3]
        assert square["tp"] == [rank // 2 * 2, rank // 2 * 2 + 1] and square["dp"] == [rank % 2, rank % 2 + 2]


def default(rank: int) -> tuple[bool, torch.device, dict[str, list[int]]]:
    return is_joined(), joined_device(), hears(adopt_default(CPU, scratch()), rank)


@pytest.mark.gloo
def test_the_default_group_is_all_data_parallel() -> None:
    everyone = [0, 1]
    for rank, found in enumerate(run_ranks(2, default)):
        alone = {axis: [rank] for axis in ("tp", "pp", "ends")}
        axes = {"dp": everyone, "world": everyone, "dp_gather": everyone, **alone}
        assert found == (True, CPU, axes)


def test_a_process_of_its_own_has_joined_nothing() -> None:
    assert not is_joined()


def refusals(rank: int) -> list[str]:
    told = []
    pipeline = mpu_of(rank, DATA, TENSOR)
    pipeline.get_model_parallel_group = lambda: dist.group.WORLD
    same = mpu_of(rank, DATA, DATA)
    for foreign in (pipeline, same, object()):
        with pytest.raises(TopologyError) as caught:
            adopt(foreign, CPU, scratch())
        told.append(caught.value.problems[0].given)
    return told


@pytest.mark.gloo
def test_what_cannot_be_adopted() -> None:
    pipeline, same, nothing = run_ranks(4, refusals)[2]
    assert pipeline == "4 ranks share a model, 2 of them its tensors"
    assert same == "data-parallel ranks [2, 3], tensor-parallel ranks [2, 3] on rank 2"
    assert nothing == "mesh of type object"


def alone_in_its_group(rank: int) -> tuple[int, int, int]:
    """Adopt groups in which every process has a data-parallel axis of its own, and return the sizes of axes."""
    mesh = adopt(mpu_of(rank, ((0,), (1,)), ((0, 1),)), CPU, scratch())
    only_data = adopt(SimpleNamespace(get_data_parallel_group=lambda: dist.group.WORLD), CPU, scratch())
    groups = find_groups(SimpleNamespace(get_data_parallel_group=lambda: dist.group.WORLD))
    assert groups.tensor is None
    dist.barrier()  # a rank that frees its groups would break the connections that another one is still making
    return mesh.axis("dp").size, mesh.axis("tp").size, only_data.axis("dp").size


@pytest.mark.gloo
def test_axes_of_one_rank() -> None:
    assert run_ranks(2, alone_in_its_group) == [(1, 2, 2), (1, 2, 2)]
