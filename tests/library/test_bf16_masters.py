"""Master weights in bf16: the optimizer updates the bf16 parameters as torch's own does in a plain bf16 model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.errors import ConfigError, UsageError
from megazero.library.config import load_engine_config
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.state.access import safe_get_full_fp32_param, safe_get_full_optimizer_state
from megazero.zero.plan import ModelStateBytes

RATE, PARAMS = 0.02, {"weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-6}
FILE = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def make_model() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.linspace(-1, 1, 20).view(4, 5).mul(1 + step + rank / 3).sin().bfloat16()


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def engine_of(stage: int, mesh: Any, *, masters: bool = True, **zero: Any) -> DataParallelEngine:
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 20, **zero},
        "precision": {"precision": "bf16", "bf16_master_weights": masters},
        "optimizer": {"type": "AdamW", "lr": RATE, "params": PARAMS},
    }
    return megazero.initialize(make_model(), config, mesh=mesh)


def values(model: nn.Module) -> list[Tensor]:
    return [found for p in model.parameters() if (found := safe_get_full_fp32_param(p)) is not None]


def plain() -> tuple[list[Tensor], list[Tensor]]:
    """Train a plain bf16 model; return its parameters and its second moments."""
    model = make_model().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True, **PARAMS)
    for step in range(4):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], [optimizer.state[p]["exp_avg_sq"] for p in model.parameters()]


def trained_alone(rank: int, stage: int, zero: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], ModelStateBytes]:
    engine = engine_of(stage, mesh_in_worker(rank), **zero)
    for step in range(4):
        engine.backward(loss_of(engine, batch(step)))
        engine.step()
    squares = [safe_get_full_optimizer_state(p, "exp_avg_sq") for p in engine.module.parameters()]
    found = [value for value in squares if value is not None]
    result = values(engine.module), found, engine.zero_engine.model_state_bytes()
    engine.close()
    return result


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("stage", "zero"), [(0, {}), (1, {}), (2, {"offload_optimizer": "cpu"}), (3, {"offload_param": "cpu"}), (3, {})]
)
def test_the_steps_are_those_of_a_plain_bf16_model(stage: int, zero: dict[str, Any]) -> None:
    ((weights, squares, nbytes),) = run_ranks(1, trained_alone, stage, zero)
    for found, expected in zip((weights, squares), plain(), strict=True):
        assert all(torch.equal(one.to(other.dtype), other) for one, other in zip(found, expected, strict=True))
        assert len(found) == len(expected)
    if not zero:  # everything is on the device
        assert (nbytes.master, nbytes.moments) == (0, 2 * nbytes.parameters)


def resumed(rank: int, folder: Path) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return weights after 4 steps, after 2 and 2 more from a checkpoint, and after those 2 with fp32 masters."""
    found = []
    for masters, is_resumed in ((True, False), (True, True), (False, True)):
        mesh = mesh_in_worker(rank, dp=2)
        engine = engine_of(2, mesh, masters=masters)
        if is_resumed:
            engine.load_checkpoint(folder)
        for step in range(2 if is_resumed else 0, 4):
            if step == 2 and not is_resumed:
                engine.save_checkpoint(folder)
            engine.backward(loss_of(engine, batch(step, rank)))
            engine.step()
        found.append(values(engine.module))
        engine.close()
    return found[0], found[1], found[2]


@pytest.mark.gloo
def test_a_training_goes_on_bitwise_and_with_wider_masters(tmp_path: Path) -> None:
    straight, same, wider = run_ranks(2, resumed, tmp_path)[0]
    assert all(map(torch.equal, straight, same))
    assert all(value.dtype == torch.float32 for value in wider)
    assert not all(torch.equal(one.float(), other) for one, other in zip(straight, wider, strict=True))
    for one, other in zip(straight, wider, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.01)


def kept_wide(rank: int) -> str:
    config = {"bf16": FILE, "keep_in_fp32": ["2"], "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    with pytest.raises(UsageError) as caught:
        megazero.initialize(make_model(), config, mesh=mesh_in_worker(rank))
    return str(caught.value)


@pytest.mark.gloo
def test_parameters_that_stay_wide_are_refused() -> None:
    (message,) = run_ranks(1, kept_wide)
    assert "bf16 master weights, and 2.weight in fp32 with 1 more" in message


@each(
    ("changes", "words"),
    [
        ({"bf16_optimizer_states": False}, "bf16_optimizer_states, both true or both false"),
        ({"bf16_master_weights_and_grads": False}, "bf16_optimizer_states, both true or both false"),
        ({"grad_accum_dtype": "fp32"}, "the optimizer takes gradients in the format of the weights"),
    ],
)
def test_refused(changes: dict[str, Any], words: str) -> None:
    wide = {"data_types": {"grad_accum_dtype": "fp32"}} if "grad_accum_dtype" in changes else {}
    states = FILE if wide else {**FILE, **changes}
    config = {"bf16": states, **wide, "train_micro_batch_size_per_gpu": 1}
    with pytest.raises(ConfigError, match=words):
        load_engine_config(config)
