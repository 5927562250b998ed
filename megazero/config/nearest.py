"""Finds the legal values nearest to a given one, and writes them as flags."""

import math
from collections.abc import Iterable

_MOST_TRIED = 100_000


def neighbours(value: int, step: int) -> tuple[int, ...]:
    """Return the positive multiples of `step` next to `value`, below and above it, the nearer first."""
    below = value // step * step
    near = {candidate for candidate in (below, below + step) if candidate > 0}
    return _nearest_first(near, value)


def near_divisors(number: int, value: int, *, multiple_of: int = 1) -> tuple[int, ...]:
    """Return the divisors of `number` next to `value` that are multiples of `multiple_of`, the nearer first.

    Pairs of divisors that are both above `_MOST_TRIED` are not looked for: that would take minutes for a mistyped size.
    """
    pairs = {d for i in range(1, min(math.isqrt(number), _MOST_TRIED) + 1) if number % i == 0 for d in (i, number // i)}
    divisors = sorted(d for d in pairs if d % multiple_of == 0)
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d > value][:1]
    return _nearest_first({*below, *above}, value)


def _nearest_first(numbers: Iterable[int], value: int) -> tuple[int, ...]:
    return tuple(sorted(numbers, key=lambda number: (abs(number - value), number)))


def flags(flag: str, values: Iterable[int]) -> str:
    """Return the flag with each of the values: "--seq-length 8, --seq-length 16"."""
    return ", ".join(f"{flag} {value}" for value in values)
