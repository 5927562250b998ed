"""Tests schedules: literal tables, formulas of Megatron-LM, DeepSpeed and transformers, limits, and refused resumes."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.each import each
from torch import nn

from megazero.config.choices import SchedulerChoice
from megazero.config.engine_sections import OptimizerConfig
from megazero.config.lengths import RunLength
from megazero.config.schedules import SCHEDULES, WSD_STYLES
from megazero.config.step_sizes import StepSizes
from megazero.errors import CheckpointError, ConfigError
from megazero.optim.schedules import MOMENTA, RATES, LearningRate, momentum_of, rate_of, reconcile

BASE = 0.5  # the optimizer's own rate


def choice(kind: str, **params: Any) -> SchedulerChoice:
    """Return a schedule with the table's defaults for parameters that are left out."""
    table = SCHEDULES[kind]
    assert params.keys() <= table.keys()
    return SchedulerChoice(type=kind, params={name: info.default for name, info in table.items()} | params)


def rates(kind: str, count: int, base: float = BASE, **params: Any) -> list[float]:
    """Return the rates of updates 0, 1, 2, ..."""
    return [rate_of(choice(kind, **params), updates, base) for updates in range(count)]


def test_every_schedule_takes_the_parameters_of_its_table() -> None:
    assert RATES.keys() == SCHEDULES.keys()
    for kind, table in SCHEDULES.items():
        params = {name: 9 if info.required else info.default for name, info in table.items()}
        params |= {"lr_warmup_iters": 5} if "lr_warmup_iters" in table else {}
        params |= {"lr_wsd_decay_iters": 3} if "lr_wsd_decay_iters" in table else {}
        params |= {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5} if "cycle_min_lr" in table else {}
        assert all(RATES[kind](updates, BASE, **params) <= BASE for updates in range(12))
        for name in table:
            fewer = {other: value for other, value in params.items() if other != name}
            with pytest.raises((TypeError, KeyError), match=name):
                RATES[kind](1, BASE, **fewer)
                MOMENTA[kind](1, **fewer)


# --- DeepSpeed's schedules --------------------------------------------------------------------------------------------


def warmup(low: float, peak: float | None, steps: int, shape: str = "log") -> SchedulerChoice:
    params = {"warmup_min_lr": low, "warmup_max_lr": peak, "warmup_num_steps": steps, "warmup_type": shape}
    return SchedulerChoice(type="WarmupLR", params=params)


def decay(total: int, low: float, peak: float | None, steps: int, shape: str = "log") -> SchedulerChoice:
    params = {**warmup(low, peak, steps, shape).params, "total_num_steps": total}
    return SchedulerChoice(type="WarmupDecayLR", params=params)


def cosine(total: int, low: float, steps: int, floor: float, shape: str = "log") -> SchedulerChoice:
    ratios = {"warmup_min_ratio": low, "cos_min_ratio": floor}
    params = {"total_num_steps": total, "warmup_num_steps": steps, "warmup_type": shape}
    return SchedulerChoice(type="WarmupCosineLR", params=params | ratios)


# log(step + 1) / log(8) for steps 0 to 8: exact at 0, 1, 3 and 7, where step + 1 is a power of two.
EIGHTH = [0, 1 / 3, 0.5283208335737187, 2 / 3, 0.7739760316291208, 0.8616541669070520, 0.9357849740192014, 1, 1]
ROOT = math.sqrt(0.5) / 2

# Rates of updates 0, 1, 2, ..., which DeepSpeed's scheduler sets in calls -1, 0, 1, ...
WARMUP_TABLES: dict[str, tuple[SchedulerChoice, list[float]]] = {
    "log": (warmup(0.0, 1.0, 8), [0, *EIGHTH, 1]),
    "log between two rates": (warmup(0.2, 0.5, 8), [0.2, *(0.2 + 0.3 * part for part in EIGHTH), 0.5]),
    "linear": (warmup(0.0, 1.0, 4, "linear"), [0, 0, 0.25, 0.5, 0.75, 1, 1]),
    "linear to the optimizer's rate": (warmup(0.1, None, 4, "linear"), [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5]),
    # One step of warm-up counts as two.
    "log of two steps": (warmup(0.0, 1.0, 1), [0, 0, 1, 1]),
    "linear of two steps": (warmup(0.0, 1.0, 1, "linear"), [0, 0, 0.5, 1, 1]),
    # 4 steps up and 5 down: the decay is over at step 9.
    "decay": (decay(9, 0.0, 1.0, 4, "linear"), [0, 0, 0.25, 0.5, 0.75, 1, 0.8, 0.6, 0.4, 0.2, 0, 0, 0]),
    "decay to the start rate": (decay(4, 0.2, 1.0, 2, "linear"), [0.2, 0.2, 0.6, 1.0, 0.6, 0.2, 0.2]),
    # log(step + 1) / log 4 is 0, 1/2, 0.792..., 1: the peak lasts two steps.
    "decay after log": (decay(6, 0.0, 1.0, 4), [0, 0, 0.5, 0.7924812503605781, 1, 1, 0.5, 0, 0]),
    "decay to the optimizer's rate": (decay(4, 0.0, None, 2, "linear"), [0, 0, 0.25, 0.5, 0.25, 0]),
    "warm-up longer than the run": (decay(2, 0.1, 1.0, 4, "linear"), [0.1, 0.1, 0.325, 0.55, 0.775, 0.1, 0.1]),
    # Parts of 0.5: 2 steps up, 4 down by cos(pi/4), cos(pi/2), ...; the end comes at step 5 of 6.
    "cosine": (
        cosine(6, 0.0, 2, 0.0, "linear"),
        [0, 0, 0.25, BASE * (0.5 + ROOT), 0.25, BASE * (0.5 - ROOT), 0, 0, 0],
    ),
    # Half way down the rate is 0.5 (0.2 + 0.8 / 2) = 0.3; it starts at 0.5 * 0.4, and is 0 before the first call.
    "cosine between ratios": (cosine(4, 0.4, 2, 0.2, "linear"), [0, 0.2, 0.35, 0.3, 0.1, 0.1, 0.1]),
    "cosine after log": (cosine(6, 0.0, 4, 0.0), [0, 0, 0.25, 0.5 * 0.7924812503605781, 0.5, 0.25, 0, 0]),
    "cosine without a decay": (cosine(2, 0.0, 2, 0.2, "linear"), [0, 0, 0.25, 0.1, 0.1]),
}


@each("name", WARMUP_TABLES)
def test_tables_of_deepspeeds_schedules(name: str) -> None:
    schedule, expected = WARMUP_TABLES[name]
    found = [rate_of(schedule, updates, BASE) for updates in range(len(expected))]
    assert found == pytest.approx(expected, rel=1e-14, abs=1e-15)


def test_defaults() -> None:
    """The default rate rises with the logarithm for a thousand steps, to 0.001 or the optimizer's own rate."""
    found = rates("WarmupLR", 1001)
    assert found[32] == pytest.approx(0.001 * 5 * math.log(2) / (3 * math.log(10)), rel=1e-14)
    assert found[999] < found[1000] == pytest.approx(0.001, rel=1e-14)
    assert rates("WarmupDecayLR", 2002, total_num_steps=3000)[2001] == pytest.approx(0.0005, rel=1e-14)
    assert rates("WarmupCosineLR", 2001, total_num_steps=2000)[2000] == pytest.approx(BASE * 0.0001, rel=1e-12)


def deepspeed(kind: str, call: int, base: float, params: dict[str, Any]) -> float:
    """Return the rate that DeepSpeed's scheduler sets in call number `call`, by its documentation and sources."""
    warmup = max(2, params["warmup_num_steps"])

    def gamma(after: float) -> float:
        if call >= warmup:
            return after
        return call / warmup if params["warmup_type"] == "linear" else math.log(call + 1) / math.log(warmup)

    total = params.get("total_num_steps", 0)
    if kind == "WarmupCosineLR":
        part = (1 + math.cos(math.pi * min(1.0, (call - warmup + 1) / max(1, total - warmup)))) / 2
        low = params["cos_min_ratio"] if call >= warmup else params["warmup_min_ratio"]
        return base * (low + (1 - low) * gamma(part))
    after = 1.0 if kind == "WarmupLR" else max(0.0, (total - call) / max(1.0, total - warmup))
    return params["warmup_min_lr"] + (params["warmup_max_lr"] - params["warmup_min_lr"]) * gamma(after)


@given(
    kind=st.sampled_from(["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]),
    warmup=st.integers(1, 50),
    more=st.integers(0, 80),
    warmup_type=st.sampled_from(["log", "linear"]),
    low=st.floats(0, 0.5),
)
def test_deepspeeds_formulas(kind: str, warmup: int, more: int, warmup_type: str, low: float) -> None:
    params: dict[str, Any] = {"warmup_num_steps": warmup, "warmup_type": warmup_type}
    params |= {} if kind == "WarmupLR" else {"total_num_steps": warmup + more}
    params |= (
        {"warmup_min_ratio": low, "cos_min_ratio": low / 3}
        if kind == "WarmupCosineLR"
        else {"warmup_min_lr": low, "warmup_max_lr": 0.75}
    )
    found = rates(kind, 140, **params)
    expected = [deepspeed(kind, call, BASE, params) for call in range(139)]
    assert found[1:] == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert found[0] == (0.0 if kind == "WarmupCosineLR" else low)


@given(
    kind=st.sampled_from(["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]),
    warmup=st.integers(1, 50),
    total=st.integers(1, 80),
    warmup_type=st.sampled_from(["log", "linear"]),
)
def test_deepspeeds_rise_then_fall_within_limits(kind: str, warmup: int, total: int, warmup_type: str) -> None:
    params: dict[str, Any] = {"warmup_num_steps": warmup, "warmup_type": warmup_type}
    params |= {} if kind == "WarmupLR" else {"total_num_steps": total}
    found = rates(kind, 141, base=0.001, **params)
    turn = max(2, warmup) + 1
    rising, falling = found[:turn], found[turn:]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert found[0] == found[1] == 0.0 and max(found) <= 0.001 * (1 + 1e-12)
    assert found[-1] == pytest.approx({"WarmupLR": 0.001, "WarmupDecayLR": 0.0, "WarmupCosineLR": 1e-7}[kind])


# --- DeepSpeed's sweeps -----------------------------------------------------------------------------------------------


def test_a_range_test_rises_without_an_end() -> None:
    params = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    assert rates("LRRangeTest", 6, **params) == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.35], rel=1e-14)
    stairs = rates("LRRangeTest", 9, lr_range_test_staircase=True, **params)
    assert stairs == pytest.approx([0.1] * 4 + [0.3] * 4 + [0.5], rel=1e-14)
    assert rates("LRRangeTest", 4001)[::2000] == pytest.approx([0.001, 0.002, 0.003], rel=1e-14)


def cycle(**params: Any) -> SchedulerChoice:
    sizes = {"cycle_first_step_size": 4, "cycle_second_step_size": 2}
    return choice("OneCycle", **{"cycle_min_lr": 0.2, "cycle_max_lr": 1.0, **sizes, **params})


# Rates of updates 0, 1, 2, ...: 4 steps up and 2 down, and then 0.2 / (1 + time).
CYCLE_TABLES: dict[str, tuple[SchedulerChoice, list[float]]] = {
    "straight": (cycle(), [0.2, 0.4, 0.6, 0.8, 1.0, 0.6, 0.2, 0.2, 0.2]),
    "halves of one length": (cycle(cycle_second_step_size=None), [0.2, 0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
    "a rise alone": (cycle(cycle_second_step_size=0), [0.2, 0.4, 0.6, 0.8, 0.2, 0.2]),
    "in two stairs": (cycle(cycle_first_stair_count=2), [0.2, 0.2, 0.6, 0.6, 1.0, 0.6, 0.2, 0.2]),
    "in one stair down": (cycle(cycle_second_stair_count=1), [0.2, 0.4, 0.6, 0.8, 1.0, 0.2, 0.2, 0.2]),
    "decaying": (cycle(decay_lr_rate=3.0, decay_step_size=6), [0.2, 0.4, 0.6, 0.8, 1, 0.6, 0.2, 0.2 / 1.5, 0.1, 0.08]),
    "decay without a length": (cycle(decay_lr_rate=3.0), [0.2, 0.4, 0.6, 0.8, 1.0, 0.6, 0.2, 0.2]),
}


@each("name", CYCLE_TABLES)
def test_tables_of_a_cycle(name: str) -> None:
    schedule, expected = CYCLE_TABLES[name]
    found = [rate_of(schedule, updates, BASE) for updates in range(len(expected))]
    assert found == pytest.approx(expected, rel=1e-14)


def test_a_cycles_momentum_moves_against_its_rate() -> None:
    """The first update has the lowest one, since it comes before DeepSpeed's first call."""
    moving = cycle(decay_mom_rate=0.1, decay_step_size=2)
    found = [momentum_of(moving, updates) for updates in range(9)]
    assert found == pytest.approx([0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9 * 1.05, 0.9 * 1.1], rel=1e-14)
    assert momentum_of(cycle(cycle_momentum=False), 3) is None and momentum_of(choice("WarmupLR"), 3) is None
    with pytest.raises(ConfigError, match=r"a momentum of 1.035 at update 9 with decay_mom_rate 0.1"):
        momentum_of(moving, 9)


def documented_sweep(kind: str, call: int, own: dict[str, Any]) -> tuple[float, float | None]:
    """Return the rate and the momentum that call number `call` of DeepSpeed's schedule sets, by its documentation."""
    if kind == "LRRangeTest":
        interval = (call + 1) / own["lr_range_test_step_size"]
        interval = math.floor(interval) if own["lr_range_test_staircase"] else interval
        return own["lr_range_test_min_lr"] * (1 + own["lr_range_test_step_rate"] * interval), None
    first, second = own["cycle_first_step_size"], own["cycle_second_step_size"]
    total, top, low = first + second, own["cycle_max_mom"], own["cycle_min_mom"]
    if call >= total:
        interval = (call - total + 1) / own["decay_step_size"]
        return own["cycle_min_lr"] / (1 + own["decay_lr_rate"] * interval), top * (1 + own["decay_mom_rate"] * interval)
    at = (call + 1) % total
    part, stairs = (
        (Fraction(at, first), own["cycle_first_stair_count"])
        if at <= first
        else (Fraction(total - at, second), own["cycle_second_stair_count"])
    )
    height = float(Fraction(math.floor(part * stairs), stairs)) if stairs else float(part)
    spread = own["cycle_max_lr"] - own["cycle_min_lr"]
    return own["cycle_min_lr"] + spread * height, top - (top - low) * height


@given(
    kind=st.sampled_from(["LRRangeTest", "OneCycle"]),
    sizes=st.tuples(st.integers(1, 30), st.integers(0, 30), st.integers(1, 30)),
    stairs=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    decays=st.floats(0, 0.5),
    is_staircase=st.booleans(),
)
def test_deepspeeds_sweeps(
    kind: str, sizes: tuple[int, int, int], stairs: tuple[int, int], decays: float, is_staircase: bool
) -> None:
    names = ("cycle_first_step_size", "cycle_second_step_size", "decay_step_size")
    cycles = {**dict(zip(names, sizes, strict=True)), "decay_lr_rate": decays, "decay_mom_rate": decays / 1000}
    cycles |= {"cycle_first_stair_count": stairs[0], "cycle_second_stair_count": stairs[1], "cycle_min_mom": 0.5}
    cycles |= {"cycle_min_lr": 0.1, "cycle_max_lr": 0.7}
    test = {"lr_range_test_step_size": sizes[0], "lr_range_test_step_rate": decays}
    made = choice(kind, **(cycles if kind == "OneCycle" else {**test, "lr_range_test_staircase": is_staircase}))
    for call in range(90):
        rate, momentum = documented_sweep(kind, call, dict(made.params))
        assert rate_of(made, call + 1, BASE) == pytest.approx(rate, rel=1e-12)
        assert momentum_of(made, call + 1) == (None if momentum is None else pytest.approx(momentum, rel=1e-12))


# --- schedules of a run -----------------------------------------------------------------------------------------------

TABLES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "linear, no warm-up": ({"style": "linear"}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]),
    "linear to a minimum": ({"style": "linear", "minimum": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
    "linear, warm-up": ({"style": "linear", "warmup_steps": 2, "decay_steps": 6}, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0]),
    "cosine": ({"style": "cosine"}, [1.0, 0.5 + ROOT, 0.5, 0.5 - ROOT, 0.0, 0.0]),
    "cosine, warm-up": ({"style": "cosine", "warmup_steps": 2}, [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]),
    "constant": ({"style": "constant", "minimum": 0.1, "warmup_steps": 2}, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    "from a rate above zero": (
        {"style": "constant", "warmup_steps": 4, "decay_steps": 6, "warmup_init": 0.2},
        [0.2, 0.4, 0.6, 0.8, 1, 1],
    ),
    "log": ({"style": "constant", "warmup_steps": 8, "decay_steps": 9, "warmup_type": "log"}, [*EIGHTH, 1]),
    "log before a decay": (
        {"style": "linear", "warmup_steps": 4, "decay_steps": 6, "warmup_type": "log", "minimum": 0.1},
        [0, 0.5, 0.7924812503605781, 1, 1, 0.55, 0.1, 0.1],
    ),
    # 2.5 steps of warm-up keep the fraction of a step.
    "warm-up of a fraction": ({"style": "linear", "warmup_steps": 2.5, "decay_steps": 5}, [0.0, 0.4, 0.8, 0.8, 0.4, 0]),
}


def schedule(**changes: Any) -> LearningRate:
    fields = {"peak": 1.0, "minimum": 0.0, "style": "linear", "warmup_steps": 0, "decay_steps": 4}
    return LearningRate(**{**fields, **changes})


@each("name", TABLES)
def test_tables_of_a_runs_schedules(name: str) -> None:
    fields, expected = TABLES[name]
    rate = schedule(**fields)
    assert [rate.at(step) for step in range(len(expected))] == pytest.approx(expected, abs=1e-15)


def megatron(
    samples: int,
    *,
    peak: float,
    minimum: float,
    style: str,
    warmup: float,
    decay: float,
    fall: float = 1,
    how: str = "",
) -> float:
    """Return Megatron-LM's rate after `samples` samples; `warmup`, `decay` and `fall` are in samples too."""
    if warmup > 0 and samples <= warmup:
        return peak / warmup * samples
    if style == "constant":
        return peak
    if samples > decay:
        return minimum
    if style == "inverse-square-root":
        return max(minimum, peak * max(warmup, 1) ** 0.5 / max(samples, 1) ** 0.5)
    progress = (samples - warmup) / (decay - warmup)
    if style == "WSD":
        style, progress = how, max(samples - (decay - fall), 0) / fall
    if style == "minus_sqrt":
        return minimum + (peak - minimum) * (1 - progress**0.5)
    if style == "exponential":
        return minimum + (peak - minimum) * (2 ** (1 - progress) - 1)
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
    found = [rate.at(step) for step in range(decay + 3)]
    turn = math.floor(warmup * decay)
    assert all(a <= b for a, b in pairwise(found[: turn + 1]))
    assert all(a >= b - 1e-15 for a, b in pairwise(found[turn + 1 :]))
    assert all(0 <= value <= 1 + 1e-15 for value in found)
    assert found[-1] == (1.0 if style == "constant" else minimum)


def test_from_config() -> None:
    whole_run = OptimizerConfig(lr=3e-4, min_lr=3e-5, lr_decay_style="cosine", lr_warmup_iters=10)
    assert LearningRate.from_config(whole_run, RunLength(100)) == LearningRate(3e-4, 3e-5, "cosine", 10, 100)
    own_decay = OptimizerConfig(lr=3e-4, lr_decay_iters=50, lr_warmup_fraction=0.05)
    assert LearningRate.from_config(own_decay, RunLength(100)) == LearningRate(3e-4, 0.0, "linear", 2.5, 50)


TOKENS = 16  # of a sample
RAMP = StepSizes((0, 10, 40), (2, 4, 6))


@each("sizes", [RAMP, StepSizes.constant(4)], ids=["ramp", "constant"])
@each("style", ["linear", "cosine", "constant", "inverse-square-root", *(f"WSD {how}" for how in WSD_STYLES)])
@each(
    ("settings", "warmup", "decay"),
    [
        ({}, 0, 120),
        ({"lr_decay_samples": 100, "lr_warmup_samples": 13}, 13, 100),
        ({"lr_decay_tokens": 90 * TOKENS + 7, "lr_warmup_tokens": 100}, 100 / TOKENS, 90 + 7 / TOKENS),
        ({"lr_decay_samples": 100, "lr_warmup_fraction": 0.125}, 12.5, 100),
        ({"lr_decay_tokens": 90 * TOKENS, "lr_warmup_iters": 3}, None, 90),
        ({"lr_warmup_samples": 9}, 9, 120),
    ],
    ids=str,
)
def test_lengths_in_samples_and_tokens(
    settings: dict[str, Any], warmup: float | None, decay: float, style: str, sizes: StepSizes
) -> None:
    """Every step's rate is that of Megatron-LM after the samples before it; the run's 120 samples are the default."""
    style, _, how = style.partition(" ")
    settings = {**settings, "lr_decay_style": style}
    settings |= {"lr_wsd_decay_samples": 33, "lr_wsd_decay_style": how} if how else {}
    config = OptimizerConfig(lr=1.0, min_lr=0.1, **settings)
    run = RunLength(sizes.steps_until(120), sizes, 120, TOKENS)
    rate, consumed = LearningRate.from_config(config, run), 0
    length = sizes.samples_after(3) if warmup is None else warmup
    for step in range(40):
        lengths = {"warmup": length, "decay": decay, "fall": 33.0}
        expected = megatron(consumed, peak=1.0, minimum=0.1, style=style, how=how, **lengths)
        assert rate.at(rate.progress(step, consumed)) == pytest.approx(expected, rel=1e-12)
        consumed += sizes.at(consumed)


@each("sizes", [RAMP, StepSizes.constant(4)], ids=["ramp", "constant"])
@each("style", ["linear", "cosine"])
def test_weight_decay_that_increases(style: str, sizes: StepSizes) -> None:
    """It is Megatron-LM's after the same samples, over the length of the run, also where that is given in steps."""
    config = OptimizerConfig(
        lr=1.0, weight_decay_incr_style=style, start_weight_decay=0.1, end_weight_decay=0.5, lr_decay_iters=9
    )
    run = RunLength(20, sizes)
    rate, consumed = LearningRate.from_config(config, run), 0
    for step in range(30):
        done = min(consumed / sizes.samples_after(20), 1)
        part = done if style == "linear" else 0.5 * (math.cos(math.pi * (1 - done)) + 1)
        assert rate.weight_decay_at(rate.progress(step, consumed)) == pytest.approx(0.1 + 0.4 * part, rel=1e-12)
        consumed += sizes.at(consumed)
    assert reconcile(rate, rate.to_json(), config) == rate
    other = LearningRate.from_config(replace(config, end_weight_decay=0.6), run)
    with pytest.raises(CheckpointError, match="weight decay"):
        reconcile(other, rate.to_json(), config)
    constant = LearningRate.from_config(OptimizerConfig(lr=1.0), run)
    assert constant.weight_decay_at(5) is None
    there = replace(config, use_checkpoint_opt_param_scheduler=True)
    assert reconcile(rate, other.to_json(), there) == other
    assert reconcile(rate, {}, config) == rate  # an imported checkpoint has none
    with pytest.raises(CheckpointError, match="has no learning-rate schedule"):
        reconcile(rate, {}, there)
    with pytest.raises(CheckpointError, match="--weight-decay-incr-style constant; the checkpoint"):
        reconcile(constant, rate.to_json(), there)


def test_a_decoupled_rate_has_the_same_shape_between_ends_of_its_own() -> None:
    settings = {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "lr_decay_iters": 9}
    config = OptimizerConfig(lr=1.0, min_lr=0.1, decoupled_lr=0.5, decoupled_min_lr=0.2, **settings)
    rate = LearningRate.from_config(config, RunLength(9))
    alone = LearningRate.from_config(OptimizerConfig(lr=0.5, min_lr=0.2, **settings), RunLength(9))
    plain = LearningRate.from_config(OptimizerConfig(lr=1.0, min_lr=0.1, **settings), RunLength(9))
    assert [rate.decoupled_at(step) for step in range(12)] == [alone.at(step) for step in range(12)]
    assert [rate.at(step) for step in range(12)] == [plain.at(step) for step in range(12)]
    assert alone.decoupled_at(3) is None and reconcile(rate, rate.to_json(), config) == rate
    with pytest.raises(CheckpointError, match="--decoupled-lr"):
        reconcile(rate, plain.to_json(), config)
    with pytest.raises(CheckpointError, match="in place of another one"):
        reconcile(rate, plain.to_json(), replace(config, use_checkpoint_opt_param_scheduler=True))
    same = LearningRate.from_config(replace(config, decoupled_min_lr=None), RunLength(9))
    assert same.decoupled_at(9) == pytest.approx(0.1)


def test_a_fall_in_steps_is_the_last_ones_of_a_ramp() -> None:
    config = OptimizerConfig(lr=1.0, lr_decay_style="WSD", lr_wsd_decay_iters=3, lr_wsd_decay_style="linear")
    for sizes in (RAMP, StepSizes.constant(4)):
        rate, steps = LearningRate.from_config(config, RunLength(12, sizes)), range(13)
        found = [rate.at(rate.progress(step, sizes.samples_after(step))) for step in steps]
        assert found == pytest.approx([1.0] * 10 + [2 / 3, 1 / 3, 0.0])
    with pytest.raises(ConfigError, match="a fall of 5 steps in a decay of 4"):
        schedule(style="WSD", fall_steps=5)


@each("style", ["linear", "cosine", "WSD", "inverse-square-root", "constant"])
def test_a_schedule_in_steps_goes_on_in_samples(style: str) -> None:
    """A checkpoint whose lengths are steps goes on with --train-samples of the same steps, and the other way."""
    config = OptimizerConfig(
        lr=1.0, min_lr=0.1, lr_decay_style=style, lr_warmup_iters=3, weight_decay_incr_style="linear",
        start_weight_decay=0.1, end_weight_decay=0.5, lr_wsd_decay_iters=5 if style == "WSD" else None,
    )  # fmt: skip
    sizes = StepSizes.constant(4)
    steps = LearningRate.from_config(config, RunLength(20, sizes))
    samples = LearningRate.from_config(config, RunLength(20, sizes, 80))
    assert (steps.unit, samples.unit) == ("steps", "samples")
    for step in range(24):
        assert steps.at(step) == samples.at(4 * step) and steps.weight_decay_at(step) == samples.weight_decay_at(
            4 * step
        )
    assert reconcile(samples, steps.to_json(), config, step_size=4) == samples
    assert reconcile(steps, samples.to_json(), config, step_size=4) == steps
    older = {name: value for name, value in steps.to_json().items() if name not in ("unit", "fall_steps", "fall_style")}
    if style != "WSD":
        assert reconcile(samples, older, config, step_size=4) == samples
    for size in (None, 5):
        with pytest.raises(CheckpointError, match="lengths in samples; the checkpoint was saved with steps"):
            reconcile(samples, steps.to_json(), config, step_size=size)


@pytest.mark.parametrize(("warmup", "shape", "step"), [(5, "log", 3), (0, "linear", 3)])
def test_shapes_that_differ_in_samples_are_no_equals(warmup: int, shape: str, step: int) -> None:
    kind = {"peak": 1.0, "minimum": 0.0, "style": "inverse-square-root", "warmup_type": shape}
    steps = LearningRate(warmup_steps=warmup, decay_steps=20, **kind)
    samples = LearningRate(warmup_steps=4 * warmup, decay_steps=80, unit="samples", **kind)
    assert steps.at(step) != samples.at(4 * step)
    with pytest.raises(CheckpointError, match="lengths in samples"):
        reconcile(samples, steps.to_json(), OptimizerConfig(lr=1.0), step_size=4)


def test_a_schedule_in_samples_is_the_same_for_every_batch_size() -> None:
    """A run that is given in samples may be resumed with another global batch; one in steps has the same steps."""
    config = OptimizerConfig(lr=1.0, lr_warmup_fraction=0.1)
    small, large = (RunLength(120 // size, StepSizes.constant(size), 120) for size in (2, 4))
    before = LearningRate.from_config(config, small)
    assert reconcile(LearningRate.from_config(config, large), before.to_json(), config) == before
    steps = replace(config, lr_decay_iters=20)
    assert LearningRate.from_config(steps, small) == LearningRate.from_config(steps, large)
    with pytest.raises(CheckpointError, match=r"--lr-decay-samples .* 100; the checkpoint was saved with 120"):
        reconcile(LearningRate.from_config(replace(config, lr_decay_samples=100), small), before.to_json(), config)


def test_sweeps_of_a_run() -> None:
    """A sweep's rates are a run's --lr and --min-lr; it is the same however long the run is."""
    settings = OptimizerConfig(
        lr=1.0, min_lr=0.2, lr_decay_style="OneCycle", lr_decay_params=("cycle_first_step_size=4",)
    )
    run = LearningRate.from_config(settings, RunLength(3))
    assert [run.at(step) for step in (0, 1, 4, 7, 8, 9)] == pytest.approx([0.2, 0.4, 1.0, 0.4, 0.2, 0.2])
    assert run.momentum(4) == pytest.approx(0.8) and reconcile(run, run.to_json(), settings) == run
    longer = LearningRate.from_config(settings, RunLength(7))
    assert reconcile(longer, run.to_json(), settings) == longer
    other = LearningRate.from_config(replace(settings, lr_decay_params=("cycle_first_step_size=5",)), RunLength(3))
    with pytest.raises(CheckpointError, match="--lr-decay-params"):
        reconcile(other, run.to_json(), settings)
    rising = OptimizerConfig(lr=0.1, lr_decay_style="LRRangeTest", lr_decay_params=("lr_range_test_step_size=2",))
    found = LearningRate.from_config(rising, RunLength(9))
    assert (found.at(0), found.at(4)) == pytest.approx((0.1, 0.3)) and found.momentum(4) is None


@each(
    ("words", "message"),
    [
        (("cycle_max_lr=1",), r"--lr-decay-params: cycle_max_lr: 1(?s:.*)setting of its own(?s:.*)--lr"),
        (("cycle_momentm=0.3",), r"--lr-decay-params: cycle_momentm: 0.3(?s:.*)cycle_momentum"),
        (("cycle_min_mom",), r"--lr-decay-params cycle_min_mom(?s:.*)a name and its value"),
        (("cycle_min_mom=0.95",), r"cycle_min_mom: 0.95 with cycle_max_mom: 0.9"),
    ],
)
def test_wrong_parameters_of_a_sweep(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LearningRate.from_config(
            OptimizerConfig(lr=1.0, lr_decay_style="OneCycle", lr_decay_params=words), RunLength(3)
        )


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


def test_a_checkpoint_without_the_warm_ups_start_and_shape_had_the_plain_one() -> None:
    saved = {
        key: value
        for key, value in schedule().to_json().items()
        if not key.startswith("warmup_") or key == "warmup_steps"
    }
    assert reconcile(schedule(), saved, OptimizerConfig(lr=1.0)) == schedule()
    with pytest.raises(CheckpointError, match="--lr-warmup-type log; the checkpoint was saved with linear"):
        reconcile(schedule(warmup_type="log"), saved, OptimizerConfig(lr=1.0))


# --- the same schedule in a run and in the library --------------------------------------------------------------------


@given(
    style=st.sampled_from(["linear", "cosine", "constant", "inverse-square-root", "WSD"]),
    shape=st.sampled_from(["linear", "log"]),
    warmup=st.integers(0, 20),
    more=st.integers(1, 40),
    low=st.floats(0, BASE),
)
def test_the_library_has_a_runs_schedules_by_name(style: str, shape: str, warmup: int, more: int, low: float) -> None:
    fall = {"fall_steps": more} if style == "WSD" else {}
    run = LearningRate(BASE, low / 2, style, warmup, warmup + more, low, shape, **fall)
    params = {"lr_warmup_iters": warmup, "lr_warmup_init": low, "lr_warmup_type": shape}
    params |= {} if style == "constant" else {"lr_decay_iters": warmup + more, "min_lr": low / 2}
    params |= {"lr_wsd_decay_iters": more} if style == "WSD" else {}
    assert rates(style, 70, **params) == [run.at(step) for step in range(70)]


@pytest.mark.parametrize(
    ("style", "iterations"), [("constant", (5,)), ("linear", (5, 23)), ("cosine", (5, 23))], ids=str
)
def test_transformers_schedules(style: str, iterations: tuple[int, ...]) -> None:
    transformers = pytest.importorskip("transformers")  # slow to import, so no other test waits for it
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = getattr(transformers, f"get_{style}_schedule_with_warmup")(optimizer, *iterations)
    theirs = []
    for _ in range(30):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    params = {"lr_warmup_iters": 5} | ({} if style == "constant" else {"lr_decay_iters": 23})
    # transformers' cosine rises again after its end.
    count = 24 if style == "cosine" else 30
    assert rates(style, count, **params) == pytest.approx(theirs[:count], rel=1e-12, abs=1e-15)
