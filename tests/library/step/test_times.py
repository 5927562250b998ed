"""A rank that is slow around a module of the user's is named on every job of several CPU processes, with the part."""

import io
import re
import time
from contextlib import redirect_stderr

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import nn

import megazero
from megazero.report.stragglers import STEPS

SECONDS = 0.06  # far more than a step takes


def lines_of(rank: int, slow_part: str) -> str:
    """Return what this rank prints while rank 1 loads or computes slowly, until it is named, or for 100 steps."""
    model, mesh = nn.Linear(3, 1), mesh_in_worker(rank, dp=2)
    engine = megazero.initialize(model, {"optimizer": {"type": "SGD", "lr": 0.1}}, mesh=mesh)
    printed = io.StringIO()
    with redirect_stderr(printed):
        while engine.global_steps < 5 * STEPS and not engine.stop_requested():
            time.sleep(SECONDS * (rank == 1 and slow_part == "data"))
            loss = engine(torch.ones(2, 3)).mean()
            time.sleep(SECONDS * (rank == 1 and slow_part == "computing"))
            engine.backward(loss)
            engine.step(stop=bool(printed.getvalue()))
    engine.close()
    return printed.getvalue()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("slow_part", "words"),
    [("data", "what the program does between a step and the next forward"), ("computing", "forward, backward and")],
)
def test_a_slow_rank_is_named_once_with_the_part(slow_part: str, words: str) -> None:
    mine, other = run_ranks(2, lines_of, slow_part)
    (line,) = mine.splitlines()
    assert re.match(r"iteration \d+: rank 1 on ", line) and "is slow: " in line and f"spent on {words}" in line
    assert other == ""
