"""Tests peaks and timelines of changes against a slow count of every moment."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.memory.ledger_figures import CATEGORIES, AllocatorSample, Category, MemoryTimeline, PhaseMark, StepMemory

Change = tuple[int, Category, int]


def timeline(start: dict[Category, int], changes: list[Change]) -> MemoryTimeline:
    row = np.array([start.get(name, 0) for name in CATEGORIES], np.int64)
    return MemoryTimeline.of_changes(row, changes, [PhaseMark(0, "forward")], 100)


def test_the_peak_by_hand() -> None:
    step = StepMemory(
        timeline(
            {"parameters": 100},
            [(7, "activations", 1), (5, "temporary", 1), (-5, "temporary", 2), (4, "activations", 3), (9, "master", 5)],
        )
    )
    assert step.timeline.totals.tolist() == [100, 107, 112, 107, 111, 120]
    assert step.timeline.operations.tolist() == [0, 1, 1, 2, 3, 5]
    assert (step.peak_bytes, step.peak_operation) == (120, 5)
    assert {name: n for name, n in step.at_peak.items() if n} == {"parameters": 100, "activations": 11, "master": 9}
    assert (step.peaks["temporary"], step.peaks["moments"]) == (5, 0)


def test_a_step_without_changes_is_its_start() -> None:
    step = StepMemory(timeline({"moments": 3}, []))
    assert (step.peak_bytes, step.peak_operation, step.at_peak["moments"]) == (3, 0, 3)


def test_the_peak_may_be_the_start() -> None:
    step = StepMemory(timeline({"moments": 3}, [(-3, "moments", 4), (1, "master", 9)]))
    assert (step.peak_bytes, step.peak_operation, step.at_peak["master"]) == (3, 0, 0)


@given(st.lists(st.tuples(st.integers(-(10**14), 10**14), st.sampled_from(CATEGORIES), st.just(1)), max_size=30))
def test_every_moment(changes: list[Change]) -> None:
    """The figures are exact for numbers that float64 cannot represent."""
    start: dict[Category, int] = {name: 10**17 + index for index, name in enumerate(CATEGORIES)}
    moments = [dict(start)]
    for nbytes, category, _ in changes:
        moments.append({**moments[-1], category: moments[-1][category] + nbytes})
    step = StepMemory(timeline(start, changes))
    assert step.peak_bytes == max(sum(moment.values()) for moment in moments)
    assert step.at_peak == max(moments, key=lambda moment: sum(moment.values()))
    assert step.peaks == {name: max(moment[name] for moment in moments) for name in CATEGORIES}
    assert [dict(zip(CATEGORIES, row, strict=True)) for row in step.timeline.live.tolist()] == moments


def test_the_gap_to_an_allocator() -> None:
    empty = timeline({}, [])
    assert StepMemory(empty).allocator_gap is None
    assert StepMemory(empty, (AllocatorSample(0, 0),)).allocator_gap is None
    gap = StepMemory(empty, (AllocatorSample(99, 100), AllocatorSample(205, 200))).allocator_gap
    assert gap == pytest.approx(0.025)
