"""Tests of startup, from the launcher's environment to a mesh: devices, backends, process groups, and two processes."""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support.each import each
from support.processes import run_ranks
from torch.distributed.distributed_c10d import Backend, BackendConfig

from megazero.comm.interface import Work
from megazero.comm.mesh import ACTIVATIONS, GRADIENTS, channel_key, channel_keys
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.comm.startup import (
    carries_cpu_tensors,
    choose_device,
    destroy_process_groups,
    gpu_index,
    join,
    make_mesh,
)
from megazero.errors import TopologyError
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology

CPU = torch.device("cpu")
EIGHTH = Launch(7, 8, 7)


def test_the_cpu_is_there_for_the_asking() -> None:
    assert choose_device("cpu", EIGHTH) == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rule for machines without a GPU")
def test_auto_takes_the_cpu_where_there_is_no_gpu() -> None:
    assert choose_device("auto", EIGHTH) == CPU


@pytest.mark.cuda
def test_auto_takes_the_gpu_of_this_process() -> None:
    last = torch.cuda.device_count() - 1
    assert choose_device("auto", Launch(last, last + 1, last)) == torch.device("cuda", last)
    assert torch.cuda.current_device() == last


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rule for machines without a GPU")
def test_no_gpu() -> None:
    with pytest.raises(TopologyError) as caught:
        choose_device("cuda", Launch(0, 1, 0))
    (problem,) = caught.value.problems
    assert (problem.given, problem.legal) == ("--device cuda", "--device cpu")


def test_a_backend_fits_the_device() -> None:
    with pytest.raises(TopologyError) as caught:
        join(Launch(0, 1, 0), backend="gloo", device=torch.device("cuda", 0), timeout_minutes=1)
    (problem,) = caught.value.problems
    assert (problem.given, problem.legal) == ("--distributed-backend gloo", "--distributed-backend nccl")


def test_nccl_gives_way_to_gloo_on_cpus_with_a_line_of_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    """Published launch scripts name it, and run on a machine without GPUs too."""
    join(Launch(0, 1, 0), backend="nccl", device=CPU, timeout_minutes=1)
    assert capsys.readouterr().out.splitlines() == [
        "--distributed-backend nccl: PyTorch sees no GPU on this machine, so gloo is used"
    ]


@each(
    ("local_rank", "count", "visible", "index"),
    [(0, 8, None, 0), (3, 8, None, 3), (3, 4, "0,1,2,3", 3), (3, 1, "3", 0), (0, 1, "GPU-5e", 0), (0, 1, None, 0)],
)
def test_a_process_takes_the_gpu_of_its_rank_or_the_only_one(
    local_rank: int, count: int, visible: str | None, index: int
) -> None:
    """A launcher that binds every process to one GPU lets each see that one alone, under the index 0."""
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_index(local_rank, count, environment) == index


@each(("count", "visible"), [(1, None), (1, ""), (2, "0,1"), (1, "0,1")])
def test_more_processes_than_gpus_are_refused(count: int, visible: str | None) -> None:
    with pytest.raises(TopologyError, match=f"local rank 3 with {count} visible GPUs"):
        gpu_index(3, count, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.cuda
def test_more_processes_than_gpus() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(TopologyError) as caught:
        choose_device("cuda", Launch(count, count + 1, count))
    (problem,) = caught.value.problems
    assert problem.given == f"local rank {count} with {count} visible GPUs"
    assert "--device cpu" in problem.legal


def test_one_process_joins_nothing() -> None:
    join(Launch(0, 1, 0), backend="auto", device=CPU, timeout_minutes=1)
    assert not dist.is_initialized()
    destroy_process_groups()
    mesh = make_mesh(Topology(), 0, CPU, FusedBuffers(0, CPU))
    assert set(mesh.communicators) == {"pp", "dp", "tp", "ends", "world", "dp_gather"}
    for axis in mesh.communicators.values():
        assert (axis.size, axis.rank) == (1, 0)
        axis.all_reduce(torch.ones(3)).wait()
    assert {name for name, calls in mesh.meter.bytes_by_axis().items() if calls == {"all_reduce": 0}} == {
        *("pp", "dp", "tp", "ends", "world")
    }


@pytest.mark.parametrize(
    ("backend", "carries"), [("gloo", True), ("nccl", False), ("cpu:gloo,cuda:nccl", True), ("cuda:nccl", False)]
)
def test_which_groups_carry_cpu_tensors(backend: str, carries: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = str(BackendConfig(Backend(backend)))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert carries_cpu_tensors(Mock()) is carries


def members(rank: int, topology: Topology) -> dict[str, list[int]]:
    """Return, for each axis, the members' global ranks as gathered over it."""
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
    """Send this stage's rank to the next stage and to the one before; return the values received from both."""
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


def first_messages(rank: int, num_stages: int) -> tuple[list[Any], dict[str, Any]]:
    """Make a mesh; return the messages that this stage sent and received for it, by channel, and the meter's bytes."""
    seen: list[tuple[str, ProcessGroupCommunicator, int]] = []
    sends, receives = ProcessGroupCommunicator.send, ProcessGroupCommunicator.receive_into

    def send(self: ProcessGroupCommunicator, tensor: torch.Tensor, to: int) -> Work:
        seen.append(("to", self, to))
        return sends(self, tensor, to)

    def receive_into(self: ProcessGroupCommunicator, tensor: torch.Tensor, source: int) -> Work:
        seen.append(("from", self, source))
        return receives(self, tensor, source)

    with pytest.MonkeyPatch.context() as watched:
        watched.setattr(ProcessGroupCommunicator, "send", send)
        watched.setattr(ProcessGroupCommunicator, "receive_into", receive_into)
        mesh = make_mesh(Topology(pp=num_stages), rank, CPU, FusedBuffers(64, CPU))
    communicators: dict[str, Any] = dict(mesh.communicators)
    key_of = {id(axis._inner): key for key, axis in communicators.items()}
    return sorted((key_of[id(group)], way, peer) for way, group, peer in seen), mesh.meter.bytes_by_axis()


@pytest.mark.gloo
@pytest.mark.parametrize("num_stages", [2, 3])
def test_every_link_of_the_pipeline_is_connected_at_once(num_stages: int) -> None:
    """Every link carries one message each way at startup, as NCCL connects at the first, which could hang in a step."""
    for stage, (messages, metered) in enumerate(run_ranks(num_stages, first_messages, num_stages)):
        before, behind = (stage - 1) % num_stages, (stage + 1) % num_stages
        expected = [
            (channel_key(ACTIVATIONS, stage, num_stages), "to", behind),
            (channel_key(GRADIENTS, stage, num_stages), "from", behind),
            (channel_key(ACTIVATIONS, before, num_stages), "from", before),
            (channel_key(GRADIENTS, before, num_stages), "to", before),
        ]
        assert messages == sorted(expected)
        assert metered == {}, "they are no part of any step"


def group_names(rank: int) -> dict[str, str]:
    mesh = make_mesh(Topology(pp=2, tp=2), rank, CPU, FusedBuffers(64, CPU))
    communicators: dict[str, Any] = dict(mesh.communicators)
    groups = {key: communicators[key]._inner._group for key in ("tp", "pp")}
    return {key: group.group_desc for key, group in groups.items()}


@pytest.mark.gloo
def test_process_groups_carry_names() -> None:
    assert run_ranks(4, group_names)[2] == {"tp": "megazero_tp_1", "pp": "megazero_pp_0"}


def time_outs(rank: int) -> list[timedelta]:
    mesh = make_mesh(Topology(dp=2, tp=2), rank, CPU, FusedBuffers(64, CPU), timeout_minutes=7)
    groups = [mesh.communicators[axis]._inner._group for axis in ("dp", "tp")]
    return [group._get_backend(CPU).options._timeout for group in groups]


@pytest.mark.gloo
def test_the_time_out_holds_on_every_axis() -> None:
    """Every group has the job's time-out; by default torch would give it the backend's (gloo's is half an hour)."""
    assert run_ranks(4, time_outs) == [[timedelta(minutes=7)] * 2] * 4


PROGRAM = """
import torch, torch.distributed as dist
from megazero.comm.startup import choose_device, destroy_process_groups, join, make_mesh
from megazero.parallel.launch import Launch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology

launch = Launch.from_environment()
device = choose_device("cpu", launch)
join(launch, backend="auto", device=device, timeout_minutes=1)
mesh = make_mesh(Topology(dp=launch.world_size), launch.rank, device, FusedBuffers(1 << 10, device))
total = torch.tensor([launch.rank + 1.0])
mesh.axis("dp").all_reduce(total).wait()
print(dist.get_backend(), mesh.coordinate("dp"), total.item())
destroy_process_groups()
destroy_process_groups()
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
