"""Tests what a step's time means for a training, by hand."""

from dataclasses import replace

import pytest

from megazero.planner.forecast import Forecast
from megazero.planner.machines import MACHINES
from megazero.planner.seconds import StepTime
from megazero.planner.timeline import DeviceWork, StageTime, simulate

A100 = replace(MACHINES["dgx-a100"], error=0.25)


def forecast(stages: tuple[StageTime, ...] = (), *, total_tokens: int = 0) -> Forecast:
    """Return the forecast of steps of 2 seconds and 10^6 tokens on 64 devices, of a model of 6 x 10^9 FLOPs a token."""
    step = StepTime(2.0, stages or simulate([[DeviceWork(1.5, products=1.0)]]))
    return Forecast(step, A100, 64, 10**6, 6 * 10**9, "bf16", total_tokens)


def test_rates_by_hand() -> None:
    found = forecast()
    assert found.tokens_per_second.value == 500_000
    assert found.tflops_per_device.value == pytest.approx(500_000 * 6e9 / 64 / 1e12)
    assert found.mfu.value == pytest.approx(500_000 * 6e9 / 64 / 312e12)
    assert (found.step_seconds.low, found.step_seconds.high) == (2 / 1.25, 2 * 1.25)


def test_a_training_by_hand() -> None:
    found = forecast(total_tokens=10**12)
    assert found.seconds.value == 2e6
    assert found.device_hours.value == pytest.approx(2e6 * 64 / 3600)
    assert found.kilowatt_hours.value == pytest.approx(2e6 * 64 / 3600 * 6.5 / 8)
    assert found.kilowatt_hours.high == pytest.approx(1.25 * found.kilowatt_hours.value)


def test_the_text_names_shares_and_what_binds() -> None:
    lines = list(forecast(total_tokens=10**12).lines())
    text = "\n".join(lines)
    assert "products 50 %, memory 25 %, idle at the end 25 %" in text
    assert "what binds       products" in lines
    assert "23.1 days (18.5 to 28.9)" in text  # 2e6 seconds
    assert "tokens/s         500,000 (400,000 to 625,000)" in lines
    assert not any("energy" in line or "device-hours" in line for line in forecast().lines())
    assert "2,000 ms (1,600 to 2,500)" in text


def test_the_same_figures_as_json() -> None:
    found = forecast(total_tokens=10**12).to_json()
    assert found["tokens_per_second"] == [500_000, 400_000, 625_000]
    assert found["device_hours"][0] == pytest.approx(2e6 * 64 / 3600)
    assert found["binding"] == "products"
    assert found["shares"] == {"products": 0.5, "memory": 0.25, "idle at the end": 0.25}
    assert "device_hours" not in forecast().to_json()
