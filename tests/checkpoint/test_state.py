"""Tests of a run's progress: how it is counted, and how it is saved in a checkpoint's JSON and read back."""

import json
from typing import Any

import pytest
from support.each import each

from megazero.checkpoint.state import TrainState
from megazero.errors import DamageError
from megazero.optim.loss_scaler import LossScale


def state() -> TrainState:
    return TrainState(LossScale(2.0**16, good_steps=7, hysteresis_left=1), 12, 96, 10, 80, 768, 640)


def test_steps_are_counted() -> None:
    counted = TrainState(LossScale(1.0))
    for skipped in (False, True, False):
        counted.advance(num_samples=8, skipped=skipped, num_tokens=40)
    assert (counted.iteration, counted.consumed_samples, counted.optimizer_steps) == (3, 24, 2)
    assert (counted.update_samples, counted.consumed_tokens, counted.update_tokens) == (16, 120, 80)


def test_what_is_saved() -> None:
    assert state().to_json() == {
        "iteration": 12,
        "consumed_samples": 96,
        "optimizer_steps": 10,
        "update_samples": 80,
        "consumed_tokens": 768,
        "update_tokens": 640,
        "loss_scale": {"scale": 65536.0, "good_steps": 7, "hysteresis_left": 1, "skips_at_minimum": 0},
    }


def test_the_way_through_json() -> None:
    saved = json.loads(json.dumps({**state().to_json(), "seed": 3, "learning_rate": {"peak": 1e-3}}))
    assert TrainState.from_json(saved, step=12) == state()


@each(
    "change",
    [
        {"iteration": None},
        {"iteration": "12"},
        {"iteration": 12.0},
        {"iteration": True},
        {"consumed_samples": -1},
        {"optimizer_steps": [1]},
        {"loss_scale": 65536.0},
        {"loss_scale": None},
        {"loss_scale": {"scale": 1.0}},
        {"loss_scale": {**state().to_json()["loss_scale"], "good_steps": -1}},
        {"loss_scale": {**state().to_json()["loss_scale"], "scale": 0.0}},
        {"loss_scale": {**state().to_json()["loss_scale"], "good_steps": 13}},
        {"loss_scale_is_dynamic": 1},
        {"iteration": 2**61},
        {"iteration": 11},
        {"consumed_samples": 2**61},
        {"consumed_samples": 11},
        {"optimizer_steps": 2**61},
        {"optimizer_steps": 13},
        {"update_samples": 97},
        {"update_tokens": 769},
        {"consumed_tokens": -1},
        {"update_tokens": None},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DamageError, match=r"checkpoint's (progress|loss scale)"):
        TrainState.from_json(state().to_json() | change, step=12)


def test_an_earlier_checkpoint_counts_as_one_of_equal_steps() -> None:
    saved = state().to_json()
    del saved["update_samples"]
    assert TrainState.from_json(saved, step=12) == state()


def test_an_earlier_checkpoint_had_whole_rows() -> None:
    saved = state().to_json() | {"seq_length": 8}
    del saved["consumed_tokens"], saved["update_tokens"]
    assert TrainState.from_json(saved, step=12) == state()


@each("name", ["iteration", "consumed_samples", "optimizer_steps", "loss_scale"])
def test_nothing_may_be_missing(name: str) -> None:
    saved = state().to_json()
    del saved[name]
    with pytest.raises(DamageError, match="progress has loss_scale"):
        TrainState.from_json(saved, step=12)
