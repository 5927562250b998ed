"""Tests that what is left to a plan is the fastest of all choices that fit, and legal."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.configs import make_run
from support.each import each

from megazero.parallel.nodes import Nodes
from megazero.planner.decide import choose, ladder, this_machine
from megazero.planner.dry_run import DryJob
from megazero.planner.machines import MACHINES
from megazero.planner.plan import Plan, make_plan
from megazero.planner.predict import forecast_of

AUTO: dict[str, Any] = {
    "recompute_granularity": "auto",
    "partition_activations": "auto",
    "checkpoint_in_cpu": "auto",
}
SIZES: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 512,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "vocab_size": 512,
    "attention_backend": "unfused",
    "precision": "bf16",
    "lr": 1e-3,
    "eval_iters": 0,
    "mock_data": True,
}
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
def every() -> list[Plan]:
    """Return plans of all values of the three settings."""
    choices: list[dict[str, Any]] = [{"recompute_granularity": name} for name in ("none", "selective")]
    choices += [
        {"recompute_granularity": "full", "partition_activations": cut, "checkpoint_in_cpu": away}
        for cut in (False, True)
        for away in (False, True)
    ]
    return [make_plan(_job(choice), MACHINES["dgx-a100"]) for choice in choices]


def _job(settings: dict[str, Any]) -> DryJob:
    return DryJob(make_run(**{**SIZES, **TWO, **settings}), 512, Nodes((2,)), is_gpu=True)


def test_the_fastest_choice_that_fits_is_taken(every: list[Plan]) -> None:
    """Whatever memory there is, beside all values of the three settings."""
    needs = sorted({plan.need(*plan.binding).total for plan in every})
    assert len(needs) > 3
    for limit in needs:
        machine = replace(MACHINES["dgx-a100"], memory_bytes=limit)
        chosen = choose(_job(AUTO), machine)
        fitting = [plan for plan in every if plan.need(*plan.binding).total <= limit]
        fastest = min(fitting, key=lambda plan: forecast_of(plan).step.seconds)
        assert _values(chosen.plan.job.config) == _values(fastest.job.config)
        assert chosen.plan.fits
        assert all(reason.startswith("auto: ") for reason in chosen.reasons)
        assert f"recompute_granularity {fastest.job.config.activations.recompute_granularity}" in chosen.reasons[-1]


def test_where_nothing_fits_what_needs_least_is_taken(every: list[Plan]) -> None:
    machine = replace(MACHINES["dgx-a100"], memory_bytes=1)
    chosen = choose(_job(AUTO), machine)
    least = min(plan.need(*plan.binding).total for plan in every)
    assert chosen.plan.need(*chosen.plan.binding).total == least
    assert "nothing fits dgx-a100" in chosen.reasons[-2]


def test_what_is_given_is_planned_as_it_is() -> None:
    chosen = choose(_job({"recompute_granularity": "selective"}), MACHINES["dgx-a100"])
    assert chosen.reasons == () and _values(chosen.plan.job.config) == ("selective", False, False)


def test_a_machine_without_gpus_shares_its_memory() -> None:
    one, four = (this_machine(torch.device("cpu"), ranks) for ranks in (1, 4))
    assert one.memory_bytes == one.host_memory_bytes == four.host_memory_bytes > 1 << 28
    assert four.memory_bytes == one.memory_bytes // 4
    assert four.devices_per_node == 4
