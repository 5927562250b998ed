"""Tests a process that generates alone; tests/tools/test_generate_text.py starts real jobs of several processes."""

import pytest
import torch
import torch.distributed as dist
from support.launch import set_launcher
from support.models import CPU

from megazero.errors import CheckpointError, TopologyError
from megazero.generate.job import joined
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology

ALONE = Launch(rank=0, world_size=1, local_rank=0)


def test_a_process_alone_makes_no_group() -> None:
    with joined(ALONE, Topology(), CPU, timeout_minutes=1) as mesh:
        assert not dist.is_initialized()
        assert (mesh.world.size, mesh.rank, mesh.device) == (1, 0, torch.device("cpu"))


def test_errors_of_a_process_alone_go_on_as_they_are() -> None:
    with pytest.raises(CheckpointError, match="damaged"), joined(ALONE, Topology(), CPU, timeout_minutes=1):
        raise CheckpointError("damaged")


def test_several_need_a_meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    set_launcher(monkeypatch, world_size=2)
    launch = Launch.from_environment()
    with (
        pytest.raises(TopologyError, match="MASTER_ADDR"),
        joined(launch, Topology(pp=2), CPU, timeout_minutes=1),
    ):
        raise AssertionError("nobody to meet")
    assert not dist.is_initialized()
