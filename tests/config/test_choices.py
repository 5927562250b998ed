"""Tests of choosing an optimizer and a schedule by their names and parameters in a configuration."""

from typing import Any

import pytest
import torch
from support.each import each
from support.published_optimizers import reference_class

from megazero.config.choices import (
    OptimizerChoice,
    SchedulerChoice,
    choose_optimizer,
    choose_param_groups,
    choose_scheduler,
)
from megazero.config.optimizers import OPTIMIZERS
from megazero.config.param_groups import ParamGroup
from megazero.config.schedules import SCHEDULES
from megazero.config.values import Diagnostics, Location
from megazero.errors import Problem
from megazero.optim.schedules import rate_of


def optimizer(name: Any, **params: Any) -> tuple[OptimizerChoice, Diagnostics]:
    findings = Diagnostics()
    return choose_optimizer(Location("ds.json", "optimizer"), name, params, findings, defaults={}), findings


def scheduler(name: Any, *, free: tuple[str, ...] = (), **params: Any) -> tuple[SchedulerChoice | None, Diagnostics]:
    findings, place = Diagnostics(), Location("ds.json", "scheduler")
    return choose_scheduler(place, name, params, findings, lr=0.25, may_be_auto=free), findings


def only(findings: Diagnostics) -> Problem:
    assert len(findings.problems) == 1, findings.problems
    return findings.problems[0]


@each("name", OPTIMIZERS)
def test_a_choice_makes_a_torch_optimizer(name: str) -> None:
    choice, findings = optimizer(name.upper(), lr=0.125)
    assert findings == Diagnostics() and choice.type == name
    made = reference_class(choice.type)([torch.zeros(2, requires_grad=True)], lr=choice.lr, **choice.params)
    assert made.defaults["lr"] == 0.125


def test_what_was_said_wins_over_defaults_and_auto_takes_them() -> None:
    choice, findings = optimizer("AdamW", lr="auto", betas=[0.9, 0.95], eps="auto", weight_decay=1)
    assert findings == Diagnostics()
    assert choice.lr == 1e-3 and choice.params["betas"] == (0.9, 0.95)
    assert (choice.params["eps"], choice.params["weight_decay"], choice.params["amsgrad"]) == (1e-8, 1.0, False)


def test_param_groups_are_read() -> None:
    findings = Diagnostics()
    texts = ["*.bias weight_decay=0", "layers.[01].*  lr=1e-4   weight_decay=0.5", "? lr=2"]
    assert choose_param_groups(Location("--param-groups"), texts, "SGD", findings) == (
        ParamGroup("*.bias", None, 0.0),
        ParamGroup("layers.[01].*", 1e-4, 0.5),
        ParamGroup("?", 2.0),
    )
    assert findings.problems == []


@each(
    ("kind", "text", "given", "legal"),
    [
        ("SGD", "", '--param-groups: ""', "*.bias lr=0.001 weight_decay=0"),
        ("SGD", "lr=1", '--param-groups: "lr=1"', "*.bias lr=0.001"),
        ("SGD", "*.bias", '--param-groups: "*.bias"', "*.bias lr=0.001"),
        ("SGD", "*.bias lr", "--param-groups lr", "*.bias lr=0.001"),
        ("SGD", "*.bias lr=0", "--param-groups: *.bias.lr: 0", "a number, greater than 0"),
        ("SGD", "*.bias weight_decay=-1", "--param-groups: *.bias.weight_decay: -1", "0"),
        ("SGD", "*.bias momentum=0.5", "--param-groups: *.bias.momentum: 0.5", "lr"),
        ("Rprop", "*.bias weight_decay=0", "--param-groups: *.bias.weight_decay: 0", "lr"),
    ],
)
def test_a_param_group_that_cannot_be_read(kind: str, text: str, given: str, legal: str) -> None:
    findings = Diagnostics()
    choose_param_groups(Location("--param-groups"), [text], kind, findings)
    (problem,) = findings.problems
    assert problem.given == given and legal in problem.legal


def test_what_chooses_an_implementation_earns_a_notice() -> None:
    choice, findings = optimizer("Adam", fused=True, torch_adam=True)
    assert "fused" not in choice.params and not findings.problems
    assert [notice.split(": ")[1] for notice in findings.notices] == [
        "optimizer.params.fused",
        "optimizer.params.torch_adam",
    ]


@each(
    ("name", "params", "given", "rule", "legal"),
    [
        ("Muon", {}, 'optimizer.type: "Muon"', "flat slices", "AdamW, Adam, SGD"),
        ("onebitadam", {}, 'optimizer.type: "onebitadam"', "compresses", "AdamW"),
        ("Adafactor", {"eps": [None, -1]}, "optimizer.params.eps: [null, -1]", "two numbers", "at least 0"),
        ("Adafactor", {"eps": [1e-9, None]}, "optimizer.params.eps: [1e-09, null]", "two numbers", "at least 0"),
        ("Adafactor", {"d": 0.5}, "optimizer.params.d: 0.5", "at least 1", "d: 1"),
        ("AdamW8bit", {"amsgrad": True}, "optimizer.params.amsgrad: true", "no key of this name", "betas"),
        ("LBFGS", {}, 'optimizer.type: "LBFGS"', "several times", "AdamW"),
        ("Adamm", {}, 'optimizer.type: "Adamm"', "nothing of this name", "Adam, AdamW"),
        (None, {}, "optimizer.type: null", "optimizer.type is a name", "AdamW"),
        ("SGD", {"betas": [0.9, 0.9]}, "optimizer.params.betas", "no key of this name", "lr"),
        ("SGD", {"moment": 0.9}, "optimizer.params.moment: 0.9", "no key of this name", "momentum"),
        ("AdamW", {"betas": [0.9, 1.5]}, "optimizer.params.betas: [0.9, 1.5]", "two numbers", "less than 1"),
        ("AdamW", {"eps": 0}, "optimizer.params.eps: 0", "greater than 0", "a number"),  # as --adam-eps is
        ("AdamW", {"lr": "x"}, 'optimizer.params.lr: "x"', "a number, at least 0", "a number"),
        ("SGD", {"nesterov": True}, "optimizer.params.nesterov: true with mom", "has a momentum", "momentum: 0.9"),
        (
            "SGD",
            {"nesterov": True, "momentum": 0.5, "dampening": 1},
            "optimizer.params.nesterov: true with dampening: 1",
            "no dampening",
            "dampening: 0",
        ),
        ("Rprop", {"etas": [1.5, 2]}, "optimizer.params.etas: [1.5, 2.0]", "shrinks", "[0.5, 1.2]"),
        ("Rprop", {"step_sizes": [2, 1]}, "optimizer.params.step_sizes: [2.0, 1.0]", "least", "[1e-06, 50.0]"),
    ],
)
def test_a_refused_optimizer(name: Any, params: dict[str, Any], given: str, rule: str, legal: str) -> None:
    problem = only(optimizer(name, **params)[1])
    assert problem.given.startswith(f"ds.json: {given}") and rule in problem.rule and legal in problem.legal


def test_parameters_of_a_schedule_are_complete() -> None:
    choice, findings = scheduler("warmupdecaylr", total_num_steps=5e4, last_batch_iteration=-1, warmup_type="linear")
    assert findings == Diagnostics()
    assert choice == SchedulerChoice(
        type="WarmupDecayLR",
        params={
            "total_num_steps": 50_000,
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 0.001,
            "warmup_num_steps": 1000,
            "warmup_type": "linear",
        },
    )


@each("name", SCHEDULES)
def test_a_choice_makes_a_schedule(name: str) -> None:
    length = {key: 2000 for key in ("total_num_steps", "lr_decay_iters") if key in SCHEDULES[name]}
    warmup = {"lr_warmup_iters": 1000} if "lr_warmup_iters" in SCHEDULES[name] else {}
    cycle = {"cycle_min_lr": 0.0, "cycle_max_lr": 0.001, "cycle_first_step_size": 1000} if name == "OneCycle" else {}
    test = {"lr_range_test_min_lr": 0.0005, "lr_range_test_step_size": 1000} if name == "LRRangeTest" else {}
    fall = {"lr_wsd_decay_iters": 1000} if name == "WSD" else {}
    choice, findings = scheduler(name, **length, **warmup, **cycle, **test, **fall)
    assert findings == Diagnostics() and choice is not None
    assert rate_of(choice, 1000, 0.001) == pytest.approx(0.001)


def test_a_fall_that_begins_before_the_warm_up_ends_is_refused() -> None:
    _, findings = scheduler("WSD", lr_decay_iters=10, lr_warmup_iters=4, lr_wsd_decay_iters=7)
    (problem,) = findings.problems
    assert problem.legal == "lr_wsd_decay_iters: 6" and "lr_wsd_decay_iters: 7" in problem.given


def test_an_automatic_peak_is_the_optimizers_rate() -> None:
    choice, _ = scheduler("WarmupLR", warmup_max_lr="auto", warmup_num_steps="auto")
    assert choice is not None and choice.params["warmup_max_lr"] == 0.25 and choice.params["warmup_num_steps"] == 1000


@each(
    ("name", "params", "given", "rule"),
    [
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "scheduler.params.lr_range_test_step_size: 0", "at least 1"),
        ("OneCycle", {"cycle_max_lr": 0.1}, "scheduler.params.cycle_min_lr is missing", "is in no other setting"),
        (
            "OneCycle",
            {"cycle_min_lr": 0.2, "cycle_max_lr": 0.1},
            "scheduler.params.cycle_min_lr: 0.2 with cycle_max_lr: 0.1",
            "minimum is at most",
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 0.1, "cycle_min_mom": 0.95},
            "scheduler.params.cycle_min_mom: 0.95 with cycle_max_mom: 0.9",
            "minimum is at most",
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 0.1, "cycle_max_mom": 1},
            "scheduler.params.cycle_max_mom: 1",
            "less than 1",
        ),
        ("CosineAnnealingLR", {}, 'scheduler.type: "CosineAnnealingLR"', "nothing of this name"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps is missing", "is in no other setting"),
        ("WarmupCosineLR", {"total_num_steps": "auto"}, 'scheduler.params.total_num_steps: "auto"', "no other setting"),
        ("WarmupDecayLR", {"total_num_steps": 0}, "scheduler.params.total_num_steps: 0", "at least 1"),
        ("WarmupDecayLR", {"total_num_steps": 999}, "scheduler.params.total_num_steps: 999 with warmup", "ends after"),
        ("WarmupLR", {"total_num_steps": 9}, "scheduler.params.total_num_steps: 9", "no key of this name"),
        ("WarmupLR", {"warmup_type": "cubic"}, 'scheduler.params.warmup_type: "cubic"', "one of log, linear"),
        ("WarmupLR", {"warmup_num_steps": 0.5}, "scheduler.params.warmup_num_steps: 0.5", "whole number"),
        ("WarmupLR", {"warmup_min_lr": 0.002}, "scheduler.params.warmup_min_lr: 0.002 with", "does not fall"),
        ("cosine", {}, "scheduler.params.lr_decay_iters is missing", "is in no other setting"),
        (
            "linear",
            {"lr_decay_iters": 9, "lr_warmup_iters": 9},
            "scheduler.params.lr_warmup_iters: 9 with",
            "ends before",
        ),
        ("WarmupLR", {"last_batch_iteration": 7}, "scheduler.params.last_batch_iteration: 7", "from a checkpoint"),
    ],
)
def test_a_refused_schedule(name: str, params: dict[str, Any], given: str, rule: str) -> None:
    problem = only(scheduler(name, **params)[1])
    assert problem.given.startswith(f"ds.json: {given}") and rule in problem.rule and problem.legal


def test_who_knows_the_length_may_leave_it_open() -> None:
    choice, findings = scheduler("WarmupDecayLR", free=("total_num_steps",), total_num_steps="auto")
    assert findings == Diagnostics() and choice is not None and "total_num_steps" not in choice.params
    assert len(scheduler("WarmupDecayLR", free=("total_num_steps",))[1].problems) == 1
