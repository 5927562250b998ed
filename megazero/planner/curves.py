"""Rates that depend on a size: a few measured points, and what lies between them."""

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A rate by size: points (size, rate) in the order of sizes.

    Between two points the rate is a straight line where both axes are logarithmic; beyond the ends it stays that of the
    end.  One point is a constant rate.
    """

    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        assert self.points, "a curve has a point"
        sizes = [size for size, _ in self.points]
        assert sizes == sorted(set(sizes)), f"sizes grow: {sizes}"
        assert all(size > 0 and rate > 0 for size, rate in self.points), f"sizes and rates are positive: {self.points}"

    def at(self, size: float) -> float:
        """Return the rate at a size."""
        position = bisect.bisect_right(self.points, (size, math.inf))
        if position == 0:
            return self.points[0][1]
        if position == len(self.points):
            return self.points[-1][1]
        (left, low), (right, high) = self.points[position - 1], self.points[position]
        share = math.log(size / left) / math.log(right / left)
        return low * math.exp(share * math.log(high / low))

    @property
    def highest(self) -> float:
        """The highest rate of all points."""
        return max(rate for _, rate in self.points)

    def times(self, factor: float) -> "Curve":
        """Return the curve with every rate multiplied."""
        return Curve(tuple((size, rate * factor) for size, rate in self.points))


def constant(rate: float) -> Curve:
    """Return the curve of a rate that no size changes."""
    return Curve(((1.0, rate),))


def by_seconds(measured: Iterable[tuple[float, float, float]]) -> Curve:
    """Return the curve of measurements (size, amount, seconds), whose rate is amount / seconds, in any order."""
    found = {size: amount / seconds for size, amount, seconds in measured}
    return Curve(tuple(sorted(found.items())))
