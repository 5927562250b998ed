"""The nearest legal values: multiples and divisors next to what was given, and flags that set them."""

import math
from collections.abc import Iterable


def neighbours(value: int, step: int) -> tuple[int, ...]:
    """The multiples of `step` on both sides of `value`, positive ones only, the nearer first."""
    below = value // step * step
    near = {candidate for candidate in (below, below + step) if candidate > 0}
    return _nearest_first(near, value)


def near_divisors(number: int, value: int) -> tuple[int, ...]:
    """The divisors of `number` next to `value` on both sides, the nearer first."""
    divisors = sorted({d for i in range(1, math.isqrt(number) + 1) if number % i == 0 for d in (i, number // i)})
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d > value][:1]
    return _nearest_first({*below, *above}, value)


def _nearest_first(numbers: Iterable[int], value: int) -> tuple[int, ...]:
    return tuple(sorted(numbers, key=lambda number: (abs(number - value), number)))


def flags(flag: str, values: Iterable[int]) -> str:
    """The flag with each value: "--seq-length 8, --seq-length 16"."""
    return ", ".join(f"{flag} {value}" for value in values)
