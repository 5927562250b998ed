"""Tests the loss scale against literal histories and torch's GradScaler, whose rule is the case of hysteresis 1."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.each import each

from megazero.config.engine_sections import PrecisionConfig
from megazero.errors import CheckpointError
from megazero.optim.loss_scaler import LossScale, LossScaler


def dynamic(**changes: Any) -> LossScaler:
    scaler = LossScaler(initial=16.0, minimum=2.0, dynamic=True, window=3, hysteresis=2, max_skips_at_minimum=3)
    return replace(scaler, **changes)


def history(scaler: LossScaler, steps: str) -> list[LossScale]:
    """Return the states after each step of a string such as "..x.", in which x is an overflow."""
    states = [scaler.start()]
    for step in steps:
        states.append(scaler.after_step(states[-1], overflow=step == "x"))
    return states[1:]


@each(
    ("steps", "scales"),
    [
        ("...", [16, 16, 32]),
        ("......", [16, 16, 32, 32, 32, 64]),
        # The first overflow is tolerated, and every further one halves the scale, until growth refills the hysteresis.
        ("xxx", [16, 8, 4]),
        ("xx.x", [16, 8, 8, 4]),
        ("xx...x", [16, 8, 8, 8, 16, 16]),
        # An overflow starts the window anew.
        ("..x...", [16, 16, 16, 16, 16, 32]),
        ("xxxxxx", [16, 8, 4, 2, 2, 2]),
    ],
)
def test_literal_histories(steps: str, scales: list[float]) -> None:
    assert [state.scale for state in history(dynamic(), steps)] == scales


def test_consecutive_overflows_alone_use_up_the_hysteresis() -> None:
    scaler = dynamic(consecutive_hysteresis=True, window=100)
    assert [state.scale for state in history(scaler, "x.x.xx.x")] == [16, 16, 16, 16, 16, 8, 8, 8]
    assert [state.scale for state in history(dynamic(window=100), "x.x.xx.x")] == [16, 16, 8, 8, 4, 2, 2, 2]
    assert LossScaler.from_config(PrecisionConfig(precision="fp16", consecutive_hysteresis=True)).consecutive_hysteresis


@settings(deadline=None, max_examples=50)
@given(st.text("...x", max_size=60), st.integers(1, 5))
def test_hysteresis_one_is_torchs_rule(steps: str, window: int) -> None:
    scale, tracker = torch.tensor(2.0**20), torch.tensor(0, dtype=torch.int32)
    # The minimum is out of reach here, since torch has none.
    scaler = dynamic(initial=2.0**20, minimum=2.0**-100, window=window, hysteresis=1)
    for step, state in zip(steps, history(scaler, steps), strict=True):
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(step == "x")), 2.0, 0.5, window)
        assert (state.scale, state.good_steps) == (scale.item(), tracker.item())


@given(st.text(".x", max_size=80), st.integers(1, 4), st.integers(1, 4))
def test_scale_stays_above_the_minimum_and_counts_are_bounded(steps: str, window: int, hysteresis: int) -> None:
    for state in history(dynamic(window=window, hysteresis=hysteresis), steps):
        assert state.scale >= 2.0
        assert 0 <= state.good_steps < window
        assert 0 <= state.hysteresis_left <= hysteresis


def test_static_scale_never_moves() -> None:
    states = history(dynamic(dynamic=False), "....x.xx")
    assert {state.scale for state in states} == {16.0}
    assert [state.skips_at_minimum for state in states] == [0, 0, 0, 0, 1, 0, 1, 2]


def test_exhausted_after_skips_in_a_row_at_the_minimum() -> None:
    scaler = dynamic()
    exhausted = [scaler.exhausted(state) for state in history(scaler, "xxxx" + "xx" + ".xx" + "x")]
    # Four overflows bring the scale down to 2; two at the minimum are not three; a good step counts from zero again.
    assert exhausted == [False] * 9 + [True]


def test_exhaustion_names_the_parameter() -> None:
    scaler = dynamic(initial=2.0)
    state = history(scaler, "xxx")[-1]
    given = scaler.exhaustion(state, cause="layers.0.mlp.up.weight overflowed").given
    assert given == "3 steps in a row overflowed at loss scale 2; in the last, layers.0.mlp.up.weight overflowed"


@each(
    ("config", "scale", "is_dynamic"),
    [
        (PrecisionConfig(precision="fp16"), 2.0**32, True),
        (PrecisionConfig(precision="fp16", initial_loss_scale=1024), 1024.0, True),
        (PrecisionConfig(precision="fp16", loss_scale=128), 128.0, False),
        (PrecisionConfig(precision="bf16"), 1.0, False),
        (PrecisionConfig(precision="fp32"), 1.0, False),
    ],
)
def test_from_config(config: PrecisionConfig, scale: float, is_dynamic: bool) -> None:
    scaler = LossScaler.from_config(config)
    assert (scaler.start().scale, scaler.dynamic) == (scale, is_dynamic)
    assert scaler.max_skips_at_minimum == config.max_skipped_steps_at_min_loss_scale


def test_a_scale_without_a_least_value_never_becomes_zero() -> None:
    scaler = LossScaler.from_config(PrecisionConfig(precision="fp16", hysteresis=1, min_loss_scale=0))
    state = scaler.start()
    for _ in range(32 + 126 + scaler.max_skips_at_minimum):
        assert not scaler.exhausted(state)
        state = scaler.after_step(state, overflow=True)
    assert scaler.exhausted(state) and state.scale == 2.0**-126


@given(st.text(".x", max_size=20))
def test_a_resumed_scale_goes_on_the_same(steps: str) -> None:
    scaler = dynamic()
    half = len(steps) // 2
    state = [scaler.start(), *history(scaler, steps[:half])][-1]
    state = LossScale.from_json(json.loads(json.dumps(state.to_json())))
    for step in steps[half:]:
        state = scaler.after_step(state, overflow=step == "x")
    assert state == [scaler.start(), *history(scaler, steps)][-1]


@pytest.mark.parametrize("change", [{"scale": "16"}, {"good_steps": 1.5}, {"wheels": 4}])
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="loss scale"):
        LossScale.from_json(dynamic().start().to_json() | change)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_scale_for_fp16_scales_nothing_else(precision: Any) -> None:
    scaler = LossScaler.from_config(PrecisionConfig(precision=precision, loss_scale=12.0, initial_loss_scale=8.0))
    assert scaler.start().scale == scaler.minimum == 1.0 and not scaler.dynamic
