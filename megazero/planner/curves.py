"""Rates that depend on a size: a few measured points, and what lies between them."""

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

Point = tuple[float, float]
Measurement = tuple[float, float, float]  # a size, an amount of work or bytes of that size, and its seconds


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


def pooled(measured: Iterable[Measurement]) -> Curve:
    """Return the curve of measurements in any order; those whose sizes round to one power of two are one point."""
    pools: dict[int, list[Measurement]] = defaultdict(list)
    for each in measured:
        pools[round(math.log2(each[0]))].append(each)
    points = []
    for _, pool in sorted(pools.items()):
        amount = sum(each for _, each, _ in pool)
        size = math.exp(sum(math.log(size) * each for size, each, _ in pool) / amount)
        points.append((size, amount / sum(seconds for _, _, seconds in pool)))
    return Curve(tuple(points))
