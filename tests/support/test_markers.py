"""Tests of the markers in tests/conftest.py: a test without one is pure, and may not start process groups."""

import multiprocessing
import subprocess
import sys

import pytest
import torch.distributed as dist
from support.processes import run_ranks


def rank(rank: int) -> int:
    return rank


def test_a_test_without_a_marker_is_pure(request: pytest.FixtureRequest) -> None:
    assert [marker.name for marker in request.node.iter_markers()] == ["pure"]


@pytest.mark.gloo
def test_a_test_of_ranks_is_not(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("pure") is None
    assert run_ranks(1, rank) == [0]


def test_process_groups_are_refused_in_a_pure_test() -> None:
    with pytest.raises(pytest.fail.Exception, match="to be marked gloo"):
        run_ranks(1, rank)
    with pytest.raises(pytest.fail.Exception, match="to be marked gloo"):
        dist.TCPStore("127.0.0.1", 0, is_master=True)
    with pytest.raises(pytest.fail.Exception, match="to be marked gloo"):
        multiprocessing.get_context("forkserver").Process(target=rank, args=(0,)).start()
    with pytest.raises(pytest.fail.Exception, match="to be marked gloo"):
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--help"], check=True)
