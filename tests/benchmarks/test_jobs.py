"""Tests of the jobs of benchmarks: processes join those of their own job, and the failure of one ends all."""

import time

import pytest
from jobs import run_job, run_jobs, run_on_cluster
from nodes import Cluster, obstacle
from support.benchmark_jobs import PROBLEM, fail, together, who

from megazero.errors import ConfigError


@pytest.mark.gloo
def test_processes_meet_those_of_their_own_job() -> None:
    assert run_jobs(2, 2, who, "x", device="cpu") == [[("x", [0, 1])] * 2] * 2
    assert run_job(3, who, "y", device="cpu") == [("y", [0, 1, 2])] * 3


@pytest.mark.gloo
def test_processes_of_nodes_meet_over_their_links() -> None:
    if reason := obstacle():
        pytest.skip(f"no emulated cluster: {reason}")
    with Cluster(2) as cluster:
        before = cluster.sent_bytes()
        assert run_on_cluster(cluster, who, "x") == [("x", [0, 1])] * 2
        assert all(now > then for now, then in zip(cluster.sent_bytes(), before, strict=True))


@pytest.mark.gloo
def test_one_process_is_a_job() -> None:
    assert run_jobs(3, 1, who, "z", device="cpu") == [[("z", [0])]] * 3


@pytest.mark.gloo
def test_jobs_side_by_side_wait_for_each_other() -> None:
    (first,), (second,) = run_jobs(2, 1, together, 0.5, device="cpu")
    assert second > 0.2 > first


@pytest.mark.gloo
def test_a_users_error_ends_the_job_and_comes_out_as_it_was() -> None:
    start = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        run_job(3, fail, 1, "user", device="cpu")
    assert caught.value.problems == (PROBLEM, PROBLEM)
    assert time.monotonic() - start < 60


@pytest.mark.gloo
@pytest.mark.parametrize(("how", "told"), [("bug", "KeyError: 'a bug'"), ("death", "died without a word")])
def test_any_other_failure_is_told_with_its_process(how: str, told: str) -> None:
    with pytest.raises(RuntimeError, match="process 1 of 2 failed") as caught:
        run_job(2, fail, 1, how, device="cpu")
    assert told in str(caught.value)
