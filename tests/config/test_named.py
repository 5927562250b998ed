"""Tests that settings are read and replaced by their names, whichever section has them."""

from support.configs import make_run

from megazero.config.named import AUTOMATIC, undecided, value_in, with_values


def test_values_of_several_sections_are_replaced() -> None:
    config = make_run(zero_stage=1, recompute_granularity="auto", offload_optimizer="auto")
    assert undecided(config) == ("recompute_granularity", "offload_optimizer")
    changed = with_values(config, {"offload_optimizer": "cpu", "recompute_granularity": "full", "micro_batch_size": 3})
    assert undecided(changed) == ()
    assert (changed.zero.offload_optimizer, changed.activations.recompute_granularity) == ("cpu", "full")
    assert value_in(changed, "micro_batch_size") == 3 and changed.zero.zero_stage == 1
    assert with_values(config, {}) == config


def test_every_setting_that_is_decided_can_be_left_open() -> None:
    config = with_values(make_run(zero_stage=3), dict.fromkeys(AUTOMATIC, "auto"))
    assert undecided(config) == AUTOMATIC
