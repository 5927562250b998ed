"""Tests that the search learns by which factors bounds are off from the layouts it has run dry."""

import random

import pytest

from megazero.planner.advice.choices import LayoutChoice
from megazero.planner.advice.expected import Expectation

CHOICES = [
    LayoutChoice(tensor, stages, zero_stage=stage, offload_optimizer=home, micro_batch_size=size)
    for tensor in (1, 2, 8)
    for stages in (1, 4)
    for stage in (1, 2, 3)
    for home in ("none", "cpu")
    for size in (1, 4)
]


def factor_of(choice: LayoutChoice) -> float:
    """Return a factor to which each trait adds one of its own."""
    found = 1.2 * choice.tensor_model_parallel_size**-0.1 * (1.3 if choice.zero_stage == 3 else 1.0)
    return found * (1.5 if choice.offload_optimizer == "cpu" else 1.0)


def test_nothing_is_expected_before_a_layout_was_run() -> None:
    assert list(Expectation().factors([CHOICES[0].traits, CHOICES[1].traits])) == [(1.0, 1.0)] * 2


def test_one_layout_is_like_all() -> None:
    expectation = Expectation()
    expectation.add(CHOICES[0].traits, 1.4, 0.9)
    for seconds, nbytes in expectation.factors([one.traits for one in CHOICES]):
        assert (seconds, nbytes) == (pytest.approx(1.4), pytest.approx(0.9))


def test_factors_of_layouts_that_were_not_run_follow_from_their_traits() -> None:
    """From a third of the layouts those of the others are found more exactly than by a common factor."""
    drawn = random.Random(3).sample(CHOICES, len(CHOICES) // 3)
    expectation = Expectation()
    for one in drawn:
        expectation.add(one.traits, factor_of(one), 1 / factor_of(one))
    others = [one for one in CHOICES if one not in drawn]
    found = list(expectation.factors([one.traits for one in others]))
    assert [seconds for seconds, _ in found] == pytest.approx([factor_of(one) for one in others], rel=0.08)
    assert [nbytes for _, nbytes in found] == pytest.approx([1 / factor_of(one) for one in others], rel=0.08)
    assert max(map(factor_of, others)) > 1.8 * min(map(factor_of, others))
