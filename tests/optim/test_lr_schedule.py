"""The learning rate against literal tables, against Megatron's rule in its own units, and its limits."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.config.engine_sections import OptimizerConfig
from megazero.errors import CheckpointError, ConfigError
from megazero.optim.lr_schedule import LearningRate, reconcile

HALF_ROOT = math.sqrt(0.5) / 2

TABLES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "linear, no warm-up": ({"style": "linear"}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]),
    "linear to a minimum": ({"style": "linear", "minimum": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
    "linear, warm-up": ({"style": "linear", "warmup_steps": 2, "decay_steps": 6}, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0]),
    "cosine": ({"style": "cosine"}, [1.0, 0.5 + HALF_ROOT, 0.5, 0.5 - HALF_ROOT, 0.0, 0.0]),
    "cosine, warm-up": ({"style": "cosine", "warmup_steps": 2}, [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]),
    "constant": ({"style": "constant", "minimum": 0.1, "warmup_steps": 2}, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    # 2.5 steps of warm-up: the fraction of a step is kept.
    "warm-up of a fraction": ({"style": "linear", "warmup_steps": 2.5, "decay_steps": 5}, [0.0, 0.4, 0.8, 0.8, 0.4, 0]),
}


def schedule(**changes: Any) -> LearningRate:
    fields = {"peak": 1.0, "minimum": 0.0, "style": "linear", "warmup_steps": 0, "decay_steps": 4}
    return LearningRate(**{**fields, **changes})


@pytest.mark.parametrize("name", TABLES)
def test_literal_tables(name: str) -> None:
    fields, expected = TABLES[name]
    rate = schedule(**fields)
    assert [rate.at(step) for step in range(len(expected))] == pytest.approx(expected, abs=1e-15)


def megatron(samples: int, *, peak: float, minimum: float, style: str, warmup: float, decay: int) -> float:
    """The rate after `samples` samples, `warmup` and `decay` being samples too."""
    if warmup > 0 and samples <= warmup:
        return peak / warmup * samples
    if style == "constant":
        return peak
    progress = min(1.0, (samples - warmup) / (decay - warmup))
    if style == "linear":
        return peak * (1 - progress) + minimum * progress
    return minimum + (peak - minimum) * math.cos(math.pi * progress / 2) ** 2


@given(
    style=st.sampled_from(["linear", "cosine", "constant"]),
    batch=st.integers(1, 64),
    decay=st.integers(1, 200),
    warmup=st.floats(0, 0.99),
    minimum=st.floats(0, 1),
    step=st.integers(0, 300),
)
def test_same_as_counting_samples(style: str, batch: int, decay: int, warmup: float, minimum: float, step: int) -> None:
    rate = schedule(style=style, minimum=minimum, warmup_steps=warmup * decay, decay_steps=decay)
    expected = megatron(
        step * batch, peak=1.0, minimum=minimum, style=style, warmup=warmup * decay * batch, decay=decay * batch
    )
    assert rate.at(step) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(
    style=st.sampled_from(["linear", "cosine", "constant"]),
    decay=st.integers(1, 100),
    warmup=st.floats(0, 0.99),
    minimum=st.floats(0, 1),
)
def test_rises_then_falls_within_limits(style: str, decay: int, warmup: float, minimum: float) -> None:
    rate = schedule(style=style, minimum=minimum, warmup_steps=warmup * decay, decay_steps=decay)
    rates = [rate.at(step) for step in range(decay + 3)]
    turn = math.floor(warmup * decay)
    assert all(a <= b for a, b in pairwise(rates[: turn + 1]))
    assert all(a >= b - 1e-15 for a, b in pairwise(rates[turn + 1 :]))
    assert all(0 <= value <= 1 + 1e-15 for value in rates)
    assert rates[-1] == (1.0 if style == "constant" else minimum)


def test_from_config() -> None:
    whole_run = OptimizerConfig(lr=3e-4, min_lr=3e-5, lr_decay_style="cosine", lr_warmup_iters=10)
    assert LearningRate.from_config(whole_run, train_iters=100) == LearningRate(3e-4, 3e-5, "cosine", 10, 100)
    own_decay = OptimizerConfig(lr=3e-4, lr_decay_iters=50, lr_warmup_fraction=0.05)
    assert LearningRate.from_config(own_decay, train_iters=100) == LearningRate(3e-4, 0.0, "linear", 2.5, 50)


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        schedule(style="stairs", minimum=2.0, warmup_steps=4)
    given = [problem.given for problem in caught.value.problems]
    assert given == ["--lr-decay-style stairs", "--min-lr 2 with --lr 1", "a warm-up of 4 steps in a decay of 4"]


def test_resume_refuses_another_schedule() -> None:
    config = OptimizerConfig(lr=1.0)
    saved = schedule(peak=2.0, decay_steps=8).to_json()
    with pytest.raises(CheckpointError) as caught:
        reconcile(schedule(), saved, config)
    assert [problem.given.split()[0] for problem in caught.value.problems] == ["--lr", "--lr-decay-iters"]
    assert reconcile(schedule(), schedule().to_json(), config) == schedule()


def test_resume_takes_the_side_the_user_names() -> None:
    saved = schedule(peak=2.0)
    here = OptimizerConfig(lr=1.0, override_opt_param_scheduler=True)
    there = OptimizerConfig(lr=1.0, use_checkpoint_opt_param_scheduler=True)
    assert reconcile(schedule(), saved.to_json(), here) == schedule()
    assert reconcile(schedule(), saved.to_json(), there) == saved
    with pytest.raises(CheckpointError, match="slope"):
        reconcile(schedule(), saved.to_json() | {"slope": 1}, there)


def test_constant_rate_may_be_trained_longer() -> None:
    longer = schedule(style="constant", decay_steps=9)
    assert reconcile(longer, schedule(style="constant").to_json(), OptimizerConfig(lr=1.0)) == longer
