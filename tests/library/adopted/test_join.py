"""Tests how processes find each other: started by torchrun, joined already, in groups of another library, or alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launch import run_script
from support.processes import mesh_in_worker, run_ranks

from megazero.config.engine_sections import LimitConfig
from megazero.errors import UsageError
from megazero.library.adopted.join import mesh_and_buffers
from megazero.library.adopted.mesh import default_group

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
    mesh, buffers = mesh_and_buffers(None, LimitConfig())
    assert (mesh.axis("dp").size, mesh.rank, buffers.buffer_bytes) == (1, 0, 0)
    assert not dist.is_initialized()


def limit_of(communicator: Any) -> float:
    group = communicator._inner._group
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def joined(rank: int) -> list[tuple[int, int]]:
    given = mesh_in_worker(rank, dp=2)
    foreign = SimpleNamespace(get_data_parallel_group=lambda: dist.group.WORLD)
    meshes = [mesh_and_buffers(mesh, LimitConfig())[0] for mesh in (None, foreign, given)]
    assert meshes[-1] is given
    default = default_group(torch.device("cpu"))
    assert default is not None
    limits = [default.limit_seconds, *(limit_of(mesh.gathering) for mesh in meshes[:2])]
    assert len(set(limits)) == 1, "groups made beside the default group have its time limit"
    mesh_and_buffers(None, LimitConfig(distributed_timeout_seconds_after_init=default.limit_seconds))
    with pytest.raises(UsageError, match="180 s for a collective, where the processes have joined with"):
        mesh_and_buffers(None, LimitConfig(distributed_timeout_minutes=3))
    return [(mesh.axis("dp").size, mesh.axis("dp").rank) for mesh in meshes]


@pytest.mark.gloo
def test_joined_already() -> None:
    assert run_ranks(2, joined) == [[(2, rank)] * 3 for rank in range(2)]
