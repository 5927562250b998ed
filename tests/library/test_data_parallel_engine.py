"""Tests the engine around models of many kinds, in every ZeRO stage, against plain PyTorch in float64."""

import os
import signal
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from support.any_models import CASES, History, inputs_of, make, train_plain
from support.processes import mesh_in_worker, run_ranks

import megazero
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.zero.parameters.gathered import GatheredParameters

STEPS = 3
CLIP = 0.05
OPTIMIZER = {"type": "AdamW", "lr": 1e-2, "params": {"weight_decay": 0.1}}


@dataclass(frozen=True)
class Options:
    """The settings with which a case is trained; `plain` calls loss.backward() instead of engine.backward(loss)."""

    stage: int
    dp: int = 1
    accumulation: int = 1
    plain: bool = False
    zero: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        return {
            "zero": {"zero_stage": self.stage, "reduce_bucket_size": 200, **self.zero},
            "precision": {"precision": "fp64"},
            "optimizer": OPTIMIZER,
            "gradient_clipping": CLIP,
            "gradient_accumulation_steps": self.accumulation,
        }


def train(rank: int, name: str, options: Options) -> History:
    """Train some steps on this rank's share, with an evaluation between them, and return the history."""
    model = make(name)
    engine = megazero.initialize(model, options.config(), mesh=mesh_in_worker(rank, dp=options.dp))
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(train_step(engine, rank, name, step, options))
        norm = engine.get_global_grad_norm()
        assert norm is not None
        norms.append(norm)
        evaluate(engine, name, step)
    assert (engine.zero_engine.gathered_numel[1] > 0) == (options.stage == 3)
    with GatheredParameters(model):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.close()
    return History(losses, norms, weights)


def train_step(engine: DataParallelEngine, rank: int, name: str, step: int, options: Options) -> float:
    shares = [x.chunk(options.dp * options.accumulation) for x in inputs_of(name, step)]
    total = 0.0
    for micro in range(options.accumulation):
        part = [share[micro * options.dp + rank] for share in shares]
        loss = CASES[name].loss(engine, step, *part)
        total += loss.item() / options.accumulation
        if options.plain:
            loss.backward()
        else:
            engine.backward(loss)
        assert engine.is_gradient_accumulation_boundary() == (micro + 1 == options.accumulation)
        engine.step()
    assert engine.was_step_applied()
    return total


def evaluate(engine: DataParallelEngine, name: str, step: int) -> None:
    before = engine.zero_engine.gathered_numel[0]
    engine.eval()
    with torch.no_grad():
        CASES[name].loss(engine, step, *inputs_of(name, step))
    engine.train()
    engine.empty_partition_cache()
    assert before == engine.zero_engine.gathered_numel[0] == 0


@cache
def reference(name: str) -> History:
    return train_plain(name, STEPS, clip=CLIP)


def check(name: str, options: Options) -> None:
    runs: list[History] = run_ranks(options.dp, train, name, options)
    expected = reference(name)
    losses = torch.tensor([run.losses for run in runs], dtype=torch.float64).mean(0).tolist()
    torch.testing.assert_close(losses, expected.losses, rtol=1e-9, atol=0)
    for run in runs:
        torch.testing.assert_close(run.norms, expected.norms, rtol=1e-9, atol=0)
        assert run.weights.keys() == expected.weights.keys()
        for key, value in expected.weights.items():
            torch.testing.assert_close(run.weights[key], value, rtol=1e-9, atol=1e-9, msg=f"{key} of {name}")


@pytest.mark.gloo
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", CASES)
def test_models_train_as_in_plain_torch(name: str, stage: int) -> None:
    if stage in (0, 3):  # one process has nothing to share out in the others
        check(name, Options(stage))
    check(name, Options(stage, dp=2, accumulation=2))


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("translator", 1),
        ("translator", 3),
        ("sharing", 0),
        ("sharing", 2),
        ("reentrant checkpoint", 0),
        ("reentrant checkpoint", 3),
    ],
)
def test_plain_backward(name: str, stage: int) -> None:
    check(name, Options(stage, dp=2, accumulation=2, plain=True))


@pytest.mark.gloo
@pytest.mark.parametrize("stage", range(4))
def test_more_ranks(stage: int) -> None:
    check("perceptron", Options(stage, dp=4, accumulation=2))


NAMES = ("recurrent", "translator", "branching", "sharing", "checkpoint", "reentrant checkpoint")
WAYS: tuple[dict[str, Any], ...] = (
    {"prefetch_bucket_size": 0},
    {"max_reuse_distance": 1000, "prefetch_bucket_size": 100},
    {"memory_efficient_linear": False, "max_live_parameters": 50},
    {"param_persistence_threshold": 20},
)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "zero"),
    # Every model gathers in two ways, and every way is that of three models.
    [(name, zero) for row, name in enumerate(NAMES) for column, zero in enumerate(WAYS) if (row + column) % 2 == 0],
    ids=str,
)
def test_gathering_in_every_way(name: str, zero: dict[str, Any]) -> None:
    """The timing of gathers, and the time that parameters stay gathered, change no result."""
    check(name, Options(3, dp=2, accumulation=2, zero=zero))


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (0, {"contiguous_gradients": False, "reduce_scatter": False}),
        (1, {"contiguous_gradients": False, "overlap_comm": False}),
        (1, {"allgather_partitions": False, "prescale_gradients": True}),
        (2, {"contiguous_gradients": False, "gradient_predivide_factor": 3.0}),
        (3, {"reduce_scatter": False, "overlap_comm": False, "sub_group_size": 7}),
    ],
    ids=str,
)
def test_gradients_on_every_way(stage: int, zero: dict[str, Any]) -> None:
    check("perceptron", Options(stage, dp=2, accumulation=2, zero=zero))
    check("sharing", Options(stage, dp=2, accumulation=2, plain=True, zero=zero))


def apart(rank: int, stage: int) -> History:
    """Train on two ranks of which each uses a different part of the model."""
    model = make("branching")
    engine = megazero.initialize(model, Options(stage).config(), mesh=mesh_in_worker(rank, dp=2))
    losses = []
    for step in range(STEPS):
        (x,) = inputs_of("branching", step)
        for block in model.blocks[rank : rank + 2]:
            x = torch.tanh(block(x))
        losses.append(x.square().mean().item())
        x.square().mean().backward()
        engine.step()
    return History(losses, [], {name: p.detach().clone() for name, p in model.named_parameters()})


@pytest.mark.gloo
@pytest.mark.parametrize("stage", range(3))
def test_ranks_that_use_different_parts(stage: int) -> None:
    """A parameter that a rank does not use counts as having a zero gradient there."""
    model = make("branching")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (x,) = inputs_of("branching", step)
            for block in model.blocks[rank : rank + 2]:
                x = torch.tanh(block(x))
            (x.square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    for run in run_ranks(2, apart, stage):
        for name, value in model.named_parameters():
            torch.testing.assert_close(run.weights[name], value.detach(), rtol=1e-9, atol=1e-9, msg=name)


def read_at_once(rank: int, stage: int) -> list[bool]:
    """Return, for each step, whether a large parameter is up to date on this rank right after it."""
    model = torch.nn.Linear(700, 300, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    config = {
        "zero": {"zero_stage": stage},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": "SGD", "lr": 1.0},
    }
    engine = megazero.initialize(model, config, mesh=mesh_in_worker(rank, dp=2))
    told = []
    for step in range(5):
        engine.backward(engine(torch.ones(1, 700, dtype=torch.float64)).sum())
        engine.step()
        told.append(bool((model.weight.detach() == -1.0 - step).all()))
    return told


@pytest.mark.gloo
@pytest.mark.parametrize("stage", range(3))
def test_parameters_may_be_read_after_a_step(stage: int) -> None:
    """A parameter can be read right after a step, without a forward that waits for it."""
    assert run_ranks(2, read_at_once, stage) == [[True] * 5] * 2


def steps_until_stopped(rank: int) -> int:
    """Train until a rank has requested to stop; only rank 1 gets a signal, in its second micro-batch."""
    config = {"gradient_accumulation_steps": 2, "optimizer": {"type": "SGD", "lr": 1.0}}
    engine = megazero.initialize(torch.nn.Linear(2, 1), config, mesh=mesh_in_worker(rank, dp=2))
    with megazero.StopRequest() as stop:
        for micro_batch in range(20):
            if (rank, micro_batch) == (1, 1):
                os.kill(os.getpid(), signal.SIGUSR1)
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step(stop=stop.requested)
            if engine.stop_requested():
                break
    return engine.global_steps


@pytest.mark.gloo
def test_a_signal_to_one_rank_stops_all_after_the_same_step() -> None:
    assert run_ranks(2, steps_until_stopped) == [1, 1]
