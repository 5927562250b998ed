"""Tests the translation of a DeepSpeed configuration's optimizer and schedule into settings of a run."""

import math
from typing import Any

import pytest
from support.each import each

from megazero.config.choices import OptimizerChoice
from megazero.config.engine_sections import OptimizerConfig
from megazero.config.lengths import RunLength
from megazero.dialects.deepspeed.optimizer import translate_optimizer, translate_scheduler
from megazero.dialects.deepspeed.reading import read
from megazero.dialects.deepspeed.sections import Translation, optimizer_of
from megazero.errors import Problem
from megazero.optim.schedules import LearningRate
from megazero.rules.optimizer import optimizer_choice


def translated(optimizer: dict[str, Any] | None = None, scheduler: dict[str, Any] | None = None) -> Translation:
    content = {"optimizer": optimizer, "scheduler": scheduler}
    made = Translation(read({name: value for name, value in content.items() if value is not None}, "ds.json"))
    if optimizer is not None:
        translate_optimizer(made)
    if scheduler is not None:
        translate_scheduler(made)
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
    made = translated({"type": "Adam", "params": params})
    assert said(made) == {"optimizer": "adam", "lr": 3e-4, "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1}
    assert defaults(made) == {"adam_eps": 1e-8}
    assert {item.source for item in made.written if "beta" in item.name} == {
        "ds.json: optimizer.params.betas: [0.9, 0.95]"
    }


def test_absent_parameters_have_deepspeeds_defaults_and_automatic_ones_are_left_alone() -> None:
    made = translated({"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}})
    assert said(made) == {"optimizer": "adam"} and defaults(made) == {"adam_eps": 1e-8, "weight_decay": 0.0}
    assert defaults(translated({"type": "AdamW"}))["lr"] == 1e-3


def test_without_decay_it_makes_no_difference_whether_it_is_decoupled() -> None:
    made = translated({"type": "Adam", "params": {"adam_w_mode": False, "lr": 1}})
    assert said(made) == {"optimizer": "adam", "lr": 1.0}


def as_choice(made: Translation) -> OptimizerChoice:
    """Return the optimizer of a run that has these settings and no others."""
    values = {"lr": 0.001} | defaults(made) | said(made)
    return optimizer_choice(OptimizerConfig(**values))


@each(
    "optimizer",
    [
        {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.25, "nesterov": True, "weight_decay": 0.1}},
        {"type": "SGD", "params": {"lr": 0.5}},
        {"type": "Adagrad", "params": {"lr": 0.5, "eps": 1e-9, "lr_decay": 0.1}},
        {"type": "AdamW", "params": {"amsgrad": True, "weight_decay": 0.5}},
        {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1, "betas": [0.5, 0.75]}},
        {"type": "Rprop", "params": {"etas": [0.25, 2], "step_sizes": [0.001, 1]}},
        {"type": "RMSprop", "params": {"alpha": 0.5, "centered": True, "momentum": 0.125}},
        {"type": "Lamb"},
        {"type": "Lamb", "params": {"lr": 0.5, "max_coeff": 0.3, "eps_inside_sqrt": True, "amsgrad": False}},
        {"type": "Lion"},
        {"type": "Lion", "params": {"lr": 0.5, "betas": [0.5, 0.75], "weight_decay": 0.1}},
        {"type": "NAdam", "params": {"momentum_decay": 0.5, "decoupled_weight_decay": True}},
    ],
    ids=str,
)
def test_a_run_trains_with_the_librarys_optimizer(optimizer: dict[str, Any]) -> None:
    made = translated(optimizer)
    theirs = optimizer_of(read({"optimizer": optimizer}, "ds.json"))
    ours = as_choice(made)
    assert (ours.type, ours.lr, dict(ours.params)) == (theirs.type, theirs.lr, dict(theirs.params))


@pytest.mark.parametrize(
    ("optimizer", "given"),
    [
        ({"type": "Muon"}, 'ds.json: optimizer.type: "Muon"'),
        ({"type": "AdamW", "params": {"betas": 0.9}}, "ds.json: optimizer.params.betas: 0.9"),
    ],
)
def test_other_optimizers_are_refused(optimizer: dict[str, Any], given: str) -> None:
    problem = only(translated(optimizer))
    assert problem.given == given and problem.legal


# --- schedule --------------------------------------------------------------------------------------------------------

WARMUP = {"warmup_type": "linear", "warmup_num_steps": 10}


def test_a_warm_up_alone_is_constant_afterwards() -> None:
    made = translated(scheduler={"type": "WarmupLR", "params": {**WARMUP, "warmup_max_lr": 0.5}})
    assert said(made) == {"lr_decay_style": "constant", "lr_warmup_iters": 10, "lr_warmup_type": "linear", "lr": 0.5}
    assert len(made.file.diagnostics.notices) == 1 and "one step later" in made.file.diagnostics.notices[0]


def test_a_straight_decay_ends_at_zero() -> None:
    params = {**WARMUP, "warmup_max_lr": 0.5, "total_num_steps": 100}
    made = translated(scheduler={"type": "WarmupDecayLR", "params": params})
    assert said(made) == {
        "lr_decay_style": "linear",
        "lr_warmup_iters": 10,
        "lr_warmup_type": "linear",
        "lr_decay_iters": 100,
        "min_lr": 0.0,
        "lr": 0.5,
    }


def test_a_cosine_leaves_its_ends_open_until_the_rate_is_known() -> None:
    params = {**WARMUP, "warmup_min_ratio": "auto", "cos_min_ratio": 0.1, "total_num_steps": "auto"}
    made = translated(scheduler={"type": "WarmupCosineLR", "params": params})
    assert said(made) == {"lr_decay_style": "cosine", "lr_warmup_iters": 10, "lr_warmup_type": "linear"}
    assert {name: (ratio.value, ratio.written) for name, ratio in made.ratios.items()} == {"min_lr": (0.1, True)}
    documented = translated(scheduler={"type": "WarmupCosineLR", "params": {**WARMUP, "total_num_steps": 50}})
    assert {name: (ratio.value, ratio.written) for name, ratio in documented.ratios.items()} == {
        "lr_warmup_init": (0.0, False),
        "min_lr": (0.0001, False),
    }


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 7, "decay_mom_rate": 0.0}


def test_a_cycle_sets_both_rates_of_a_run() -> None:
    adam = {"type": "Adam", "params": {"lr": 0.2}}
    made = translated(adam, {"type": "OneCycle", "params": {**CYCLE, "cycle_momentum": False}})
    written = {name: value for name, value in said(made).items() if name != "optimizer"}
    shape = ("cycle_first_step_size=7", "cycle_momentum=false")
    assert written == {"lr_decay_style": "OneCycle", "lr": 0.5, "min_lr": 0.1, "lr_decay_params": shape}
    assert [notice.partition(": gives way")[1] for notice in made.file.diagnostics.notices] == [": gives way"]
    made = translated(scheduler={"type": "OneCycle", "params": CYCLE})
    assert said(made)["lr_decay_params"] == ("cycle_first_step_size=7",)
    assert ["to 0.99" in notice for notice in made.file.diagnostics.notices] == [True]


def test_a_range_test_begins_at_the_learning_rate() -> None:
    params = {"lr_range_test_min_lr": 0.25, "lr_range_test_staircase": True}
    made = translated(scheduler={"type": "LRRangeTest", "params": params})
    shape = ("lr_range_test_staircase=true",)
    assert said(made) == {"lr_decay_style": "LRRangeTest", "lr": 0.25, "lr_decay_params": shape}
    documented = translated(scheduler={"type": "LRRangeTest"})
    assert said(documented) == {"lr_decay_style": "LRRangeTest"} and defaults(documented) == {"lr": 0.001}


def documented(kind: str, step: int, *, shape: str, start: float, floor: float) -> float:
    """Return the rate in DeepSpeed's documentation: up to 0.5 in 10 steps, then constant or down until step 37."""
    lr, warmup, total = 0.5, 10, 37
    if step < warmup:
        return start + (lr - start) * (step / warmup if shape == "linear" else math.log(step + 1) / math.log(warmup))
    if kind == "WarmupLR":
        return lr
    done = min((step - warmup) / (total - warmup), 1.0)
    if kind == "WarmupDecayLR":
        return start + (lr - start) * (1 - done)
    return lr * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)


@each("shape", ["linear", "log", None])
@each("start", [0.0, 0.125])
@each("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_runs_schedule_is_the_documented_one(kind: str, start: float, shape: str | None) -> None:
    """The rates of a translated schedule are the documented ones; shape None leaves warmup_type out of the file."""
    params: dict[str, Any] = {"warmup_num_steps": 10} | ({} if shape is None else {"warmup_type": shape})
    params |= {} if kind == "WarmupLR" else {"total_num_steps": 37}
    if kind == "WarmupCosineLR":
        params |= {"cos_min_ratio": 0.2, "warmup_min_ratio": start / 0.5}
    else:
        params |= {"warmup_max_lr": 0.5, "warmup_min_lr": start}
    made = translated(scheduler={"type": kind, "params": params})
    values = said(made)
    settings = {"lr": 0.5, "lr_decay_iters": 60} | defaults(made) | values
    settings |= {name: ratio.value * settings["lr"] for name, ratio in made.ratios.items()}
    ours = LearningRate.from_config(OptimizerConfig(**settings), RunLength(60))
    for step in range(50):
        expected = documented(kind, step, shape=shape or "log", start=start, floor=0.2)
        assert ours.at(step) == pytest.approx(expected, rel=1e-12, abs=1e-15), step


def test_a_warm_up_has_at_least_two_steps() -> None:
    for steps in (0, 1):
        params = {"warmup_num_steps": steps, "warmup_type": "linear"}
        made = translated(scheduler={"type": "WarmupLR", "params": params})
        assert said(made)["lr_warmup_iters"] == 2


def test_a_runs_own_schedule_by_name() -> None:
    params = {"lr_warmup_iters": 5, "lr_decay_iters": 20, "min_lr": 0.1}
    made = translated(scheduler={"type": "cosine", "params": params})
    assert said(made) == {"lr_decay_style": "cosine", "lr_warmup_iters": 5, "lr_decay_iters": 20, "min_lr": 0.1}
    assert defaults(made) == {"lr_warmup_init": 0.0, "lr_warmup_type": "linear"}
    assert not made.file.diagnostics.notices


def test_the_schedules_peak_counts() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    made = translated(optimizer, {"type": "WarmupLR", "params": {**WARMUP, "warmup_max_lr": 0.5}})
    assert said(made)["lr"] == 0.5 and [item.name for item in made.written].count("lr") == 1
    assert any("optimizer.params.lr: 0.1: gives way to" in notice for notice in made.file.diagnostics.notices)
    same = translated(optimizer, {"type": "WarmupLR", "params": {**WARMUP, "warmup_max_lr": 0.1}})
    assert not any("gives way" in notice for notice in same.file.diagnostics.notices)


def test_a_peak_that_is_not_said_is_a_default_beside_the_optimizers_rate() -> None:
    made = translated({"type": "AdamW", "params": {"lr": 0.1}}, {"type": "WarmupLR", "params": WARMUP})
    assert said(made)["lr"] == 0.1 and defaults(made)["lr"] == 0.001
    automatic = translated(scheduler={"type": "WarmupLR", "params": {**WARMUP, "warmup_max_lr": "auto"}})
    assert "lr" not in said(automatic) and "lr" not in defaults(automatic)


@pytest.mark.parametrize(
    ("scheduler", "given", "legal"),
    [
        ({"type": "TwoCycles"}, 'ds.json: scheduler.type: "TwoCycles"', "OneCycle"),
        ({"type": "WarmupDecayLR", "params": WARMUP}, "ds.json: scheduler.params.total_num_steps is missing", "100000"),
    ],
)
def test_other_schedules_are_refused(scheduler: dict[str, Any], given: str, legal: str) -> None:
    made = translated(scheduler=scheduler)
    assert only(made).given == given and legal in only(made).legal and made.written == []
