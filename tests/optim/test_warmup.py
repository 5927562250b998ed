"""DeepSpeed's schedules against tables worked out by hand, and what is refused."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.errors import ConfigError
from megazero.optim.warmup import SCHEDULES, WarmupCosineLR, WarmupDecayLR, WarmupLR, make_schedule

BASE = 0.5  # the optimizer's own rate
# log(step + 1) / log(8) for steps 0 to 8: exact at 0, 1, 3 and 7, where step + 1 is a power of two.
EIGHTH = [0, 1 / 3, 0.5283208335737187, 2 / 3, 0.7739760316291208, 0.8616541669070520, 0.9357849740192014, 1, 1]
ROOT = math.sqrt(0.5) / 2

# Rates at steps -1, 0, 1, 2, ...
TABLES: dict[str, tuple[Any, list[float]]] = {
    "log": (WarmupLR(0.0, 1.0, 8), [0, *EIGHTH, 1]),
    "log between two rates": (WarmupLR(0.2, 0.5, 8), [0.2, *(0.2 + 0.3 * part for part in EIGHTH), 0.5]),
    "linear": (WarmupLR(0.0, 1.0, 4, "linear"), [0, 0, 0.25, 0.5, 0.75, 1, 1]),
    "linear to the optimizer's rate": (WarmupLR(0.1, None, 4, "linear"), [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5]),
    # One step of warm-up counts as two.
    "log of two steps": (WarmupLR(0.0, 1.0, 1), [0, 0, 1, 1]),
    "linear of two steps": (WarmupLR(0.0, 1.0, 1, "linear"), [0, 0, 0.5, 1, 1]),
    # 4 steps up, 5 down: at step 9 it is over.
    "decay": (WarmupDecayLR(9, 0.0, 1.0, 4, "linear"), [0, 0, 0.25, 0.5, 0.75, 1, 0.8, 0.6, 0.4, 0.2, 0, 0, 0]),
    "decay to the start rate": (WarmupDecayLR(4, 0.2, 1.0, 2, "linear"), [0.2, 0.2, 0.6, 1.0, 0.6, 0.2, 0.2]),
    # log(step + 1) / log 4 is 0, 1/2, 0.792..., 1: the peak stands for two steps.
    "decay after log": (WarmupDecayLR(6, 0.0, 1.0, 4), [0, 0, 0.5, 0.7924812503605781, 1, 1, 0.5, 0, 0]),
    "decay to the optimizer's rate": (WarmupDecayLR(4, 0.0, None, 2, "linear"), [0, 0, 0.25, 0.5, 0.25, 0]),
    "warm-up longer than the run": (WarmupDecayLR(2, 0.1, 1.0, 4, "linear"), [0.1, 0.1, 0.325, 0.55, 0.775, 0.1, 0.1]),
    # Parts of 0.5; 2 steps up, 4 down by cos(pi/4), cos(pi/2), ...: the end comes at step 5 of 6.
    "cosine": (
        WarmupCosineLR(6, 0.0, 2, 0.0, "linear"),
        [0, 0, 0.25, BASE * (0.5 + ROOT), 0.25, BASE * (0.5 - ROOT), 0, 0, 0],
    ),
    # 0.5 (0.2 + 0.8 / 2) = 0.3 half way down; the start is 0.5 * 0.4, and nothing at all before the first call.
    "cosine between ratios": (WarmupCosineLR(4, 0.4, 2, 0.2, "linear"), [0, 0.2, 0.35, 0.3, 0.1, 0.1, 0.1]),
    "cosine after log": (WarmupCosineLR(6, 0.0, 4, 0.0), [0, 0, 0.25, 0.5 * 0.7924812503605781, 0.5, 0.25, 0, 0]),
    "cosine without a decay": (WarmupCosineLR(2, 0.0, 2, 0.2, "linear"), [0, 0, 0.25, 0.1, 0.1]),
}


@pytest.mark.parametrize("name", TABLES)
def test_literal_tables(name: str) -> None:
    schedule, expected = TABLES[name]
    rates = [schedule.rate(step, BASE) for step in range(-1, len(expected) - 1)]
    assert rates == pytest.approx(expected, rel=1e-14, abs=1e-15)


def test_defaults() -> None:
    """A thousand steps by the logarithm, up to 0.001 or the optimizer's own rate."""
    assert WarmupLR().rate(31, BASE) == pytest.approx(0.001 * 5 * math.log(2) / (3 * math.log(10)), rel=1e-14)
    assert WarmupLR().rate(998, BASE) < WarmupLR().rate(999, BASE) == pytest.approx(0.001, rel=1e-14)
    assert WarmupDecayLR(3000).rate(2000, BASE) == pytest.approx(0.0005, rel=1e-14)
    assert WarmupCosineLR(2000).rate(1999, BASE) == pytest.approx(BASE * 0.0001, rel=1e-12)


@given(
    kind=st.sampled_from(sorted(SCHEDULES)),
    warmup=st.integers(1, 50),
    total=st.integers(1, 80),
    warmup_type=st.sampled_from(["log", "linear"]),
)
def test_rises_then_falls_within_limits(kind: str, warmup: int, total: int, warmup_type: str) -> None:
    params: dict[str, Any] = {"warmup_num_steps": warmup, "warmup_type": warmup_type}
    params |= {} if kind == "WarmupLR" else {"total_num_steps": total}
    schedule = make_schedule(kind, params)
    rates = [schedule.rate(step, 0.001) for step in range(-1, 140)]
    turn = max(2, warmup) + 1
    rising, falling = rates[:turn], rates[turn:]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert rates[0] == rates[1] == 0.0 and max(rates) <= 0.001 * (1 + 1e-12)
    assert rates[-1] == pytest.approx({"WarmupLR": 0.001, "WarmupDecayLR": 0.0, "WarmupCosineLR": 1e-7}[kind])


def test_made_by_name() -> None:
    params = {"total_num_steps": 1e3, "warmup_num_steps": 10, "warmup_type": "linear"}
    assert make_schedule("WarmupDecayLR", params) == WarmupDecayLR(1000, warmup_num_steps=10, warmup_type="linear")
    assert make_schedule("WarmupLR", {"warmup_max_lr": None}) == WarmupLR(warmup_max_lr=None)
    assert make_schedule("WarmupCosineLR", {"total_num_steps": 7}) == WarmupCosineLR(7)


def test_unknown_type() -> None:
    with pytest.raises(ConfigError, match=r"OneCycle(?s:.*)WarmupLR, WarmupDecayLR, WarmupCosineLR"):
        make_schedule("OneCycle", {})


def test_all_problems_at_once() -> None:
    params = {
        "warmup_min_ratio": 1.5,
        "cos_min_ratio": True,
        "warmup_num_steps": "auto",
        "warmup_type": "cubic",
        "warmup_max_lr": 1.0,
    }
    with pytest.raises(ConfigError) as caught:
        make_schedule("WarmupCosineLR", params)
    assert [problem.given for problem in caught.value.problems] == [
        "scheduler.params.warmup_max_lr",
        "scheduler.params without total_num_steps",
        "scheduler.params.warmup_min_ratio 1.5",
        "scheduler.params.cos_min_ratio True",
        "scheduler.params.warmup_num_steps 'auto'",
        "scheduler.params.warmup_type 'cubic'",
    ]


@pytest.mark.parametrize(
    "params",
    [
        {"warmup_num_steps": 0},
        {"warmup_num_steps": 2.5},
        {"warmup_num_steps": None},
        {"warmup_min_lr": -1e-3},
        {"warmup_min_lr": [0.0, 0.1]},
        {"warmup_max_lr": math.inf},
        {"warmup_max_lr": "auto"},
        {"warmup_min_lr": 0.002},  # above the default of warmup_max_lr
    ],
    ids=str,
)
def test_values_out_of_range(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WarmupLR(**params)
    with pytest.raises(ConfigError):
        make_schedule("WarmupLR", params)
