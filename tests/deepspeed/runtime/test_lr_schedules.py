"""Tests of DeepSpeed's schedules around an optimizer, beside rates worked out by hand from its documentation."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import megazero.deepspeed as deepspeed
from megazero.deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from megazero.errors import ConfigError


def adam(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [nn.Parameter(torch.zeros(3))], "lr": rate} for rate in rates])


def rates_of(schedule: Any, updates: int) -> list[float]:
    """Return the rates of the first group's first updates, each followed by a step of the schedule, as in an engine."""
    found = []
    for _ in range(updates):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    return found


def test_rates() -> None:
    """The first two updates have the start's rate, since DeepSpeed's step number 0 comes after the first update."""
    rise = [0.0, 0.0, *(0.3 * math.log(n) / math.log(4) for n in (2, 3)), 0.3, 0.3]
    assert rates_of(WarmupLR(adam(1.0), 0.0, 0.3, 4), 6) == pytest.approx(rise)
    fall = [0.1, 0.1, 0.2, 0.3, 0.2, 0.1, 0.1]
    decay = WarmupDecayLR(
        adam(1.0), total_num_steps=4, warmup_min_lr=0.1, warmup_max_lr=0.3, warmup_num_steps=2, warmup_type="linear"
    )
    assert rates_of(decay, 7) == pytest.approx(fall)
    cosine = WarmupCosineLR(adam(0.8), 6, warmup_num_steps=2, cos_min_ratio=0.5, warmup_type="linear")
    heights = [0.5 + 0.5 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4, 4)]
    assert rates_of(cosine, 8) == pytest.approx([0.0, 0.0, 0.4, *(0.8 * height for height in heights)])
    stairs = LRRangeTest(adam(1.0), 0.1, 2, 0.5, lr_range_test_staircase=True)
    assert rates_of(stairs, 5) == pytest.approx([0.1, 0.1, 0.15, 0.15, 0.2])


def test_one_cycle_moves_the_first_beta() -> None:
    optimizer = adam(1.0)
    cycle = OneCycle(optimizer, 0.1, 0.5, cycle_first_step_size=2, cycle_min_mom=0.7, cycle_max_mom=0.9)
    betas = []
    for _ in range(5):
        betas.append(optimizer.param_groups[0]["betas"])
        cycle.step()
    assert betas == [
        pytest.approx(pair) for pair in ((0.7, 0.999), (0.8, 0.999), (0.7, 0.999), (0.8, 0.999), (0.9, 0.999))
    ]


def test_a_schedule_goes_on_from_its_state_and_has_a_rate_for_each_group() -> None:
    first = WarmupCosineLR(adam(0.2, 0.4), 9, warmup_num_steps=3)
    rates_of(first, 4)
    again = WarmupCosineLR(adam(0.2, 0.4), 9, warmup_num_steps=3)
    again.load_state_dict(first.state_dict())
    assert first.state_dict() == {"last_batch_iteration": 3}
    rates = [group["lr"] for group in again.optimizer.param_groups]
    assert rates == first.get_last_lr() == again.get_lr()
    assert rates[1] == pytest.approx(2 * rates[0]) and rates[0] > 0


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match=r"(?s)WarmupLR: params.warmup_type.*log"):
        WarmupLR(adam(1.0), warmup_type="cubic")
    with pytest.raises(ConfigError, match="total_num_steps"):
        WarmupDecayLR(adam(1.0))
    with pytest.raises(TypeError, match="warmup_min_lr"):
        WarmupLR(adam(1.0), 0.1, warmup_min_lr=0.1)
    with pytest.raises(TypeError, match="last_batch_iteration"):
        WarmupLR(adam(1.0), 0.1, 0.2, 3, "log", -1, 5)


@pytest.mark.gloo
def test_an_engine_takes_one() -> None:
    """The engine steps the schedule after each update, so that plain SGD with the same rates moves as far."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = WarmupLR(optimizer, 0.1, 0.4, 3, "linear")
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0}
    engine, *_, returned = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    for _ in range(5):
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
    assert returned is schedule
    assert model.weight.item() == pytest.approx(-(0.1 + 0.1 + 0.2 + 0.3 + 0.4))
    engine.destroy()
    deepspeed.comm.destroy_process_group()
