"""The library's schedules have what a run's have: lengths in samples and tokens, an increase of weight decay, and a
decoupled learning rate.  They are compared with Megatron-LM's documented formulas, and with plain torch.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import each
from torch import Tensor, nn

import megazero
from megazero.config.choices import SchedulerChoice
from megazero.errors import CheckpointError, ConfigError
from megazero.library.config import load_engine_config
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.step.stepping import LearningRates

WARMUP, DECAY, INCREASE, MICRO, PASSES = 21, 63, 35, 3, 2
SAMPLES = MICRO * PASSES
PEAK, LEAST, OWN_PEAK, OWN_LEAST, DECAY_START, DECAY_END = 0.1, 0.01, 0.4, 0.2, 0.02, 0.3


def rate(done: float, peak: float, least: float) -> float:
    """Rise straight to the peak, then fall along half a cosine: `done` counts what the lengths count."""
    if done <= WARMUP:
        return peak * done / WARMUP
    if done > DECAY:
        return least
    return least + 0.5 * (math.cos(math.pi * (done - WARMUP) / (DECAY - WARMUP)) + 1.0) * (peak - least)


def weight_decay(done: float, style: str) -> float:
    """Rise from the start to the end, straight or along half a cosine, and stay there."""
    part = min(done / INCREASE, 1.0)
    part = part if style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - part)) + 1.0)
    return DECAY_START + part * (DECAY_END - DECAY_START)


def schedule(unit: str, *, scale: int = 1, style: str = "linear") -> dict[str, Any]:
    """Return the section of a schedule whose lengths count `unit`; scale: units in one of those."""
    lengths = {"lr_warmup": WARMUP, "lr_decay": DECAY, "weight_decay_incr": INCREASE}
    return {
        "type": "cosine",
        "params": {
            **{f"{name}_{unit}": scale * length for name, length in lengths.items()},
            **({"tokens_per_sample": scale} if unit == "tokens" else {}),
            "min_lr": LEAST,
            "decoupled_min_lr": OWN_LEAST,
            "weight_decay_incr_style": style,
            "start_weight_decay": DECAY_START,
            "end_weight_decay": DECAY_END,
        },
    }


def config(kind: str, scheduler: dict[str, Any], stage: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "zero": {"zero_stage": stage},
        "precision": {"precision": "fp64"},
        "optimizer": {
            "type": kind,
            "lr": PEAK,
            "params": {"weight_decay": 0.05},
            "decoupled_lr": OWN_PEAK,
            "decoupled_parameters": ["0", "2.weight"],
        },
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": PASSES,
        "scheduler": scheduler,
        **changes,
    }


def model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(3, 5)).double()


def loss(module: Any, step: int, number: int) -> Tensor:
    words = torch.randint(0, 5, (MICRO,), generator=torch.Generator().manual_seed(10 * step + number))
    return nn.functional.cross_entropy(module(words), (words + 1) % 5)


def train(engine: DataParallelEngine, steps: range) -> None:
    for step in steps:
        for number in range(PASSES):
            engine.backward(loss(engine, step, number))
            engine.step()


@pytest.mark.parametrize(
    ("unit", "scale", "per_step", "style"),
    [("iters", 1, 1, "linear"), ("samples", 1, SAMPLES, "cosine"), ("tokens", 7, SAMPLES, "linear")],
)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_training_is_that_of_plain_torch(kind: str, unit: str, scale: int, per_step: int, style: str) -> None:
    """Weights of a training are those that torch's optimizer of two groups makes by the formulas."""
    plain, engine = model(), megazero.initialize(model(), config(kind, schedule(unit, scale=scale, style=style)))
    named = dict(plain.named_parameters())
    own = [named.pop(name) for name in ("0.weight", "2.weight")]
    optimizer = getattr(torch.optim, kind)([{"params": [*named.values()]}, {"params": own}], lr=1.0)
    steps = 80 if unit == "iters" else 13
    train(engine, range(steps))
    for step in range(steps):
        for group, peak, least in zip(optimizer.param_groups, (PEAK, OWN_PEAK), (LEAST, OWN_LEAST), strict=True):
            done = per_step * step
            group.update(lr=rate(done, peak, least), weight_decay=weight_decay(done, style))
        optimizer.zero_grad()
        (sum(loss(plain, step, number) for number in range(PASSES)) / PASSES).backward()
        optimizer.step()
    for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    engine.close()


def test_a_batch_that_changes_is_counted(tmp_path: Path) -> None:
    """Samples, and no steps, move the rates, across a change of the batch and a resumption from a checkpoint."""
    engine = megazero.initialize(model(), config("SGD", schedule("samples")))
    train(engine, range(2))
    engine.set_train_batch_size(MICRO)
    for step in range(3):
        engine.backward(loss(engine, step, 0))
        engine.step()
    done = 2 * SAMPLES + 3 * MICRO
    expected = [pytest.approx(rate(done, PEAK, LEAST)), pytest.approx(rate(done, OWN_PEAK, OWN_LEAST))]
    assert engine.get_lr() == expected
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    again = megazero.initialize(model(), config("SGD", schedule("samples")))
    again.load_checkpoint(tmp_path / "saved")
    assert again.get_lr() == expected
    assert [group["weight_decay"] for group in again.optimizer.param_groups] == [
        pytest.approx(weight_decay(done, "linear"))
    ] * 2
    again.close()
    other = megazero.initialize(model(), config("SGD", schedule("iters")))
    with pytest.raises(CheckpointError, match="keeps its learning-rate schedule"):
        other.load_checkpoint(tmp_path / "saved")
    other.close()


def test_a_schedule_without_an_increase_leaves_weight_decay_alone() -> None:
    groups: list[dict[str, Any]] = [{"lr": 0.5, "weight_decay": 0.1}, {"lr": 0.5, "weight_decay": 0.0}]
    params = {"lr_warmup_iters": 2, "lr_warmup_init": 0.0, "lr_warmup_type": "linear"}
    rates = LearningRates(groups, SchedulerChoice(type="constant", params=params))
    rates.advance()
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.25, 0.1), (0.25, 0.0)]
    increase = {"style": "linear", "start": 0.0, "end": 0.4, "length": 4}
    rates = LearningRates(groups, SchedulerChoice(type="constant", params=params, weight_decay=increase))
    rates.advance()
    assert [group["weight_decay"] for group in groups] == [pytest.approx(0.1), 0.0]
    assert rates.moved == ("lr", "weight_decay")


PLAIN = {"lr_warmup_iters": 1, "lr_decay_iters": 9}


@each(
    ("params", "changes", "given", "legal"),
    [
        ({"lr_warmup_iters": 1, "lr_decay_samples": 9}, {}, "lr_warmup_iters: 1", "lr_warmup_samples"),
        ({"lr_warmup_samples": 9, "lr_decay_samples": 9}, {}, "lr_warmup_samples: 9", "lr_warmup_samples: 8"),
        ({"lr_decay_tokens": 9}, {}, "tokens_per_sample is missing", "tokens_per_sample: 100000"),
        ({**PLAIN, "start_weight_decay": 0.1}, {}, "start_weight_decay: 0.1", 'weight_decay_incr_style: "linear"'),
        (
            {**PLAIN, "weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.2},
            {},
            "weight_decay_incr_iters is missing",
            "weight_decay_incr_iters: 100000",
        ),
        (
            {
                **{"lr_decay_samples": 9, "weight_decay_incr_style": "linear", "weight_decay_incr_samples": 3},
                **{"start_weight_decay": 0.2, "end_weight_decay": 0.1},
            },
            {},
            "start_weight_decay: 0.2",
            "start_weight_decay: 0 to 0.1",
        ),
        ({**PLAIN, "decoupled_min_lr": 0.5}, {}, "decoupled_min_lr: 0.5 with", "decoupled_min_lr: 0 to 0.4"),
        (PLAIN, {"decoupled_lr": None}, "decoupled_parameters", "decoupled_lr: 0.001"),
        (PLAIN, {"decoupled_parameters": []}, "decoupled_lr: 0.4", "decoupled_parameters: "),
    ],
    ids=str,
)
def test_what_contradicts_is_refused(params: dict[str, Any], changes: dict[str, Any], given: str, legal: str) -> None:
    content = config("AdamW", {"type": "linear", "params": params})
    content["optimizer"] = {**content["optimizer"], **changes}
    with pytest.raises(ConfigError) as caught:
        load_engine_config(content)
    (problem,) = caught.value.problems
    assert given in problem.given and legal in problem.legal


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"train_micro_batch_size_per_gpu": None}, "a schedule whose lengths are samples"),
        ({"optimizer": {"type": "SGD", "lr": PEAK}}, "weight_decay_incr_style: linear"),
        ({"optimizer": {"type": "SGD", "lr": PEAK, "decoupled_lr": 1.0, "decoupled_parameters": ["3"]}}, '"3"'),
    ],
    ids=str,
)
def test_what_only_the_model_or_the_batch_shows_is_refused_too(changes: dict[str, Any], given: str) -> None:
    scheduler = schedule("samples")
    if "decoupled_lr" not in changes.get("optimizer", {"decoupled_lr": 0}):
        del scheduler["params"]["decoupled_min_lr"]
    content = {**config("SGD", scheduler), **changes}
    content = {name: value for name, value in content.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        megazero.initialize(model(), content)
    assert given in caught.value.render()
