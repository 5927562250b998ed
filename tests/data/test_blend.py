"""The mixture against a count of what came before."""

from fractions import Fraction
from itertools import pairwise
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megazero.data.blend import Blend, BlendedSamples, WeightedPrefix, parse_data_path
from megazero.errors import DataError

weights_strategy = st.lists(
    st.fractions(min_value=Fraction(1, 1000), max_value=1000, max_denominator=1000), min_size=1, max_size=9
)


@settings(max_examples=60, deadline=None)
@given(weights=weights_strategy)
def test_every_corpus_counts_its_samples_without_gap_and_keeps_its_share(weights: list[Fraction]) -> None:
    blend, counts, total = Blend(weights), [0] * len(weights), sum(weights)
    bound = max(1, ceil(log2(len(weights)))) if len(weights) > 1 else 0
    for k in range(300):
        corpus, number = blend.choose(k)
        assert number == counts[corpus]
        counts[corpus] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (k + 1) * weight / total) <= bound


@settings(max_examples=40, deadline=None)
@given(weights=weights_strategy, k=st.integers(0, 10**15))
def test_far_samples_follow_on_each_other(weights: list[Fraction], k: int) -> None:
    """The number within a corpus grows by one from each of its samples to the next, wherever one starts to look."""
    blend = Blend(weights)
    seen: dict[int, list[int]] = {}
    for step in range(60):
        corpus, number = blend.choose(k + step)
        seen.setdefault(corpus, []).append(number)
    assert all(b == a + 1 for numbers in seen.values() for a, b in pairwise(numbers))


def test_a_small_mixture_by_hand() -> None:
    blend = Blend([3, 1])
    assert [tuple(blend.choose(k)) for k in range(8)] == [
        (0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (0, 4), (1, 1), (0, 5),
    ]  # fmt: skip


class Numbered:
    """A source whose sample k is [name, k]."""

    seq_length = 1

    def __init__(self, name: int) -> None:
        self.name = name

    def sample(self, k: int) -> NDArray[np.int64]:
        return np.array([self.name, k])


def test_blended_samples_come_from_the_chosen_corpus() -> None:
    blended = BlendedSamples([Numbered(0), Numbered(1), Numbered(2)], [1, 2, 3])
    blend = Blend([1, 2, 3])
    assert blended.seq_length == 1
    for k in range(50):
        assert blended.sample(k).tolist() == list(blend.choose(k))


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["a"], [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        (["a", "b", "c"], [("a", None), ("b", None), ("c", None)]),
        (["0.3", "a", "0.7", "b"], [("a", Fraction(3, 10)), ("b", Fraction(7, 10))]),
        (["1", "a"], [("a", Fraction(1))]),
        (["7"], [("7", None)]),
    ],
)
def test_data_path(items: list[str], expected: list[tuple[str, Fraction | None]]) -> None:
    assert parse_data_path(items) == tuple(WeightedPrefix(*pair) for pair in expected)


@pytest.mark.parametrize(
    ("items", "count", "message"),
    [
        ([], 1, "at least one prefix"),
        (["0.3", "a", "0.7"], 1, "followed by a prefix"),
        (["0.3", "a", "b", "c"], 1, "weight b"),
        (["0", "a", "-1", "b"], 2, "weight -1"),
        (["0", "a", "x", "b", "3"], 3, "weight x"),
    ],
)
def test_bad_data_paths(items: list[str], count: int, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        parse_data_path(items)
    assert len(caught.value.problems) == count
