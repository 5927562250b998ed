"""Tests the statistics of an engine's weights, moments and gradients on one process, against plain PyTorch."""

import math

import pytest
import torch
from support.each import each
from torch import nn

import megazero
from megazero.zero.statistics import missing_states


def test_a_library_step_has_the_figures_of_torchs_own_optimizer() -> None:
    """They are summed in float64, over more elements than are taken at a time; a frozen parameter does not count."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(1030, 1024), nn.Linear(1024, 2))
    model[1].bias.requires_grad_(False)
    x = torch.randn(3, 1030)
    x[:, :7] = 0.0  # 7 columns of the first layer's gradient
    engine = megazero.initialize(
        model,
        {"optimizer": {"type": "AdamW", "lr": 0.01}, "zero": {"zero_stage": 2}, "precision": {"precision": "fp32"}},
    )
    before = engine.optimizer_statistics()
    assert "num_zeros" not in before and before["momentum_l1"] == before["variance_sqrt_abs_max"] == 0.0
    engine.backward(engine(x).square().mean())
    assert engine.optimizer_statistics()["num_zeros"] == 7 * 1024
    engine.step()
    found = engine.optimizer_statistics()
    state = {"weight": [], "momentum": [], "variance": []}
    for name, parameter in engine.module.named_parameters():
        if name != "1.bias":
            state["weight"].append(parameter.detach().double().flatten())
            state["momentum"].append(megazero.zero.safe_get_full_optimizer_state(parameter, "exp_avg"))
            state["variance"].append(megazero.zero.safe_get_full_optimizer_state(parameter, "exp_avg_sq"))
    flat = {name: torch.cat([x.double().flatten() for x in tensors]) for name, tensors in state.items()}
    flat["variance_sqrt"] = flat["variance"].sqrt()
    for name, values in flat.items():
        for suffix, order in (("l1", 1.0), ("l2", 2.0), ("abs_max", math.inf)):
            expected = torch.linalg.vector_norm(values, order).item()
            assert found[f"{name}_{suffix}"] == pytest.approx(expected, rel=1e-7), (name, suffix)
    assert found["params_norm"] == found["weight_l2"] == pytest.approx(flat["weight"].norm().item(), rel=1e-12)
    assert len(found) == 12 + 1


@each(
    ("kinds", "missing"),
    [
        (("exp_avg", "exp_avg_sq"), ()),
        ((), ("momentum", "variance")),
        (("momentum_buffer",), ("variance",)),
        (("square_avg",), ("momentum",)),
    ],
)
def test_what_an_optimizer_does_not_keep(kinds: tuple[str, ...], missing: tuple[str, ...]) -> None:
    assert missing_states(kinds) == missing


def test_an_optimizer_without_moments_has_figures_of_weights_alone() -> None:
    engine = megazero.initialize(nn.Linear(3, 2), {"optimizer": {"type": "SGD", "lr": 1.0}})
    engine.backward(engine(torch.tensor([[1.0, 0.0, 2.0]])).sum())
    assert engine.optimizer_statistics()["num_zeros"] == 2.0
    engine.step()
    assert engine.optimizer_statistics().keys() == {"weight_l1", "weight_l2", "weight_abs_max", "params_norm"}
