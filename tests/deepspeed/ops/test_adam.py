"""Tests DeepSpeed's names of Adam."""

import pytest
import torch
from torch import nn

import megazero.deepspeed as deepspeed
from megazero.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from megazero.errors import UsageError


def test_fused_adam_is_torchs() -> None:
    weight = nn.Parameter(torch.ones(3))
    decoupled = deepspeed.ops.adam.FusedAdam([weight], lr=0.1, betas=(0.8, 0.95), weight_decay=0.2)
    assert type(decoupled) is torch.optim.AdamW
    assert {name: decoupled.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 0.1,
        "betas": (0.8, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.2,
    }
    assert type(FusedAdam([weight], adam_w_mode=False)) is torch.optim.Adam
    with pytest.raises(UsageError, match="bias_correction"):
        FusedAdam([weight], bias_correction=False)


def test_adam_on_the_cpu_is_the_same_since_the_configuration_says_where_states_live() -> None:
    weight = nn.Parameter(torch.ones(3))
    assert type(DeepSpeedCPUAdam([weight], lr=0.1)) is torch.optim.AdamW
    with pytest.raises(UsageError, match="fp32_optimizer_states"):
        DeepSpeedCPUAdam([weight], fp32_optimizer_states=False)
