"""Tests of the abort of a failed rank's communicators; `test_monitor.py` has it in a job."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.testing._internal.distributed.fake_pg import FakeStore

from megazero.comm.faults import abort
from megazero.comm.faults.abort import abort_groups, uses_nccl


@pytest.fixture
def groups() -> Iterator[None]:
    """Two fake process groups, the default one and another."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    dist.new_group([0])
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("configuration", "expected"), [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True)])
def test_one_group_of_nccl_is_enough(
    groups: None, configuration: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not uses_nccl()
    *_, last = _world.pg_backend_config
    monkeypatch.setitem(_world.pg_backend_config, last, configuration)
    assert uses_nccl() is expected


def test_groups_are_gone_after_an_abort(groups: None) -> None:
    assert abort_groups(10.0)
    assert not dist.is_initialized() and not _world.pg_map
    assert abort_groups(10.0), "nothing is left to abort"
    assert not uses_nccl()


def test_an_abort_that_fails_is_over(groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(abort, "_abort_process_group", fail)
    assert abort_groups(10.0)


def test_an_abort_that_hangs_is_left_at_the_limit(groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(abort, "_abort_process_group", never.wait)
    began = time.monotonic()
    assert not abort_groups(0.1)
    assert time.monotonic() - began < 5.0
    never.set()
