"""Tests of saving beside training: the state of a step is saved, on all ranks or on none, and errors arrive."""

import resource
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.checkpoint.background import BackgroundSave, host_copies
from megazero.checkpoint.comparison import NONE, box_differences, metadata_differences
from megazero.checkpoint.folders import list_steps
from megazero.checkpoint.reader import open_checkpoint
from megazero.checkpoint.writer import Draft, save
from megazero.comm.local import LocalCommunicator
from megazero.comm.metered import Meter
from megazero.errors import CheckpointError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.memory.ledger_interface import NullLedger
from megazero.parallel.param_spec import ParamSpec, StateFragment

WIDTH, RANKS = 6, 2


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Let threads that save begin only when the event is set, or at the end."""
    begins = threading.Event()

    def save_then(*arguments: Any, **options: Any) -> Path:
        assert begins.wait(60)
        return save(*arguments, **options)

    with patch("megazero.checkpoint.background.save", save_then):
        try:
            yield begins
        finally:
            begins.set()


@contextmanager
def full_disk() -> Iterator[None]:
    """Let files of this process grow to no more than 50 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fragments(values: Tensor) -> list[StateFragment]:
    spec = ParamSpec("w", (4,), (4,), (0,))
    return [StateFragment(spec, "weight", 0, 4, values)]


def test_the_copy_is_saved_and_what_is_held_is_held_until_then(tmp_path: Path) -> None:
    state, ended = torch.arange(4.0), threading.Event()
    background = BackgroundSave(LocalCommunicator(), Meter())
    held = ExitStack()
    held.callback(ended.set)
    with held_back() as begins:
        copies = host_copies(fragments(state), NullLedger())
        future = background.begin(Draft(tmp_path, 1, {}, ""), copies, held)
        state.add_(100)
        assert background.is_under_way and not background.is_done and not ended.is_set()
        begins.set()
        assert background.finish() == future.result() == tmp_path / "step_0000001"
    assert ended.is_set() and not background.is_under_way and background.finish() is None
    assert open_checkpoint(tmp_path).read_full("w", "weight").tolist() == [0, 1, 2, 3]


def test_what_fails_is_raised_once_and_what_is_held_is_released(tmp_path: Path) -> None:
    background, ended = BackgroundSave(LocalCommunicator(), Meter()), threading.Event()
    held = ExitStack()
    with full_disk():
        future = background.begin(Draft(tmp_path, 1, {}, ""), fragments(torch.ones(4)), ExitStack())
        assert isinstance(future.exception(), CheckpointError)
    assert background.is_done and background.has_failed
    held.callback(ended.set)
    background.release_behind(held)
    assert ended.is_set()
    with pytest.raises(CheckpointError, match="File too large"):
        background.finish()
    assert not background.has_failed and background.finish() is None
    assert list_steps(tmp_path) == [] and not list(tmp_path.glob(".step*"))


def engine_of(rank: int, stage: int, seed: int = 1) -> DataParallelEngine:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 20},
        "precision": {"precision": "bf16"},
        "optimizer": {"type": "AdamW", "lr": 0.05},
    }
    return megazero.initialize(model, config, mesh=mesh_in_worker(rank, dp=RANKS))


def train(engine: DataParallelEngine, rank: int, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(RANKS * step + rank)).bfloat16()
        engine.backward(engine(x).float().square().mean())
        engine.step()


def saved_beside(rank: int, root: Path, stage: int) -> str:
    """Save step 2 at once and beside steps 3 and 4, then step 4; resume, and save step 4 again."""
    engine = engine_of(rank, stage)
    train(engine, rank, 0, 2)
    engine.save_checkpoint(root / "waited", client_state={"epoch": 1})
    with held_back() as begins:
        future: Future[Path] = engine.async_save_checkpoint(root / "beside", client_state={"epoch": 1})
        train(engine, rank, 2, 2)
        assert not future.done()
        begins.set()
        engine.save_checkpoint(root / "end")  # which waits for the other one
        assert future.done()
    resumed = engine_of(rank, stage, seed=2)
    resumed.load_checkpoint(root / "beside")
    train(resumed, rank, 2, 2)
    resumed.async_save_checkpoint(root / "resumed").result()
    for each in (engine, resumed):
        each.close()
    return future.result().name


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_state_of_the_step_is_saved_while_training_goes_on(stage: int, tmp_path: Path) -> None:
    assert run_ranks(RANKS, saved_beside, tmp_path, stage) == ["step_0000002"] * RANKS
    for one, other in (("waited", "beside"), ("end", "resumed")):
        first, second = (open_checkpoint(tmp_path / name) for name in (one, other))
        assert list(metadata_differences(first, second)) == []
        assert {found for _, found in box_differences(first, second)} == {NONE}
    assert sorted(path.name for path in (tmp_path / "beside").iterdir()) == ["latest", "run.json", "step_0000002"]


def fails_beside(rank: int, root: Path, stage: int) -> tuple[str, int]:
    """Save step 1, and step 2 beside training with a full disk on rank 1; return the error and the step it ended."""
    engine = engine_of(rank, stage)
    train(engine, rank, 0, 1)
    engine.save_checkpoint(root)
    train(engine, rank, 1, 1)
    with full_disk() if rank == 1 else ExitStack():
        future = engine.async_save_checkpoint(root)
        assert isinstance(future.exception(), CheckpointError)
    try:
        for step in range(2, 6):
            train(engine, rank, step, 1)
    except CheckpointError as error:
        failed_at = engine.global_steps
        train(engine, rank, failed_at, 1)  # the engine goes on if the program does
        engine.async_save_checkpoint(root).result()
        return str(error), failed_at
    finally:
        engine.close()
    return "", 0


@pytest.mark.gloo
def test_an_error_on_one_rank_is_that_of_the_next_step_on_all(tmp_path: Path) -> None:
    told = run_ranks(RANKS, fails_beside, tmp_path, 2)
    assert told[0] == told[1] and told[0][1] == 3
    assert "rank 1: " in told[0][0] and "File too large" in told[0][0]
    assert [folder.step for folder in list_steps(tmp_path)] == [1, 4]
