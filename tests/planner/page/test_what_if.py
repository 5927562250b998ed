"""Tests the runs that a page's controls offer: which there are, and that memory is linear between two micro-batches."""

from dataclasses import replace

import pytest
from support.plan_page import Drawn, drawn_plan

from megazero.planner.job_plan import make_plan
from megazero.planner.page.what_if import (
    MICRO_BATCH,
    other_micro_batch,
    point_of,
    points,
    setting_of,
    settings,
    with_setting,
)

GIVEN = {"micro-batch": 1, "stage": 1, "recomputation": "full", "homes": "cpu"}


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return drawn_plan()


def test_every_value_is_tried_with_two_micro_batches(drawn: Drawn) -> None:
    found = list(settings(drawn.plan.job, ("micro-batch", "stage", "homes")))
    assert setting_of(drawn.plan.job.config) == GIVEN == found[0]
    changed = [GIVEN, *({**GIVEN, "stage": stage} for stage in (0, 2, 3)), {**GIVEN, "homes": "none"}]
    assert found == [{**setting, MICRO_BATCH: size} for setting in changed for size in (1, 4)]
    assert list(settings(drawn.plan.job, ("homes",))) == [GIVEN, {**GIVEN, "homes": "none"}]


def test_the_global_batch_stays(drawn: Drawn) -> None:
    job = with_setting(drawn.plan.job, {**GIVEN, MICRO_BATCH: 4})
    assert (job.num_micro_batches, drawn.plan.job.num_micro_batches) == (1, 4)
    assert other_micro_batch(job) == 2  # the largest has a smaller one beside it


def test_what_the_rules_refuse_is_told_and_not_run(drawn: Drawn) -> None:
    refused = [point for point in drawn.points if point.refused]
    assert [point.setting["stage"] for point in refused] == [0, 0]
    assert "offload-optimizer" in refused[0].refused.replace("_", "-")


def test_a_point_is_what_its_own_plan_says(drawn: Drawn) -> None:
    point = next(each for each in drawn.points if each.setting == {**GIVEN, "stage": 2, MICRO_BATCH: 4})
    own = make_plan(with_setting(drawn.plan.job, point.setting), drawn.plan.hardware)
    assert point == point_of(own)
    assert point.total == own.need(*own.binding).total
    assert sum(point.at_peak.values()) == own.need(*own.binding).tensors


def test_memory_is_linear_between_micro_batches_with_their_peak_at_the_same_place(drawn: Drawn) -> None:
    """On exact memory, without the rounding of a GPU's allocator, to the byte."""
    job = replace(drawn.plan.job, is_gpu=False)
    plan = make_plan(job, drawn.plan.hardware)
    low, high = points(plan, (MICRO_BATCH,))
    middle = point_of(make_plan(with_setting(job, {**GIVEN, MICRO_BATCH: 2}), drawn.plan.hardware))
    assert low.place == middle.place == high.place
    for name, nbytes in middle.at_peak.items():
        assert 3 * (nbytes - low.at_peak[name]) == high.at_peak[name] - low.at_peak[name], name
