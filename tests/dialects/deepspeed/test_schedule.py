"""Optimizer and schedule of a DeepSpeed configuration as settings of a run."""

import math
from typing import Any

import pytest

from megazero.dialects.deepspeed.reading import read
from megazero.dialects.deepspeed.schedule import adopt_optimizer, adopt_scheduler
from megazero.dialects.deepspeed.sections import Translation
from megazero.errors import Problem
from megazero.optim.lr_schedule import LearningRate


def adopted(optimizer: dict[str, Any] | None = None, scheduler: dict[str, Any] | None = None) -> Translation:
    content = {"optimizer": optimizer, "scheduler": scheduler}
    made = Translation(read({name: value for name, value in content.items() if value is not None}, "ds.json"))
    if optimizer is not None:
        adopt_optimizer(made)
    if scheduler is not None:
        adopt_scheduler(made)
    return made


def said(made: Translation) -> dict[str, Any]:
    assert made.file.diagnostics.problems == []
    return {item.name: item.value for item in made.written}


def defaults(made: Translation) -> dict[str, Any]:
    return {item.name: item.value for item in made.defaults}


def only(made: Translation) -> Problem:
    (problem,) = made.file.diagnostics.problems
    return problem


# --- optimizer -------------------------------------------------------------------------------------------------------


def test_adams_parameters_are_settings() -> None:
    params = {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
    made = adopted({"type": "Adam", "params": params})
    assert said(made) == {"lr": 3e-4, "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1}
    assert defaults(made) == {"adam_eps": 1e-8}
    assert {item.source for item in made.written if "beta" in item.name} == {
        "ds.json: optimizer.params.betas: [0.9, 0.95]"
    }


def test_absent_parameters_have_deepspeeds_defaults_and_automatic_ones_are_left_alone() -> None:
    made = adopted({"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}})
    assert said(made) == {} and defaults(made) == {"adam_eps": 1e-8, "weight_decay": 0.0}
    assert defaults(adopted({"type": "AdamW"}))["lr"] == 1e-3


def test_without_decay_it_makes_no_difference_whether_it_is_decoupled() -> None:
    made = adopted({"type": "Adam", "params": {"adam_w_mode": False, "lr": 1}})
    assert said(made) == {"lr": 1.0}


@pytest.mark.parametrize(
    ("optimizer", "given"),
    [
        ({"type": "SGD"}, 'ds.json: optimizer.type: "SGD"'),
        ({"type": "Adagrad"}, 'ds.json: optimizer.type: "Adagrad"'),
        (
            {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}},
            'ds.json: optimizer.type: "Adam" with adam_w_mode: false and weight_decay: 0.1',
        ),
        ({"type": "AdamW", "params": {"amsgrad": True}}, "ds.json: optimizer.params.amsgrad: true"),
        ({"type": "Lamb"}, 'ds.json: optimizer.type: "Lamb"'),
        ({"type": "AdamW", "params": {"betas": 0.9}}, "ds.json: optimizer.params.betas: 0.9"),
    ],
)
def test_other_optimizers_are_refused(optimizer: dict[str, Any], given: str) -> None:
    problem = only(adopted(optimizer))
    assert problem.given == given and problem.legal


# --- schedule --------------------------------------------------------------------------------------------------------

WARMUP = {"warmup_type": "linear", "warmup_num_steps": 10}


def test_a_warm_up_alone_is_constant_afterwards() -> None:
    made = adopted(scheduler={"type": "WarmupLR", "params": {**WARMUP, "warmup_max_lr": 0.5}})
    assert said(made) == {"lr_decay_style": "constant", "lr_warmup_iters": 10, "lr": 0.5}
    assert len(made.file.diagnostics.notices) == 1 and "one step later" in made.file.diagnostics.notices[0]


def test_a_straight_decay_ends_at_zero() -> None:
    params = {**WARMUP, "warmup_max_lr": 0.5, "total_num_steps": 100}
    made = adopted(scheduler={"type": "WarmupDecayLR", "params": params})
    assert said(made) == {
        "lr_decay_style": "linear",
        "lr_warmup_iters": 10,
        "lr_decay_iters": 100,
        "min_lr": 0.0,
        "lr": 0.5,
    }


def test_a_cosine_leaves_its_floor_open_until_the_rate_is_known() -> None:
    params = {**WARMUP, "cos_min_ratio": 0.1, "total_num_steps": "auto"}
    made = adopted(scheduler={"type": "WarmupCosineLR", "params": params})
    assert said(made) == {"lr_decay_style": "cosine", "lr_warmup_iters": 10}
    assert made.floor is not None and (made.floor.ratio, made.floor.written) == (0.1, True)
    documented = adopted(scheduler={"type": "WarmupCosineLR", "params": {**WARMUP, "total_num_steps": 50}})
    assert documented.floor is not None and (documented.floor.ratio, documented.floor.written) == (0.0001, False)


def documented(kind: str, step: int, *, lr: float, warmup: int, total: int, floor: float) -> float:
    """The rate as DeepSpeed's documentation draws it: up in a straight line, then constant, down, or along a cosine."""
    if step < warmup:
        return lr * step / warmup
    if kind == "WarmupLR":
        return lr
    done = (step - warmup) / (total - warmup)
    if kind == "WarmupDecayLR":
        return lr * max(0.0, 1 - done)
    return lr * (floor + (1 - floor) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_runs_schedule_is_the_documented_one(kind: str) -> None:
    extra = {} if kind == "WarmupLR" else {"total_num_steps": 37}
    peak = {"cos_min_ratio": 0.2} if kind == "WarmupCosineLR" else {"warmup_max_lr": 0.5}
    made = adopted(scheduler={"type": kind, "params": {**WARMUP, **extra, **peak}})
    settings = {"lr": 0.5, "min_lr": 0.0, "lr_decay_iters": 60} | said(made)
    floor = 0.0 if made.floor is None else made.floor.ratio
    ours = LearningRate(
        peak=settings["lr"],
        minimum=max(settings["min_lr"], floor * settings["lr"]),
        style=settings["lr_decay_style"],
        warmup_steps=settings["lr_warmup_iters"],
        decay_steps=settings["lr_decay_iters"],
    )
    for step in range(50):
        expected = documented(kind, step, lr=0.5, warmup=10, total=37, floor=floor)
        assert ours.at(step) == pytest.approx(expected, rel=1e-12, abs=1e-15), step


def test_the_schedules_peak_counts() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    made = adopted(optimizer, {"type": "WarmupLR", "params": {**WARMUP, "warmup_max_lr": 0.5}})
    assert said(made)["lr"] == 0.5 and [item.name for item in made.written].count("lr") == 1
    assert any("optimizer.params.lr: 0.1: gives way to" in notice for notice in made.file.diagnostics.notices)
    same = adopted(optimizer, {"type": "WarmupLR", "params": {**WARMUP, "warmup_max_lr": 0.1}})
    assert not any("gives way" in notice for notice in same.file.diagnostics.notices)


def test_a_peak_that_is_not_said_is_a_default_beside_the_optimizers_rate() -> None:
    made = adopted({"type": "AdamW", "params": {"lr": 0.1}}, {"type": "WarmupLR", "params": WARMUP})
    assert said(made)["lr"] == 0.1 and defaults(made)["lr"] == 0.001
    automatic = adopted(scheduler={"type": "WarmupLR", "params": {**WARMUP, "warmup_max_lr": "auto"}})
    assert "lr" not in said(automatic) and "lr" not in defaults(automatic)


@pytest.mark.parametrize(
    ("scheduler", "given", "legal"),
    [
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
            """ds.json: scheduler.params.warmup_type: "log" (DeepSpeed's default)""",
            "--lr-decay-style constant --lr-warmup-iters 7",
        ),
        (
            {"type": "WarmupDecayLR", "params": {"warmup_type": "log", "total_num_steps": 5000}},
            'ds.json: scheduler.params.warmup_type: "log"',
            "--lr-decay-style linear --lr-warmup-iters 1000",
        ),
        (
            {"type": "WarmupLR", "params": {**WARMUP, "warmup_min_lr": 1e-5}},
            "ds.json: scheduler.params.warmup_min_lr: 1e-05",
            "warmup_min_lr: 0",
        ),
        (
            {"type": "WarmupCosineLR", "params": {**WARMUP, "warmup_min_ratio": 0.1, "total_num_steps": 99}},
            "ds.json: scheduler.params.warmup_min_ratio: 0.1",
            "--lr-decay-style cosine --lr-warmup-iters 10",
        ),
        ({"type": "OneCycle"}, 'ds.json: scheduler.type: "OneCycle"', "WarmupLR"),
        ({"type": "WarmupDecayLR", "params": WARMUP}, "ds.json: scheduler.params.total_num_steps is missing", "100000"),
    ],
)
def test_other_schedules_are_refused(scheduler: dict[str, Any], given: str, legal: str) -> None:
    made = adopted(scheduler=scheduler)
    assert only(made).given == given and legal in only(made).legal and made.written == []
