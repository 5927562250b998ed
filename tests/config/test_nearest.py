"""Tests of the arithmetic of nearest legal values against a search through all values."""

from hypothesis import given
from hypothesis import strategies as st

from megazero.config.nearest import flags, near_divisors, neighbours


def test_the_nearer_comes_first() -> None:
    assert (neighbours(10, 4), neighbours(11, 4), neighbours(3, 4)) == ((8, 12), (12, 8), (4,))
    assert (near_divisors(12, 5), near_divisors(12, 12), near_divisors(12, 20)) == ((4, 6), (12,), (12,))


def test_flags_with_values() -> None:
    assert flags("--seq-length", (16, 8)) == "--seq-length 16, --seq-length 8"
    assert flags("--seq-length", ()) == ""


def test_divisors_that_are_multiples() -> None:
    assert near_divisors(36, 7, multiple_of=4) == (4, 12)
    assert near_divisors(9, 3, multiple_of=2) == ()


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_neighbours_are_the_multiples_around(value: int, step: int) -> None:
    brute = [n for n in range(step, value + step + 1, step) if abs(n - value) < step]
    assert sorted(neighbours(value, step))[-2:] == (brute if value % step else [value, value + step])[-2:]


@given(st.integers(1, 2_000), st.integers(1, 2_000))
def test_near_divisors_are_the_divisors_around(number: int, value: int) -> None:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = max((d for d in divisors if d <= value), default=None)
    above = min((d for d in divisors if d > value), default=None)
    assert set(near_divisors(number, value)) == {d for d in (below, above) if d is not None}


def test_divisors_of_a_mistyped_number_are_there_at_once() -> None:
    assert near_divisors(10**20 - 1, 4) == (3, 9)
