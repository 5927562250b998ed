"""The library names a gradient that is not finite, changes nothing by it, and goes on if the program does."""

from typing import Any

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.errors import TrainingError
from megazero.library.data_parallel_engine import DataParallelEngine

ACCUMULATION = 2


def make_engine(mesh: Any, stage: int, **precision: Any) -> DataParallelEngine:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 64},
        "precision": precision,
        "optimizer": {"type": "AdamW", "lr": 0.1},
        "gradient_accumulation_steps": ACCUMULATION,
    }
    return megazero.initialize(model, config, mesh=mesh)


def state(engine: DataParallelEngine) -> list[Tensor]:
    return [piece.tensor.clone() for piece in engine.zero_engine.owned_state()]


def step(engine: DataParallelEngine, spoilt: int | None) -> str:
    """Take a step, in which the input of one micro-batch is spoilt; return the error's text, "" without an error."""
    for micro_batch in range(ACCUMULATION):
        x = torch.ones(4, 6, dtype=engine.module[0].weight.dtype)
        engine.backward(engine(x * torch.inf if micro_batch == spoilt else x).square().mean())
    try:
        engine.step()
    except TrainingError as error:
        return error.problems[0].given
    return ""


def bad_steps(rank: int, stage: int, precision: str) -> list[str]:
    """Take a good step, a bad one twice, and a good one; rank 1's second micro-batch is bad."""
    engine, told = make_engine(mesh_in_worker(rank, dp=2), stage, precision=precision), []
    for is_bad in (False, True, True, False):
        before, rates = state(engine), engine.get_lr()
        told.append(step(engine, 1 if is_bad and rank == 1 else None))
        same = [torch.equal(*pair) for pair in zip(before, state(engine), strict=True)]
        assert all(same) == is_bad and engine.was_step_applied() != is_bad and engine.get_lr() == rates
    assert (engine.global_steps, engine.skipped_steps) == (4, 2)
    assert not engine.module[1]._forward_hooks, "the watch has been removed"
    return told


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_the_loss_then_the_module_is_named(stage: int, precision: str) -> None:
    for first, bad, again, last in run_ranks(2, bad_steps, stage, precision):
        assert first == last == ""
        assert "not finite is the loss, on rank 1 (dp 1), micro-batch 1; " in bad and bad.startswith("step 2: gradient")
        assert "not finite is the output of 0, in 0, on rank 1 (dp 1), micro-batch 1; " in again
        assert all(text.endswith("the first such gradient is 0.weight's") for text in (bad, again))


def test_a_gradient_alone_is_named_and_its_rank_if_it_comes_again() -> None:
    engine = make_engine(None, 2, precision="fp32")
    engine.module[2].bias.register_hook(lambda grad: grad * torch.nan)
    text = step(engine, None)
    assert "the losses were finite on every rank" in text and text.endswith("the first such gradient is 2.bias's")
    assert "the gradient of 2.bias, in 2, on rank 0, micro-batch 0" in step(engine, None)


def test_without_the_check_the_update_is_made() -> None:
    engine = make_engine(None, 1, precision="fp32", check_for_nan_in_loss_and_grad=False)
    assert step(engine, 0) == "" and engine.was_step_applied()
    assert engine.module[0].weight.isnan().any()
