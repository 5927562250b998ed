"""Tests that what is left to a plan is the fastest of all choices that fit, and legal."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.configs import make_run
from support.each import each

from megazero.config.named import with_values
from megazero.parallel.nodes import Nodes
from megazero.planner.decide import Room, choose, homes, ladder, this_machine, walk
from megazero.planner.dry.rank import DryJob
from megazero.planner.job_plan import DryRuns, Plan
from megazero.planner.machines import MACHINES
from megazero.planner.predict import forecast_of

AUTO: dict[str, Any] = {
    "recompute_granularity": "auto",
    "partition_activations": "auto",
    "checkpoint_in_cpu": "auto",
}
SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 512,
    "micro_batch_size": 4,
    "global_batch_size": 4,
    "vocab_size": 512,
    "attention_backend": "unfused",
    "precision": "bf16",
    "lr": 1e-3,
    "eval_iters": 0,
    "mock_data": True,
}
HOMES: dict[str, Any] = {"offload_optimizer": "auto", "offload_param": "auto"}
TWO: dict[str, Any] = {"tensor_model_parallel_size": 2}
Values = tuple[str, bool | str, bool | str]


def _values(config: Any) -> Values:
    section = config.activations
    return section.recompute_granularity, section.partition_activations, section.checkpoint_in_cpu


@each(
    ("settings", "is_gpu", "expected"),
    [
        (
            {**AUTO, **TWO},
            True,
            [
                [("none", False, False)],
                [("selective", False, False)],
                [("full", False, False)],
                [("full", False, True), ("full", True, False)],
                [("full", True, True)],
            ],
        ),
        (
            {**AUTO, **TWO},
            False,
            [[(n, False, False)] for n in ("none", "selective", "full")] + [[("full", True, False)]],
        ),
        (
            {**AUTO, **TWO, "sequence_parallel": True, "checkpoint_in_cpu": False},
            True,
            [[(n, False, False)] for n in ("none", "selective", "full")],
        ),
        ({**AUTO, "recompute_granularity": "full"}, True, [[("full", False, False)], [("full", False, True)]]),
        (
            {"recompute_granularity": "auto", "checkpoint_in_cpu": True},
            True,
            [[(n, False, True)] for n in ("none", "selective", "full")],
        ),
    ],
)
def test_the_ladder_has_every_open_choice(settings: dict[str, Any], is_gpu: bool, expected: list[list[Values]]) -> None:
    found = ladder(make_run(**{**SIZES, **settings}), is_gpu=is_gpu)
    assert [[_values(config) for config in rung] for rung in found] == expected


@pytest.fixture(scope="module")
def runs() -> DryRuns:
    """Return the dry runs of all tests, which try the same choices."""
    return DryRuns()


@pytest.fixture(scope="module")
def every(runs: DryRuns) -> list[Plan]:
    """Return plans of all values of the three settings."""
    choices: list[dict[str, Any]] = [{"recompute_granularity": name} for name in ("none", "selective")]
    choices += [
        {"recompute_granularity": "full", "partition_activations": cut, "checkpoint_in_cpu": away}
        for cut in (False, True)
        for away in (False, True)
    ]
    return [runs.plan(_job(choice), MACHINES["dgx-a100"]) for choice in choices]


def _job(settings: dict[str, Any]) -> DryJob:
    return DryJob(make_run(**{**SIZES, **TWO, **settings}), 512, Nodes((2,)), is_gpu=True)


def test_the_fastest_choice_that_fits_is_taken(every: list[Plan], runs: DryRuns) -> None:
    """With little, some and enough memory, beside all values of the three settings."""
    needs = sorted({plan.need(*plan.binding).total for plan in every})
    assert len(needs) > 3
    for limit in (needs[0], needs[2], needs[-1]):
        machine = replace(MACHINES["dgx-a100"], memory_bytes=limit)
        chosen = choose(_job(AUTO), machine, runs)
        fitting = [plan for plan in every if plan.need(*plan.binding).total <= limit]
        fastest = min(fitting, key=_seconds)
        assert _values(chosen.plan.job.config) == _values(fastest.job.config)
        assert chosen.plan.fits
        assert all(reason.startswith("auto: ") for reason in chosen.reasons)
        assert f"recompute_granularity {fastest.job.config.activations.recompute_granularity}" in chosen.reasons[-1]


def test_where_nothing_fits_what_needs_least_is_taken(every: list[Plan], runs: DryRuns) -> None:
    machine = replace(MACHINES["dgx-a100"], memory_bytes=1)
    chosen = choose(_job(AUTO), machine, runs)
    least = min(plan.need(*plan.binding).total for plan in every)
    assert chosen.plan.need(*chosen.plan.binding).total == least
    assert "nothing fits dgx-a100" in chosen.reasons[-2]


@each(
    ("settings", "is_gpu", "expected"),
    [
        ({}, True, [()]),
        ({"offload_optimizer": "auto"}, True, [("none", "none"), ("cpu", "none")]),
        ({**HOMES}, True, [("none", "none"), ("cpu", "none"), ("cpu", "cpu")]),
        ({**HOMES}, False, [("none", "none")]),
        ({**HOMES, "offload_optimizer": "cpu"}, True, [("cpu", "none"), ("cpu", "cpu")]),
    ],
)
def test_homes_have_every_open_place(settings: dict[str, Any], is_gpu: bool, expected: list[tuple[str, ...]]) -> None:
    config = make_run(**{**SIZES, "zero_stage": 3, **settings})
    found = [_homes(with_values(config, place)) for place in homes(config, is_gpu=is_gpu)]
    assert found == [place or _homes(config) for place in expected]


@each("seed", range(200))
def test_a_walk_runs_every_choice_that_may_be_the_fastest(seed: int) -> None:
    """On a table drawn at random, in which a choice that saves more never needs more of a device."""
    draw = random.Random(seed)
    rungs, places = range(draw.randint(1, 5)), range(draw.randint(1, 3))
    own = [[draw.randint(0, 9) for _ in places] for _ in rungs]
    needs = [[min(own[x][y] for x in range(rung + 1) for y in range(place + 1)) for place in places] for rung in rungs]
    has, most_homes = draw.randint(0, 9), draw.randint(0, len(places))
    ran: list[tuple[int, int]] = []

    def run_dry(rung: int, place: int) -> Room:
        ran.append((rung, place))
        if place > most_homes:
            return Room.LACKS_HOST
        return Room.ENOUGH if needs[rung][place] <= has else Room.LACKS_DEVICE

    walk(len(rungs), len(places), run_dry)
    fitting = {(x, y) for x in rungs for y in places if needs[x][y] <= has and y <= most_homes}
    assert {(x, y) for x, y in fitting if not {(x - 1, y), (x, y - 1)} & fitting} <= set(ran)
    assert len(ran) == len(set(ran)) <= len(rungs) + len(places)
    assert (0, 0) not in fitting or ran == [(0, 0)]


def _homes(config: Any) -> tuple[str, str]:
    return config.zero.offload_optimizer, config.zero.offload_param


def _sharded(settings: dict[str, Any]) -> DryJob:
    sizes = {**SIZES, "num_layers": 6, "micro_batch_size": 1, "global_batch_size": 2, "zero_stage": 3}
    return DryJob(make_run(**{**sizes, **settings}), 512, Nodes((2,)), is_gpu=True)


def test_the_fastest_homes_that_fit_are_taken(runs: DryRuns) -> None:
    """Where parameters need not leave the device; and where the host has no room, nothing does."""
    places = [dict(zip(HOMES, place, strict=True)) for place in (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))]
    plans = [runs.plan(_sharded(place), MACHINES["dgx-a100"]) for place in places]
    needs = [plan.need(*plan.binding).total for plan in plans]
    assert needs == sorted(set(needs), reverse=True)
    machine = replace(MACHINES["dgx-a100"], memory_bytes=needs[1])
    chosen = choose(_sharded(HOMES), machine, runs)
    assert _homes(chosen.plan.job.config) == ("cpu", "none") and chosen.plan.fits
    assert _seconds(chosen.plan) == _seconds(plans[1]) < _seconds(plans[2])
    assert "offload_optimizer cpu, offload_param none, predicted" in chosen.reasons[-1]
    chosen = choose(_sharded(HOMES), replace(machine, host_memory_bytes=1), runs)
    assert "nothing fits" in chosen.reasons[-2] and not chosen.plan.fits


def _seconds(plan: Plan) -> float:
    return forecast_of(plan).step.seconds


def test_what_is_given_is_planned_as_it_is(runs: DryRuns) -> None:
    chosen = choose(_job({"recompute_granularity": "selective"}), MACHINES["dgx-a100"], runs)
    assert chosen.reasons == () and _values(chosen.plan.job.config) == ("selective", False, False)


def test_a_machine_without_gpus_shares_its_memory() -> None:
    one, four = (this_machine(torch.device("cpu"), ranks) for ranks in (1, 4))
    assert one.memory_bytes == one.host_memory_bytes == four.host_memory_bytes > 1 << 28
    assert four.memory_bytes == one.memory_bytes // 4
    assert four.devices_per_node == 4
