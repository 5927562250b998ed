"""Tests of segments of layers: every layer is in one, in order, and recomputed according to the method."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recomputed_programs import recomputation

from megazero.activations.recompute_plan import NO_RECOMPUTATION, ActivationPlan, Granularity, Method, Segment


def spans(plan: ActivationPlan, total: int) -> list[tuple[int, int, bool]]:
    return [tuple(segment) for segment in plan.segments(total)]


def full(method: Method, num_layers: int) -> ActivationPlan:
    return ActivationPlan("full", method=method, num_layers=num_layers)


def test_uniform_cuts_all_layers_into_equal_segments_and_a_rest() -> None:
    assert spans(full("uniform", 2), 5) == [(0, 2, True), (2, 4, True), (4, 5, True)]
    assert spans(full("uniform", 1), 3) == [(0, 1, True), (1, 2, True), (2, 3, True)]
    assert spans(full("uniform", 9), 3) == [(0, 3, True)]


def test_block_recomputes_the_first_layers_one_by_one() -> None:
    assert spans(full("block", 2), 5) == [(0, 1, True), (1, 2, True), (2, 5, False)]
    assert spans(full("block", 5), 5) == [(layer, layer + 1, True) for layer in range(5)]
    assert spans(full("block", 9), 2) == [(0, 1, True), (1, 2, True)]


@pytest.mark.parametrize("granularity", ["none", "selective"])
def test_whole_layers_are_recomputed_under_full_alone(granularity: Granularity) -> None:
    assert ActivationPlan(granularity, num_layers=2).segments(4) == (Segment(0, 4, is_recomputed=False),)
    assert NO_RECOMPUTATION.segments(4) == (Segment(0, 4, is_recomputed=False),)


@given(st.sampled_from(["none", "selective", "full"]), st.sampled_from(["uniform", "block"]), st.data())
def test_every_layer_runs_once_in_order(granularity: Granularity, method: Method, data: st.DataObject) -> None:
    total, length = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 40))
    segments = ActivationPlan(granularity, method=method, num_layers=length).segments(total)
    assert [layer for segment in segments for layer in range(segment.start, segment.stop)] == list(range(total))
    recomputed = sum(segment.stop - segment.start for segment in segments if segment.is_recomputed)
    expected = {"uniform": total, "block": min(length, total)}[method] if granularity == "full" else 0
    assert recomputed == expected


def test_the_core_is_recomputed_under_selective_alone() -> None:
    runs = recomputation()
    assert [ActivationPlan(kind, runs).core_recomputation for kind in ("none", "selective", "full")] == [
        None,
        runs,
        None,
    ]


def test_who_carries_it_out_changes_nothing_else() -> None:
    plan, runs = full("block", 3), recomputation()
    carried = plan.with_recomputation(runs)
    assert carried.recomputation is runs and carried.with_recomputation(None) == plan
