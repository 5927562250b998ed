"""Tests of adapters in the library against plain PyTorch in float64, in stages 0 and 3, and of merging them."""

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.errors import ConfigError

WIDTH, RANK, STEPS, SAMPLES = 13, 3, 4, 6
TARGETS = ("inner", "2")
CONFIG: dict[str, Any] = {
    "precision": {"precision": "fp64"},
    "optimizer": {"type": "AdamW", "lr": 0.02, "params": {"weight_decay": 0.1}},
}


class Inner(nn.Module):
    """A layer that is used twice, and one that is no target."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(self.inner(torch.tanh(self.inner(x))))
        return y


def make_model(*, adapted: bool = True) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(Inner(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2, bias=False)).double()
    if adapted:
        assert megazero.lora(model, rank=RANK, alpha=5.0, targets=TARGETS) == ["0.inner", "2"]
    return model


def batch(step: int) -> Tensor:
    return torch.randn(2 * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(rank: int, size: int, stage: int) -> dict[str, Tensor]:
    """Train on this rank's part of every batch, and return the whole state."""
    mesh = mesh_in_worker(rank, dp=size)
    with patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}):
        engine = megazero.initialize(make_model(), {**CONFIG, "zero": {"zero_stage": stage}}, mesh=mesh)
    for step in range(STEPS):
        mine = batch(step).chunk(size)[rank]
        engine.backward(engine(mine).square().mean())
        engine.step()
    with megazero.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def expected() -> dict[str, Tensor]:
    """Train A and B in plain PyTorch, where an adapted layer is one matrix."""
    state = {name: value.detach().clone() for name, value in make_model().named_parameters()}
    plain = make_model(adapted=False)
    trained = {name: value.requires_grad_() for name, value in state.items() if ".adapter." in name}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.02, weight_decay=0.1)
    for step in range(STEPS):
        weights = {name: value for name, value in state.items() if ".adapter." not in name}
        for layer in ("0.inner", "2"):
            product = state[f"{layer}.adapter.lora_B.weight"] @ state[f"{layer}.adapter.lora_A.weight"]
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + 5.0 / RANK * product
        optimizer.zero_grad()
        torch.func.functional_call(plain, weights, (batch(step),)).square().mean().backward()
        optimizer.step()
    return {name: value.detach() for name, value in state.items()}


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_train_as_plain_ones_do(stage: int) -> None:
    reference = expected()
    for found in run_ranks(2, train, 2, stage):
        assert found.keys() == reference.keys()
        for name, value in reference.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_a_merged_state_computes_the_same() -> None:
    model = make_model()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is (".adapter." in name)
        if name.endswith("lora_B.weight"):
            nn.init.normal_(parameter)
    plain = make_model(adapted=False)
    before = plain(batch(0))
    plain.load_state_dict(megazero.merge_lora(model.state_dict(), alpha=5.0))
    torch.testing.assert_close(plain(batch(0)), model(batch(0)), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before, plain(batch(0)))


def test_an_adapter_begins_as_nothing_and_drops_in_training_alone() -> None:
    model = make_model(adapted=False)
    before = model(batch(0))
    assert len(megazero.lora(model, rank=2, dropout=0.5)) == 3, "every linear layer"
    assert torch.equal(model(batch(0)), before)
    nn.init.normal_(model[2].adapter.lora_B.weight)
    assert not torch.equal(model(batch(0)), model(batch(0)))
    model.eval()
    assert torch.equal(model(batch(0)), model(batch(0)))


@each(
    ("options", "message"),
    [
        ({"rank": 0}, "rank is at least 1"),
        ({"rank": 2, "alpha": 0.0}, "alpha above 0"),
        ({"rank": 2, "dropout": 1.0}, "below 1"),
        ({"rank": 2, "targets": ["inner", "q_proj"]}, "q_proj"),
        ({"rank": 2, "targets": ["1"]}, "an nn.Linear"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megazero.lora(make_model(adapted=False), **options)


def test_a_module_is_adapted_once() -> None:
    with pytest.raises(ConfigError, match="adapters once"):
        megazero.lora(make_model(), rank=2)
