"""The keyed permutation: a bijection for every size, unlike for unlike keys, even over all orders."""

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data.permutation import Permutation


@pytest.mark.parametrize("size", [*range(1, 40), 63, 64, 65, 100, 255, 256, 257, 1000, 4097])
def test_bijection(size: int) -> None:
    order = Permutation(size, (1234, 0))
    assert sorted(order[index] for index in range(size)) == list(range(size))


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
    assert chi_square < 2.5 * len(orders) + 10  # mean of the statistic: orders - 1


def test_places_are_spread_evenly() -> None:
    """First elements over many keys, and differences of neighbours within one order, in 20 classes each."""
    size, classes = 10_007, 20
    firsts = Counter(Permutation(size, (seed,))[0] * classes // size for seed in range(4000))
    order = Permutation(size, (3,))
    steps = Counter((order[i + 1] - order[i]) % size * classes // size for i in range(4000))
    for counts in (firsts, steps):
        chi_square = sum((counts[c] - 200) ** 2 / 200 for c in range(classes))
        assert chi_square < 50  # 19 degrees of freedom: exceeded once in ten thousand


@pytest.mark.parametrize("other", [(2, 0), (1, 1), (10,), (1, 0, 0)])
def test_the_key_decides(other: tuple[int, ...]) -> None:
    first, second = Permutation(500, (1, 0)), Permutation(500, other)
    assert sum(first[i] == second[i] for i in range(500)) < 10


def test_the_order_is_the_same_for_ever() -> None:
    """Runs are resumed by later versions; these figures must never change."""
    order = Permutation(10, (1234, 0, 0))
    assert [order[i] for i in range(10)] == FROZEN


@pytest.mark.parametrize("index", [-1, 10])
def test_outside(index: int) -> None:
    with pytest.raises(IndexError):
        Permutation(10, (0,))[index]


FROZEN = [7, 6, 2, 0, 9, 1, 8, 4, 5, 3]
