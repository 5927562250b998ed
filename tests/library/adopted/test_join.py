"""Tests how processes find each other: started by torchrun, joined already, in groups of another library, or alone."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.launch import run_script
from support.processes import mesh_in_worker, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from megazero.config.engine_sections import LimitConfig, ZeroConfig
from megazero.errors import TopologyError, UsageError
from megazero.library.adopted.join import divided, mesh_and_buffers
from megazero.library.adopted.mesh import default_group
from megazero.memory.ledger_interface import NullLedger

PROGRAM = """
import torch
from torch import nn
import megazero

model = nn.Linear(3, 1, bias=False).double()
torch.nn.init.constant_(model.weight, 1.0)
config = {"zero": {"zero_stage": 3}, "precision": {"precision": "fp64"}, "optimizer": {"type": "SGD", "lr": 0.5}}
config["limits"] = {"distributed_timeout_seconds_after_init": 77, "distributed_join_timeout_minutes": 1}
engine = megazero.initialize(model, config)
rank = engine.mesh.rank
limit = engine.mesh.axis("dp")._inner._group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
default = torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
engine.backward(engine(torch.full((2, 3), float(rank + 1), dtype=torch.float64)).mean())
engine.step()
with megazero.zero.GatheredParameters(model):
    open(f"{rank}.txt", "w").write(f"{engine.mesh.axis('dp').size} {model.weight.tolist()} {limit} {default}")
engine.close()
engine.mesh.world.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.gloo
def test_started_by_torchrun(tmp_path: Path) -> None:
    """A user's whole program runs on two processes."""
    run_script(PROGRAM, ranks=2, folder=tmp_path)
    for rank in range(2):
        # The average gradient is 1.5 everywhere.
        assert (tmp_path / f"{rank}.txt").read_text() == "2 [[0.25, 0.25, 0.25]] 77.0 77.0"


def test_a_process_of_its_own() -> None:
    mesh, buffers = mesh_and_buffers(None, LimitConfig(), NullLedger())
    assert (mesh.axis("dp").size, mesh.rank, buffers.buffer_bytes) == (1, 0, 0)
    assert not dist.is_initialized()


def limit_of(communicator: Any) -> float:
    group = communicator._inner._group
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def joined(rank: int) -> list[tuple[int, int]]:
    given = mesh_in_worker(rank, dp=2)
    foreign = SimpleNamespace(get_data_parallel_group=lambda: dist.group.WORLD)
    meshes = [mesh_and_buffers(mesh, LimitConfig(), NullLedger())[0] for mesh in (None, foreign, given)]
    assert meshes[-1] is given
    default = default_group(torch.device("cpu"))
    assert default is not None
    limits = [default.limit_seconds, *(limit_of(mesh.gathering) for mesh in meshes[:2])]
    assert len(set(limits)) == 1, "groups made beside the default group have its time limit"
    mesh_and_buffers(None, LimitConfig(distributed_timeout_seconds_after_init=default.limit_seconds), NullLedger())
    with pytest.raises(UsageError, match="180 s for a collective, where the processes have joined with"):
        mesh_and_buffers(None, LimitConfig(distributed_timeout_minutes=3), NullLedger())
    return [(mesh.axis("dp").size, mesh.axis("dp").rank) for mesh in meshes]


@pytest.mark.gloo
def test_joined_already() -> None:
    assert run_ranks(2, joined) == [[(2, rank)] * 3 for rank in range(2)]


def divided_over(rank: int, names: tuple[str, str]) -> tuple[str, dict[str, int]]:
    """Divide the mesh of a torch DeviceMesh of 2 x 2 on nodes of two processes; return what was refused, and hops."""
    job = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    with patch.dict(os.environ, {name: str(value) for name, value in job.items()}):
        given = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        mesh, buffers = mesh_and_buffers(given, LimitConfig(), NullLedger())
        try:
            mesh = divided(mesh, ZeroConfig(mics_shard_size=1, zero_stage=1), buffers, LimitConfig())
        except TopologyError as error:
            return str(error), {}
    whole = torch.ones(1)
    mesh.replicas.all_reduce(whole).wait()
    across = mesh.meter.bytes_across_nodes()
    return "", {axis: sum(sent.values()) for axis, sent in across.items()}


@pytest.mark.gloo
def test_the_data_parallel_axis_of_a_device_mesh_is_divided() -> None:
    """Tensor-parallel neighbours share a node, so that replicas are across."""
    assert run_ranks(4, divided_over, ("dp", "tp")) == [("", {"dp_replica": 4})] * 4


@pytest.mark.gloo
def test_ranks_in_another_order_are_not_divided() -> None:
    """Every rank refuses: two have another number in the mesh than in the job, whose nodes are runs of ranks."""
    for said, _ in run_ranks(4, divided_over, ("tp", "dp")):
        assert "pipeline 1 x data 2 x tensor 2 = 4 ranks" in said and "ranks of a tensor-parallel group are" in said
