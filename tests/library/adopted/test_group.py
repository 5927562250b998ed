"""Tests communicators over groups that exist already, and over groups that have to be joined first."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.launch import run_script, set_launcher
from support.processes import run_ranks

from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.errors import TopologyError
from megazero.library.adopted.group import adopt_group, own_device


def test_one_process_needs_no_group() -> None:
    assert isinstance(adopt_group(), LocalCommunicator)
    assert own_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert not dist.is_initialized()


def test_several_processes_need_a_meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    set_launcher(monkeypatch, rank=1, world_size=2)
    with pytest.raises(TopologyError, match="MASTER_ADDR"):
        adopt_group()


def figures(communicator: Communicator) -> list[float]:
    """Return what collectives make of (axis rank + 1): gathered, reduce-scattered, summed, broadcast from the last."""
    mine = torch.tensor([communicator.rank + 1.0])
    gathered = torch.empty(communicator.size)
    communicator.all_gather_into(gathered, mine).wait()
    slices, scattered = mine.repeat(communicator.size), torch.empty(1)
    communicator.reduce_scatter_into(scattered, slices).wait()
    summed, last = mine.clone(), mine.clone()
    communicator.all_reduce(summed).wait()
    communicator.broadcast(last, communicator.size - 1).wait()
    return [*gathered.tolist(), scattered.item(), summed.item(), last.item()]


def collectives(rank: int) -> tuple[list[float], list[float], str]:
    first_two, alone = dist.new_group([0, 1]), dist.new_group([2])
    mine = alone if rank == 2 else first_two
    refusal = ""
    try:
        adopt_group(first_two if rank == 2 else alone)
    except TopologyError as error:
        refusal = str(error)
    assert isinstance(adopt_group(mine), LocalCommunicator) == (rank == 2)
    assert own_device() == torch.device("cpu")
    return figures(adopt_group()), figures(adopt_group(mine)), refusal


@pytest.mark.gloo
def test_groups_that_are_there() -> None:
    pair, single = [1.0, 2.0, 3.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0]
    for rank, (over_all, over_mine, refusal) in enumerate(run_ranks(3, collectives)):
        assert over_all == [1.0, 2.0, 3.0, 6.0, 6.0, 3.0]
        assert over_mine == (single if rank == 2 else pair)
        assert f"a group of ranks {[0, 1] if rank == 2 else [2]} on rank {rank}" in refusal


PROGRAM = """
import os
import torch
import megazero
from megazero.library.adopted.group import adopt_group
from megazero.library.adopted.mesh import default_group
megazero.zero.Init(config={"limits": {"distributed_timeout_seconds_after_init": 77}})
limit = default_group(torch.device("cpu")).limit_seconds
communicator = adopt_group()
total = torch.tensor([communicator.rank + 1.0])
communicator.all_reduce(total).wait()
with open(f"{communicator.rank}.txt", "w") as file:
    file.write(f"{communicator.size} {total.item()} {limit}")
communicator.barrier()
os._exit(0)  # threads of gloo may still be at work, and their end is not what this is about
"""


@pytest.mark.gloo
def test_processes_of_a_launcher_join(tmp_path: Path) -> None:
    run_script(PROGRAM, ranks=2, folder=tmp_path)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["2 3.0 77.0"] * 2
