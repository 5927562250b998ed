"""Tests of the pool of ranks: results come in rank order, failures and hangs are reported, and the next call works."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from support.processes import RankFailure, mesh_in_worker, run_ranks

pytestmark = pytest.mark.gloo


def add_ranks(rank: int, base: torch.Tensor) -> torch.Tensor:
    total = base + rank
    dist.all_reduce(total)
    return total


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("only rank one")


def die_on_zero(rank: int) -> None:
    if rank == 0:
        os._exit(7)


def sleep_on_one(rank: int) -> None:
    if rank == 1:
        time.sleep(30)


def coordinates(rank: int) -> tuple[int, int]:
    mesh = mesh_in_worker(rank, tp=2, dp=2)
    return mesh.coordinate("tp"), mesh.coordinate("dp")


def test_every_rank_answers_with_its_result() -> None:
    results = run_ranks(2, add_ranks, torch.ones(3))
    assert [result.tolist() for result in results] == [[3.0] * 3] * 2


def test_mesh_in_worker_has_the_layout_asked_for() -> None:
    assert run_ranks(4, coordinates) == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (fail_on_one, r"rank 1 of 2 raised:(.|\n)*ValueError: only rank one"),
        (die_on_zero, r"rank 0 of 2: process died with exit code 7"),
        (sleep_on_one, r"rank 1 of 2: no answer; stacks:\n(.|\n)*sleep_on_one"),
    ],
)
def test_failure_names_rank_and_cause_and_the_next_call_works(fn, message) -> None:
    run_ranks(2, add_ranks, torch.zeros(1))  # starts the pool, so that the timeout is not spent on that
    with pytest.raises(RankFailure, match=message):
        run_ranks(2, fn, timeout=3.0 if fn is sleep_on_one else 20.0)
    assert run_ranks(2, add_ranks, torch.zeros(1)) == [torch.ones(1)] * 2
