"""Tests the keyed permutation: a bijection for every size, different for different keys, and even over all orders."""

from collections import Counter
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.each import each

from megazero.data import permutation
from megazero.data.permutation import Epochs, Permutation


def whole(order: Permutation) -> NDArray[np.uint64]:
    """Return the image of every index."""
    return order.images(np.arange(order.size, dtype=np.uint64))


def test_bijection_for_every_size() -> None:
    """All values from 0 to size - 1 occur among the images of as many indices; beyond 1000, of sizes beside squares.

    The base of a number's two digits changes at a square.
    """
    beside_squares = (base * base + more for base in range(32, 101) for more in (-1, 0, 1))
    for size in (*range(1, 1001), *beside_squares):
        seen = np.zeros(size, bool)
        seen[whole(Permutation(size, (1234, size)))] = True
        assert seen.all(), size


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 600), key=st.tuples(st.integers(), st.integers(0, 50)))
def test_bijection_for_any_key(size: int, key: tuple[int, int]) -> None:
    order = Permutation(size, key)
    assert sorted(order[index] for index in range(size)) == list(range(size))


@settings(max_examples=50, deadline=None)
@given(size=st.integers(2**31, 2**62), first=st.integers(0, 2**30), second=st.integers(0, 2**30))
def test_huge_sizes_stay_in_range_and_apart(size: int, first: int, second: int) -> None:
    order = Permutation(size, (7,))
    assert 0 <= order[first] < size
    assert (order[first] == order[second]) == (first == second)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_a_few_elements_is_about_equally_frequent(size: int) -> None:
    seen = Counter(tuple(Permutation(size, (seed, 5))[i] for i in range(size)) for seed in range(2400))
    orders = list(permutations(range(size)))
    expected = 2400 / len(orders)
    chi_square = sum((seen[order] - expected) ** 2 / expected for order in orders)
    assert chi_square < 2.5 * len(orders) + 10  # the statistic's mean is the number of orders - 1


def test_places_are_spread_evenly() -> None:
    """First elements over many keys, and differences of neighbours within one order, are even over 20 classes each."""
    size, classes = 10_007, 20
    firsts = Counter(Permutation(size, (seed,))[0] * classes // size for seed in range(4000))
    order = Permutation(size, (3,))
    steps = Counter((order[i + 1] - order[i]) % size * classes // size for i in range(4000))
    for counts in (firsts, steps):
        chi_square = sum((counts[c] - 200) ** 2 / 200 for c in range(classes))
        assert chi_square < 50  # 19 degrees of freedom: exceeded once in ten thousand


@each("other", [(2, 0), (1, 1), (10,), (1, 0, 0)])
def test_the_key_decides(other: tuple[int, ...]) -> None:
    first, second = Permutation(500, (1, 0)), Permutation(500, other)
    assert sum(first[i] == second[i] for i in range(500)) < 10


@each(("size", "key", "places"), [
    (10, (1234, 0, 0), [7, 6, 2, 0, 9, 1, 8, 4]),
    (1000, (1234, 0, 0), [354, 69, 705, 946, 509, 698, 331, 781]),
    (123456789, (1234, 2, 7), [33440375, 90012701, 53879036, 25653392, 31882868, 65507180, 69164534, 41390732]),
    (
        2**40 + 15,
        (7, 1, 3),
        [
            502799473276, 420217633262, 735218318538, 117933012905,
            95845954455, 352397522940, 907922223965, 632991912774,
        ],
    ),
])  # fmt: skip
def test_the_order_is_the_same_for_ever(size: int, key: tuple[int, ...], places: list[int]) -> None:
    """Later versions resume runs of earlier ones, so these figures must never change."""
    order = Permutation(size, key)
    indices = [number * (size // 8) for number in range(8)]
    assert [order[index] for index in indices] == places
    assert order.images(np.array(indices, np.uint64)).tolist() == places


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 2**40), seed=st.integers(), data=st.data())
def test_arrays_have_the_images_of_integers(size: int, seed: int, data: st.DataObject) -> None:
    order = Permutation(size, (seed, 2))
    indices = data.draw(st.lists(st.integers(0, size - 1), max_size=9))
    values = [order[index] for index in indices]
    assert all(0 <= value < size for value in values) and len(set(values)) == len(set(indices))
    images = order.images(np.array(indices, np.uint64))
    assert images.dtype == np.uint64 and images.tolist() == values


def test_epochs_follow_on_each_other() -> None:
    row, keys = Epochs(7, (5, 1)), [(5, 1, epoch) for epoch in range(4)]
    expected = [Permutation(7, key)[index] for key in keys for index in range(7)]
    assert [row[k] for k in range(28)] == expected
    assert [row[k] for k in (27, 0, 13, 14)] == [expected[k] for k in (27, 0, 13, 14)]


# --- statistics of orders against those of random draws ---------------------------------------------------------------

Orders = Callable[[int, tuple[int, ...]], NDArray[np.uint64]]


def excess(counts: NDArray[np.int64], freedom: int) -> float:
    """Return by how many standard deviations chi-square exceeds its mean for equally likely cells."""
    mean = counts.sum() / counts.size
    return float((((counts - mean) ** 2 / mean).sum() - freedom) / (2 * freedom) ** 0.5)


def excess_of_places(orders: Orders, size: int) -> float:
    """Return the excess for counts of values at places, [place, value], over the orders of many keys."""
    counts = np.zeros((size, size), np.int64)
    for seed in range(1500):
        counts[np.arange(size), orders(size, (seed, 3))] += 1
    return excess(counts, (size - 1) ** 2)


def excess_of_neighbours(orders: Orders, size: int) -> float:
    """Return the excess for pairs of adjacent values, taken at every second place, over the orders of many keys."""
    counts = np.zeros((size, size), np.int64)
    for seed in range(1500):
        order = orders(size, (seed, 4))
        np.add.at(counts, (order[: size - 1 : 2], order[1::2]), 1)
    apart = counts[~np.eye(size, dtype=bool)]
    return excess(apart, len(apart) - 1)


def excess_of_steps(orders: Orders, size: int) -> float:
    """Return the excess for pairs of adjacent values within one long order, each value in one of 20 classes."""
    order = orders(size, (5,)).astype(np.int64) * 20 // size
    counts = np.zeros((20, 20), np.int64)
    np.add.at(counts, (order[:-1], order[1:]), 1)
    return excess(counts, 19 * 19)


TESTS = [
    *((excess_of_places, size) for size in (5, 16, 31)),
    *((excess_of_neighbours, size) for size in (4, 9, 24)),
    *((excess_of_steps, size) for size in (10_000, 65_537)),
]


@pytest.mark.parametrize(("statistic", "size"), TESTS)
def test_values_are_even_over_places_and_neighbours(statistic: Callable[[Orders, int], float], size: int) -> None:
    assert -4 < statistic(lambda size, key: whole(Permutation(size, key)), size) < 4


@pytest.mark.parametrize(("statistic", "size"), TESTS)
def test_orders_that_are_none_are_not_even(
    statistic: Callable[[Orders, int], float], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics are large for numbers left in their order, and for a network of one round."""
    assert statistic(lambda size, key: np.arange(size, dtype=np.uint64), size) > 20
    monkeypatch.setattr(permutation, "NUM_ROUNDS", 1)
    assert statistic(lambda size, key: whole(Permutation(size, key)), size) > 20


@pytest.mark.parametrize("index", [-1, 10])
def test_outside(index: int) -> None:
    with pytest.raises(IndexError):
        Permutation(10, (0,))[index]


def test_arrays_outside() -> None:
    order = Permutation(10, (0,))
    assert order.images(np.array([], np.uint64)).tolist() == []
    with pytest.raises(IndexError, match=r"10 is not in \[0, 10\)"):
        order.images(np.array([3, 10], np.uint64))
