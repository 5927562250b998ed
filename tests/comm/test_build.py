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
from megazero.errors import TopologyError
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology

CPU = torch.device("cpu")


def set_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch(0, 1, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Launch(5, 8, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Launch(1, 2, 0)),
        ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}, Launch(0, 1, 0)),
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
    ],
)
def test_nonsense_from_a_launcher(environment: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, environment)
    with pytest.raises(TopologyError) as caught:
        Launch.from_environment()
    (problem,) = caught.value.problems
    assert told in problem.given and problem.rule


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
    assert set(mesh.communicators) == {"pp", "dp", "tp", "world", "dp_gather"}
    for axis in mesh.communicators.values():
        assert (axis.size, axis.rank) == (1, 0)
        axis.all_reduce(torch.ones(3)).wait()
    assert {name for name, calls in mesh.meter.bytes_by_axis().items() if calls == {"all_reduce": 0}} == {
        *("pp", "dp", "tp", "world")
    }


def members(rank: int, topology: Topology) -> dict[str, list[int]]:
    """By axis, the ranks that hear this one."""
    mesh = make_mesh(topology, rank, CPU, FusedBuffers(64, CPU))
    found = {}
    for name, axis in mesh.communicators.items():
        ranks = torch.empty(axis.size, dtype=torch.int64)
        axis.all_gather_into(ranks, torch.tensor([rank])).wait()
        assert axis.rank == mesh.coordinate("dp" if name == "dp_gather" else name)
        found[name] = ranks.tolist()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("degrees", [{"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"dp": 4}], ids=str)
def test_every_axis_joins_the_ranks_of_its_groups(degrees: dict[str, int]) -> None:
    topology = Topology(**degrees)
    for rank, found in enumerate(run_ranks(4, members, topology)):
        axes = {"pp": "pp", "dp": "dp", "tp": "tp", "world": "world", "dp_gather": "dp"}
        assert found == {name: list(topology.group_of(rank, axis)) for name, axis in axes.items()}


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
