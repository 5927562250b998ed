"""Tests that programs may import DeepSpeed's layers of experts, and that using one is an error."""

import pytest

import megazero.deepspeed as deepspeed
from megazero.deepspeed.moe.utils import has_moe_layers, split_params_into_different_moe_groups_for_optimizer
from megazero.errors import UsageError


def test_experts_are_refused_when_they_are_used() -> None:
    with pytest.raises(UsageError, match=r"deepspeed\.moe\.layer\.MoE"):
        deepspeed.moe.layer.MoE(hidden_size=8, num_experts=2)
    with pytest.raises(UsageError, match="split_params_into_different_moe_groups_for_optimizer"):
        split_params_into_different_moe_groups_for_optimizer({"params": []})
    assert has_moe_layers(None) == (False, 0)
