"""The nearest legal values: multiples and divisors next to what was given, flags that set them, and counts in words."""

import math
from collections.abc import Iterable


def neighbours(value: int, step: int) -> tuple[int, ...]:
    """The multiples of `step` on both sides of `value`, positive ones only, the nearer first."""
    below = value // step * step
    near = {candidate for candidate in (below, below + step) if candidate > 0}
    return _nearest_first(near, value)


def near_divisors(number: int, value: int, *, multiple_of: int = 1) -> tuple[int, ...]:
    """The divisors of `number` next to `value` on both sides, multiples of `multiple_of` only, the nearer first."""
    pairs = {d for i in range(1, math.isqrt(number) + 1) if number % i == 0 for d in (i, number // i)}
    divisors = sorted(d for d in pairs if d % multiple_of == 0)
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d > value][:1]
    return _nearest_first({*below, *above}, value)


def _nearest_first(numbers: Iterable[int], value: int) -> tuple[int, ...]:
    return tuple(sorted(numbers, key=lambda number: (abs(number - value), number)))


def flags(flag: str, values: Iterable[int]) -> str:
    """The flag with each value: "--seq-length 8, --seq-length 16"."""
    return ", ".join(f"{flag} {value}" for value in values)


def counted(number: int, thing: str) -> str:
    """The number with its noun: "1 process", "2 processes", "3 chunks"."""
    if number == 1:
        return f"1 {thing}"
    return f"{number} {thing}{'es' if thing.endswith(('s', 'ch')) else 's'}"
