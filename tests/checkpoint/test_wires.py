"""Tests that runs whose messages are quantized resume bitwise at their layout, and say what they lose at another."""

import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import nn

import megazero
from megazero.checkpoint.reader import open_checkpoint
from megazero.checkpoint.wires import largest_wire_bytes
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.state.checkpoints import Loading
from megazero.parallel.nodes import Nodes

WIDTH, BEFORE, AFTER = 24, 3, 4
GRADIENTS = {"zero_quantized_gradients": True, "zero_quantized_block_size": 32}
FED = {**GRADIENTS, "zero_error_feedback": True, "zero_error_feedback_reset": 5}
RANDOM = {"zero_quantized_stochastic": True}


class Case(NamedTuple):
    """A stage with these settings on so many nodes of as many ranks."""

    stage: int
    zero: dict[str, Any]
    nodes: tuple[int, ...] = (2, 2)


CASES = (
    Case(1, FED),
    Case(2, {**FED, **RANDOM}),
    Case(3, {**FED, **RANDOM, "zero_quantized_weights": True}),
    Case(3, {**RANDOM, "zero_quantized_weights": True, "zero_hpz_partition_size": 2}),
    Case(2, {**FED, "mics_shard_size": 2}),
    Case(2, FED, (3,)),
    Case(2, FED, (1, 1, 1)),
)


def engine_of(rank: int, case: Case) -> DataParallelEngine:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    zero = {"zero_stage": case.stage, "reduce_bucket_size": 1000, **case.zero}
    per_node = case.nodes[0]
    job = {"RANK": rank, "WORLD_SIZE": sum(case.nodes), "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    with patch.dict(os.environ, {name: str(value) for name, value in job.items()}):
        mesh = mesh_in_worker(rank, dp=sum(case.nodes), nodes=Nodes(case.nodes))
        return megazero.initialize(model, {"zero": zero, "optimizer": {"type": "AdamW", "lr": 0.01}}, mesh=mesh)


def train(engine: DataParallelEngine, first: int, steps: int) -> list[float]:
    """Return this rank's loss of each step."""
    found = []
    for step in range(first, first + steps):
        seed = 100 * step + engine.mesh.rank
        loss = (engine(torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))) - 0.5).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def saved_bytes(folder: Path, rank: int) -> int:
    tensors = open_checkpoint(folder).manifest.tensors
    return sum(entry.shape[0] for entry in tensors if entry.parameter.startswith(f"wires.{rank}.errors."))


def straight_and_resumed(rank: int, case: Case, folder: str) -> tuple[list[float], list[float], int, int]:
    """Return losses after a save and after loading it, the bytes of errors saved, and those that were foretold."""
    engine = engine_of(rank, case)
    foretold = largest_wire_bytes(engine.zero_engine)
    train(engine, 0, BEFORE)
    engine.save_checkpoint(folder)
    straight = train(engine, BEFORE, AFTER)
    engine.close()
    engine = engine_of(rank, case)
    train(engine, 50, 1)  # whose errors and draws loading forgets
    engine.load_checkpoint(folder)
    resumed = train(engine, BEFORE, AFTER)
    engine.close()
    return straight, resumed, saved_bytes(Path(folder), rank), foretold


@pytest.mark.gloo
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"stage {case.stage}, {case.nodes}, {' '.join(case.zero)}")
def test_a_run_resumes_bitwise(case: Case, tmp_path: Path) -> None:
    for straight, resumed, saved, foretold in run_ranks(sum(case.nodes), straight_and_resumed, case, str(tmp_path)):
        assert straight == resumed
        assert saved == foretold and bool(saved) == ("zero_error_feedback" in case.zero)


def loaded_elsewhere(rank: int, saving: Case, loading: list[Case], folder: str) -> list[tuple[str, ...]]:
    """Return the lines of loading a checkpoint with each of these cases."""
    engine = engine_of(rank, saving)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    engine.close()
    found = []
    for case in loading:
        engine = engine_of(rank, case)
        loaded = engine._checkpoints.load(Path(folder), None, Loading())
        assert loaded is not None
        train(engine, 2, 1)
        found.append(tuple(loaded.warnings()))
        engine.close()
    return found


@pytest.mark.gloo
def test_another_layout_begins_anew_with_a_notice(tmp_path: Path) -> None:
    saving = Case(2, FED)
    others = [
        Case(2, FED, (4,)),
        Case(2, FED, (1, 1, 1, 1)),
        Case(2, {**FED, "zero_quantized_block_size": 64}),
        Case(2, {**FED, "reduce_bucket_size": 500}),
        Case(2, {**FED, **RANDOM}),
    ]
    quiet = [saving, Case(2, GRADIENTS), Case(2, {}), Case(1, FED)]
    for lines in run_ranks(4, loaded_elsewhere, saving, [*others, *quiet], str(tmp_path)):
        for case, line in zip(others, lines, strict=False):
            assert len(line) == 1 and "another layout; errors that are fed back begin at zero" in line[0], case
        assert lines[len(others) :] == [(), (), (), ()], "the stage decides nothing of what is rounded off"


@pytest.mark.gloo
def test_errors_may_be_left_out(tmp_path: Path) -> None:
    left_out = Case(2, {**FED, "zero_error_feedback_saved": False})
    for lines in run_ranks(4, loaded_elsewhere, left_out, [left_out, Case(2, FED)], str(tmp_path)):
        assert all("the state of quantized messages has none" in line for (line,) in lines)
    assert {entry.kind for entry in open_checkpoint(tmp_path).manifest.tensors} == {"weight", "exp_avg", "exp_avg_sq"}
