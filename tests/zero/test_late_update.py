"""Tests of updates that run beside the next step: each gradient changes the weights of the step after the next one."""

import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.late_copies import late_copies
from support.processes import run_ranks
from support.reference import History
from support.training import Cell, Outcome, deviation, reference_history, train_on_rank, write_text_corpus

from megazero.optim.inner import FusedAdamW
from megazero.zero.late_update import LateUpdate
from megazero.zero.layout import Bucket

BOUND = 1e-9
AT_ONCE, STEPS = 2, 7
LATE = {"delayed_parameter_update": True, "delayed_parameter_update_start": AT_ONCE}
HOST = {**LATE, "offload_optimizer": "cpu"}
FILES = {**LATE, "offload_optimizer": "nvme", "sub_group_size": 2000}
CELLS = (
    Cell(steps=STEPS, dp=2, stage=1, settings=HOST),
    Cell(steps=STEPS, dp=2, stage=2, accumulation=2, settings=HOST),
    Cell(steps=STEPS, dp=2, stage=2, settings={**FILES, "offload_buffer_count": 3}),
    Cell(steps=STEPS, tp=2, dp=2, stage=3, settings={**HOST, "offload_param": "cpu", "sequence_parallel": True}),
    Cell(steps=STEPS, pp=2, dp=2, stage=1, accumulation=4, settings=HOST),
    Cell(steps=STEPS, dp=1, stage=3, accumulation=2, settings={**FILES, "offload_param": "nvme"}),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def late(corpus: str) -> History:
    return reference_history(corpus, STEPS, late_from=AT_ONCE)


def train_late(rank: int, cell: Cell, prefix: str) -> Outcome:
    folder = {"nvme_path": str(Path(prefix).parent)} if "nvme" in cell.settings.values() else {}
    update = FusedAdamW.update
    pause = 0.002 if folder else 0.01  # states in files are updated in many small parts

    def slow(*args: Any, **options: Any) -> None:
        time.sleep(pause)  # so that the next backward reaches its buckets first
        update(*args, **options)

    with late_copies(), patch.object(FusedAdamW, "update", slow):
        return train_on_rank(rank, cell.with_settings(folder), prefix)


@pytest.mark.gloo
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_layout_is_one_step_late(cell: Cell, corpus: str, late: History) -> None:
    assert deviation(run_ranks(cell.world_size, train_late, cell, corpus), late).worst < BOUND


@pytest.mark.gloo
def test_a_gather_of_buckets_some_of_which_are_late(corpus: str) -> None:
    """What the device has is updated at once, and its neighbours in the gather, which the host has, a step late."""
    mixed = {**HOST, "offload_optimizer_ratio": 0.5, "reduce_bucket_size": 6000}
    cells = [
        Cell(steps=STEPS, dp=2, stage=2, settings={**mixed, **most}) for most in ({}, {"allgather_bucket_size": 10**9})
    ]
    apart, together = (run_ranks(2, train_late, cell, corpus) for cell in cells)
    assert [run.losses for run in together] == [run.losses for run in apart]
    assert together[0].comm_bytes == apart[0].comm_bytes


def test_the_reference_of_late_updates_is_another_one(corpus: str, late: History) -> None:
    exact = reference_history(corpus, STEPS)
    assert exact.losses[: AT_ONCE + 1] == late.losses[: AT_ONCE + 1]
    assert late.losses[AT_ONCE + 1] == pytest.approx(exact.losses[AT_ONCE + 1], rel=0.2)
    assert abs(late.losses[AT_ONCE + 1] - exact.losses[AT_ONCE + 1]) > 1e3 * BOUND


def bucket(index: int) -> Bucket:
    return Bucket(index, 0, 0, 16, 1, {})


def test_tasks_run_in_order_beside_their_caller() -> None:
    update, gate, done = LateUpdate(), threading.Event(), []
    threads = torch.get_num_threads()

    def task(index: int) -> None:
        if index == 1:
            gate.wait()
        assert not torch.is_grad_enabled() and torch.get_num_threads() == threads
        done.append(index)

    update.begin((bucket(index), lambda index=index: task(index)) for index in (2, 1, 0))
    update.wait_for(bucket(2))
    update.wait_for(bucket(7))  # which has no task
    time.sleep(0.01)
    assert done == [2]
    gate.set()
    update.finish()
    assert done == [2, 1, 0] and update.unpublished == {2, 1, 0}
    update.close()


@pytest.mark.parametrize("waits", [lambda update: update.finish(), lambda update: update.wait_for(bucket(1))])
def test_a_failed_task_is_the_last(waits: Any) -> None:
    update, done = LateUpdate(), []

    def fail() -> None:
        raise OSError(28, "No space left on device")

    update.begin([(bucket(0), lambda: done.append(0)), (bucket(1), fail), (bucket(2), lambda: done.append(2))])
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            waits(update)
    update.close()
    assert done == [0]
