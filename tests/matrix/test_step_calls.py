"""Tests of the Python calls of the library's step, counted: how many a block of the model adds, by stage."""

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero

RANKS, WIDTH = 2, 16
PACKAGE = str(Path(megazero.__file__).parent)


class Block(nn.Module):
    """A block of six parameters, of which autograd saves four, with four other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Calls:
    """A profile hook that counts calls of the package's functions; a generator counts each time it is resumed.

    What is called for a message that has not come yet is left out: which rank comes first differs from run to run.
    """

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        is_wait = code.co_name in ("_wait_for_one", "wait_for_one")
        self.number += event == "call" and code.co_filename.startswith(PACKAGE) and not is_wait


def calls_of_a_block(rank: int, stage: int) -> float:
    """Return the calls that a block adds to a step whose order of uses is recorded."""
    few, many = (calls_of_a_step(rank, stage, number) for number in (2, 4))
    return (many - few) / 2


def calls_of_a_step(rank: int, stage: int, num_blocks: int) -> int:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block() for _ in range(num_blocks)))
    config = {"zero": {"zero_stage": stage}, "optimizer": {"type": "AdamW", "lr": 0.01}}
    engine = megazero.initialize(model, config, mesh=mesh_in_worker(rank, dp=RANKS, is_late=False))
    counted = Calls()
    for step in range(3):
        if step == 2:
            sys.setprofile(counted)
        try:
            engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
            engine.step()
        finally:
            sys.setprofile(None)
    engine.close()
    return counted.number


@pytest.mark.gloo
@each("stage, most", [(1, 93), (2, 63), (3, 360)])
def test_calls_of_a_block(stage: int, most: int) -> None:
    """Stage 3 gathers a block twice, and catches what autograd saves of it; the others have no such work."""
    found = run_ranks(RANKS, calls_of_a_block, stage)
    assert max(found) <= most, f"{found} calls on the ranks"
