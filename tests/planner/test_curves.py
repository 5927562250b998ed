"""Tests rates between measured sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.planner.curves import Curve, constant, pooled

_POINTS = st.lists(
    st.tuples(st.floats(1, 1e9), st.floats(1e-3, 1e15)), min_size=1, max_size=6, unique_by=lambda point: point[0]
).map(lambda points: Curve(tuple(sorted(points))))


def test_rates_between_points_are_straight_where_both_axes_are_logarithmic() -> None:
    curve = Curve(((10, 2.0), (1000, 8.0)))
    assert curve.at(100) == pytest.approx(4.0)
    assert curve.at(10 * 100**0.25) == pytest.approx(2 * 4**0.25)


def test_beyond_the_ends_a_rate_stays_and_at_a_point_it_is_the_point_s() -> None:
    curve = Curve(((10, 2.0), (100, 8.0), (1000, 4.0)))
    assert [curve.at(size) for size in (0.1, 10, 100, 1000, 1e9)] == pytest.approx([2, 2, 8, 4, 4])
    assert curve.highest == 8
    assert constant(3.0).at(1e-9) == constant(3.0).at(1e9) == 3.0


def test_measurements_of_about_one_size_are_one_point_in_any_order() -> None:
    far, (size, rate) = pooled([(110, 300, 1.0), (16, 50, 0.5), (100, 100, 1.0)]).points
    assert far == pytest.approx((16, 100))
    assert rate == 200
    assert 105 < size < 110  # nearer to the size of which more was measured


@given(_POINTS, st.floats(1e-3, 1e12))
def test_a_rate_lies_between_those_of_its_neighbours(curve: Curve, size: float) -> None:
    rates = [rate for _, rate in curve.points]
    assert min(rates) * (1 - 1e-9) <= curve.at(size) <= max(rates) * (1 + 1e-9)


@given(_POINTS, st.floats(1e-3, 1e12), st.floats(1e-3, 1e3))
def test_all_rates_times_a_factor(curve: Curve, size: float, factor: float) -> None:
    assert math.isclose(curve.times(factor).at(size), factor * curve.at(size), rel_tol=1e-9)


@pytest.mark.parametrize("points", [(), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0)), ((1, 0.0),), ((0, 1.0),)])
def test_no_curve_without_growing_sizes_and_positive_rates(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(AssertionError):
        Curve(points)
