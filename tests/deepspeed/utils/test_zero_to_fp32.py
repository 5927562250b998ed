"""Tests consolidated checkpoints, and how programs find, read and change parameters that ranks partition."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.deepspeed import utils, zero
from megazero.deepspeed.utils.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from megazero.errors import CheckpointError, UsageError

LR = 0.5


class Tied(nn.Module):
    """A model with a tied matrix, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).square().mean() * self.scale.sum()


def model() -> Tied:
    torch.manual_seed(2)
    return Tied()


def batch() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(5))


def halved(gradient: Tensor, parameter: Tensor) -> Tensor:
    assert gradient.shape == parameter.shape
    return gradient / 2


def partitioned(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that a program has to gather, found as DeepSpeed's own programs find them."""
    missing = zero.ZeroParamStatus.NOT_AVAILABLE
    return [p for p in parameters if hasattr(p, "ds_id") and getattr(p, "ds_status", None) == missing]


def train(rank: int, stage: int, folder: Path) -> dict[str, Tensor]:
    """Take a step with halved gradients, and save; return the master weights."""
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
    }
    engine = megazero.initialize(model(), config, mesh=mesh_in_worker(rank, dp=2))
    parameters = list(engine.module.parameters())
    found = partitioned(parameters)
    assert len(found) == (len(parameters) if stage == 3 else 0)
    seen: list[Any] = list(found)
    sizes = [(p.ds_shape, p.ds_numel) for p in seen]
    with zero.unwrap_model_for_generation(engine) as whole:
        assert partitioned(parameters) == [] and whole is engine
        assert sizes in ([], [(tuple(p.shape), p.numel()) for p in parameters])
    engine.backward(engine(batch().chunk(2)[rank]))
    utils.safe_update_full_grad_vectorized(parameters, halved)
    engine.step()
    engine.save_checkpoint(folder, "last")
    masters = {n: utils.safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters() if p.requires_grad}
    engine.close()
    return {name: value for name, value in masters.items() if value is not None}


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_are_updated_and_checkpoints_consolidated(stage: int, tmp_path: Path) -> None:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR / 2)
    plain(batch()).backward()
    optimizer.step()
    for masters in run_ranks(2, train, stage, tmp_path):
        for name, value in masters.items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach())
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "last")
    expected = {n: t for n, t in plain.state_dict().items() if n != "last.weight"}  # saved under its first name
    assert state.keys() == expected.keys() and state["count"].dtype == torch.int64
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value)
    loaded = load_state_dict_from_zero_checkpoint(model(), tmp_path)
    torch.testing.assert_close(loaded.state_dict(), plain.state_dict())
    with pytest.raises(CheckpointError, match="first"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "first")
    with pytest.raises(UsageError, match="exclude_frozen_parameters"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
