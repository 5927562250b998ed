"""Runs two ranks that make different collective calls, and writes each rank's outcomes as lines of JSON.

torchrun --nproc-per-node=2 diverging_ranks.py FOLDER

Each rank writes a file of its own in FOLDER.  Every case has its own process groups, whose collectives give up after
TIMEOUT_SECONDS.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.irregular_model import Awkward, engine_around, make_model
from torch import Tensor, nn

from megazero.comm.startup import join, make_mesh
from megazero.errors import CollectiveError
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology
from megazero.zero.parameters.gathered import GatheredParameters

TIMEOUT_SECONDS = 2.0
CPU = torch.device("cpu")


def block_on_rank_0(rank: int, model: Awkward) -> None:
    if rank == 0:
        with GatheredParameters(model.first.weight):
            raise AssertionError("the block was entered alone")


def module_on_rank_0(rank: int, model: Awkward) -> None:
    if rank == 0:
        model.first(torch.ones(1, 7, dtype=torch.float64))


def touch_on_rank_0(rank: int, model: Awkward) -> None:
    """Read a parameter of another module on rank 0 alone, inside the forward of a module that both ranks call."""

    def use(*_: Any) -> None:
        model.first.bias.sum()

    if rank == 0:
        model.unused.register_forward_pre_hook(use)
    model.unused(torch.ones(1, 5, dtype=torch.float64))


def backward_on_rank_0(rank: int, model: Awkward) -> None:
    x = torch.ones(1, 7, dtype=torch.float64, requires_grad=True)
    loss: Tensor = model.unused(model.first(x)[:, :5]).sum()
    if rank == 0:
        loss.backward()


def rank_1_is_gone(rank: int, model: Awkward) -> None:
    if rank == 1:
        time.sleep(0.5)  # rank 0 may still be in the barrier
        os._exit(0)
    with GatheredParameters(model.first.weight):
        raise AssertionError("the block was entered alone")


class Route(nn.Module):
    """A model in which each rank computes with an expert of its own."""

    def __init__(self, rank: int, widths: tuple[int, int]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, width, bias=False) for width in widths)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts[self.rank](x)
        return y.sum()


def experts_of_one_size(rank: int, model: nn.Module) -> None:
    model(torch.ones(1, 7, dtype=torch.float64))


def experts_of_two_sizes(rank: int, model: nn.Module) -> None:
    model(torch.ones(1, 7, dtype=torch.float64))


def experts_after_a_pass(rank: int, model: nn.Module) -> None:
    """Go wrong in the second pass, in which units are gathered ahead of their use."""
    assert isinstance(model, Route)
    model.rank = 0
    for own in (0, rank):
        model.rank = own
        with torch.no_grad():
            model(torch.ones(1, 7, dtype=torch.float64))


def another_call_after_that(rank: int, model: nn.Module) -> None:
    """Go on after the error: nothing is gathered any more."""
    for _ in range(2):
        try:
            model(torch.ones(1, 7, dtype=torch.float64))
        except CollectiveError as error:
            first = error
    raise first


CASES = (
    block_on_rank_0,
    module_on_rank_0,
    touch_on_rank_0,
    backward_on_rank_0,
    experts_of_one_size,
    experts_of_two_sizes,
    experts_after_a_pass,
    another_call_after_that,
    rank_1_is_gone,
)
ROUTES = {
    "experts_of_one_size": (5, 5),
    "experts_of_two_sizes": (5, 40),
    "experts_after_a_pass": (5, 40),
    "another_call_after_that": (5, 5),
}


def main(folder: Path) -> None:
    launch = Launch.from_environment()
    join(launch, backend="gloo", device=CPU, timeout_minutes=1)
    for case in CASES:
        dist.barrier()
        buffers = FusedBuffers(1 << 20, CPU)
        mesh = make_mesh(Topology(dp=2), launch.rank, CPU, buffers, timeout_minutes=TIMEOUT_SECONDS / 60)
        widths = ROUTES.get(case.__name__)
        model: Any = Route(launch.rank, widths).double() if widths else make_model()
        engine = engine_around(model, mesh, serves_user_code=True)
        engine.begin_step()
        dist.barrier()
        outcome = {"case": case.__name__, "rank": launch.rank, "error": "", "text": ""}
        start = time.monotonic()
        with warnings.catch_warnings(record=True) as warned:
            try:
                case(launch.rank, model)
                mesh.axis("dp").barrier()  # the other rank waits here meanwhile
            except Exception as error:
                outcome |= {"error": type(error).__name__, "text": str(error)}
        outcome["warnings"] = [str(warning.message) for warning in warned]
        with (folder / f"rank_{launch.rank}").open("a") as file:
            file.write(json.dumps(outcome | {"seconds": time.monotonic() - start}) + "\n")
    os._exit(0)  # skip torch's shutdown, since the other rank has exited


if __name__ == "__main__":
    main(Path(sys.argv[1]))
