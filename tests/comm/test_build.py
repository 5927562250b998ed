"""From the launcher's environment to a mesh: nonsense is refused, and two processes find each other."""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_ranks

from megazero.comm.build import Launch, choose_device, join, leave, make_mesh
from megazero.comm.mesh import ACTIVATIONS, GRADIENTS, channel_keys
from megazero.errors import TopologyError
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology

CPU = torch.device("cpu")


def set_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in os.environ:
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def slurm(rank: int, size: int, local: int, per_node: str) -> dict[str, str]:
    """What a task of srun finds in its environment."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch(0, 1, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Launch(5, 8, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Launch(1, 2, 0)),
        ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}, Launch(0, 1, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, Launch(5, 8, 1, (4, 4))),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, Launch(0, 1, 0, (1,))),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "6"}, Launch(5, 8, 5)),
        ({"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Launch(5, 6, 1, (2, 2, 2))),
        ({"RANK": "4", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Launch(4, 6, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "16"}, Launch(1, 2, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "two"}, Launch(1, 2, 1)),
        (slurm(5, 6, 1, "2(x3)"), Launch(5, 6, 1, (2, 2, 2))),
        (slurm(9, 10, 1, "8,2"), Launch(9, 10, 1, (8, 2))),
        (slurm(3, 4, 1, ""), Launch(3, 4, 1)),
        (slurm(3, 4, 1, "2(x3)"), Launch(3, 4, 1)),
        (slurm(0, 1, 0, "1"), Launch(0, 1, 0)),
        # A batch script itself, with four tasks to come; and torchrun, started once on each of two nodes.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}, Launch(0, 1, 0)),
        (
            {**slurm(1, 2, 0, "1(x2)"), "RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"},
            Launch(7, 8, 3, (4, 4)),
        ),
    ],
)
def test_launch(environment: dict[str, str], launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, environment)
    assert Launch.from_environment() == launch


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "first"}, "'RANK': 'first'"),
        ({"WORLD_SIZE": "4.0"}, "'WORLD_SIZE': '4.0'"),
        ({"LOCAL_RANK": "0x1"}, "'LOCAL_RANK': '0x1'"),
        ({"RANK": "3"}, "RANK 3, WORLD_SIZE 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2, WORLD_SIZE 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK -1, WORLD_SIZE 2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE 0"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK -1"),
        ({**slurm(0, 4, 0, "4"), "SLURM_PROCID": "x"}, "'SLURM_PROCID': 'x'"),
        (slurm(4, 4, 0, "4"), "SLURM_PROCID 4, SLURM_STEP_NUM_TASKS 4"),
        # Dealt out to the nodes in turn, as srun --distribution=cyclic does.
        (slurm(1, 4, 0, "2(x2)"), "SLURM_PROCID 1, SLURM_STEP_NUM_TASKS 4, SLURM_LOCALID 0, SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_nonsense_from_a_launcher(environment: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, environment)
    with pytest.raises(TopologyError) as caught:
        Launch.from_environment()
    (problem,) = caught.value.problems
    assert told in problem.given and problem.rule


def test_nodes_of_a_launch() -> None:
    known, unknown = Launch(5, 6, 1, (2, 2, 2)), Launch(5, 6, 1)
    assert (known.node, known.nodes.ranks_per_node) == (2, (2, 2, 2))
    assert (unknown.node, unknown.nodes.ranks_per_node) == (0, (6,))


def test_the_cpu_is_there_for_the_asking() -> None:
    assert choose_device("cpu", 7) == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_auto_takes_the_cpu_where_there_is_no_gpu() -> None:
    assert choose_device("auto", 7) == CPU


@pytest.mark.cuda
def test_auto_takes_the_gpu_of_this_process() -> None:
    last = torch.cuda.device_count() - 1
    assert choose_device("auto", last) == torch.device("cuda", last)
    assert torch.cuda.current_device() == last


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_no_gpu() -> None:
    with pytest.raises(TopologyError) as caught:
        choose_device("cuda", 0)
    (problem,) = caught.value.problems
    assert (problem.given, problem.legal) == ("--device cuda", "--device cpu")


def test_a_backend_fits_the_device() -> None:
    with pytest.raises(TopologyError) as caught:
        join(Launch(0, 1, 0), backend="nccl", device=CPU, timeout_minutes=1)
    (problem,) = caught.value.problems
    assert (problem.given, problem.legal) == ("--distributed-backend nccl", "--distributed-backend gloo")


@pytest.mark.cuda
def test_more_processes_than_gpus() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(TopologyError) as caught:
        choose_device("cuda", count)
    (problem,) = caught.value.problems
    assert problem.given == f"local rank {count} with {count} visible GPUs"
    assert "--device cpu" in problem.legal


def test_one_process_joins_nothing() -> None:
    join(Launch(0, 1, 0), backend="auto", device=CPU, timeout_minutes=1)
    assert not dist.is_initialized()
    leave()
    mesh = make_mesh(Topology(), 0, CPU, FusedBuffers(0, CPU))
    assert set(mesh.communicators) == {"pp", "dp", "tp", "ends", "world", "dp_gather"}
    for axis in mesh.communicators.values():
        assert (axis.size, axis.rank) == (1, 0)
        axis.all_reduce(torch.ones(3)).wait()
    assert {name for name, calls in mesh.meter.bytes_by_axis().items() if calls == {"all_reduce": 0}} == {
        *("pp", "dp", "tp", "ends", "world")
    }


def members(rank: int, topology: Topology) -> dict[str, list[int]]:
    """By axis, the ranks that hear this one."""
    mesh = make_mesh(topology, rank, CPU, FusedBuffers(64, CPU))
    found = {}
    for name, axis in mesh.communicators.items():
        ranks = torch.empty(axis.size, dtype=torch.int64)
        axis.all_gather_into(ranks, torch.tensor([rank])).wait()
        assert axis.rank == mesh.coordinate(AXIS_OF.get(name, name))
        found[name] = ranks.tolist()
    return found


AXIS_OF = {"dp_gather": "dp"} | dict.fromkeys(channel_keys(3), "pp")


@pytest.mark.gloo
@pytest.mark.parametrize("degrees", [{"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"dp": 4}], ids=str)
def test_every_axis_joins_the_ranks_of_its_groups(degrees: dict[str, int]) -> None:
    topology = Topology(**degrees)
    for rank, found in enumerate(run_ranks(4, members, topology)):
        axes = ["pp", "dp", "tp", "ends", "world", "dp_gather"]
        axes += ["pp_gradients", "pp_wrapped", "pp_gradients_wrapped"] if topology.pp == 2 else []
        assert found == {name: list(topology.group_of(rank, AXIS_OF.get(name, name))) for name in axes}


def exchange(rank: int) -> list[float]:
    """Three stages send their rank down the pipeline and back up; what each has received."""
    mesh = make_mesh(Topology(pp=3), rank, CPU, FusedBuffers(64, CPU))
    received = torch.zeros(2)
    down, up = mesh.channel(ACTIVATIONS, link=0), mesh.channel(GRADIENTS, link=0)
    works = [down.send(torch.tensor([rank + 0.5]), rank + 1)] if rank < 2 else []
    works += [up.send(torch.tensor([rank + 0.25]), rank - 1)] if rank else []
    works += [down.receive_into(received[:1], rank - 1)] if rank else []
    works += [up.receive_into(received[1:], rank + 1)] if rank < 2 else []
    for work in works:
        work.wait()
    assert mesh.meter.count("pp", "send").nbytes == 4 * (1 + (rank == 1))
    return received.tolist()


@pytest.mark.gloo
def test_neighbours_on_the_pipeline_exchange_tensors() -> None:
    assert run_ranks(3, exchange) == [[0.0, 1.25], [0.5, 2.25], [1.5, 0.0]]


def group_names(rank: int) -> dict[str, str]:
    mesh = make_mesh(Topology(pp=2, tp=2), rank, CPU, FusedBuffers(64, CPU))
    groups = {key: mesh.communicators[key]._inner._group for key in ("tp", "pp")}  # type: ignore[attr-defined]
    return {key: group.group_desc for key, group in groups.items()}


@pytest.mark.gloo
def test_process_groups_carry_names() -> None:
    assert run_ranks(4, group_names)[2] == {"tp": "megazero_tp_1", "pp": "megazero_pp_0"}


def time_outs(rank: int) -> list[timedelta]:
    mesh = make_mesh(Topology(dp=2, tp=2), rank, CPU, FusedBuffers(64, CPU), timeout_minutes=7)
    groups = [mesh.communicators[axis]._inner._group for axis in ("dp", "tp")]  # type: ignore[attr-defined]
    return [group._get_backend(CPU).options._timeout for group in groups]


@pytest.mark.gloo
def test_the_time_out_holds_on_every_axis() -> None:
    """A group of its own would get the backend's time-out from torch (gloo's is half an hour), not the job's."""
    assert run_ranks(4, time_outs) == [[timedelta(minutes=7)] * 2] * 4


PROGRAM = """
import torch, torch.distributed as dist
from megazero.comm.build import Launch, choose_device, join, leave, make_mesh
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology

launch = Launch.from_environment()
device = choose_device("cpu", launch.local_rank)
join(launch, backend="auto", device=device, timeout_minutes=1)
mesh = make_mesh(Topology(dp=launch.world_size), launch.rank, device, FusedBuffers(1 << 10, device))
total = torch.tensor([launch.rank + 1.0])
mesh.axis("dp").all_reduce(total).wait()
print(dist.get_backend(), mesh.coordinate("dp"), total.item())
leave()
leave()
print(dist.is_initialized())
"""


def start(rank: int, port: int) -> subprocess.Popen[str]:
    environment: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_PORT": port}
    environment |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.gloo
def test_two_processes_join_and_leave() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start(rank, port) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [output for output, _ in outputs] == ["gloo 0 3.0\nFalse\n", "gloo 1 3.0\nFalse\n"], outputs
