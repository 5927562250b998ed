"""Tests the mixture of corpora against a running count of the samples chosen so far."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.each import each
from support.token_files import write_corpus

from megazero.data.blend import Blend, BlendedSamples, WeightedPrefix, parse_data_path
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.loader import BatchLayout, BatchLoader
from megazero.data.samples import RemainingSamples, Samples, SampleSource
from megazero.errors import DataError


def most_off(corpora: int) -> Fraction:
    """Return the most samples that a corpus is ever off its share: half of 1/1 + 1/1 + 1/2 + 1/3 + 1/5 + ..., with one
    term for each node of the blend's tree that can lie above a corpus.
    """
    fibonacci, parts = (1, 1), Fraction()
    for _ in range(corpora - 1):
        parts += Fraction(1, fibonacci[0])
        fibonacci = fibonacci[1], sum(fibonacci)
    return parts / 2


class Shares:
    """Tells whether corpora are near their shares, by whole numbers: those of fractions are a hundred times slower."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        scale = math.lcm(*(Fraction(weight).denominator for weight in weights))
        self._weights = [int(weight * scale) for weight in weights]
        self._total = sum(self._weights)
        self._most = math.floor(most_off(len(weights)) * self._total)

    def are_held(self, counts: Sequence[int], samples: int) -> bool:
        """Return True if no count is off its share of so many samples by more than `most_off`."""
        return all(
            -self._most <= count * self._total - samples * weight <= self._most
            for count, weight in zip(counts, self._weights, strict=True)
        )


def test_shares_are_exact() -> None:
    """Of 2 : 1, a corpus may have one sample more or less than its share, and no third of one beyond that."""
    shares = Shares([Fraction(2, 3), Fraction(1, 3)])
    assert most_off(2) == Fraction(1, 2)
    assert shares.are_held([1, 0], 1) and shares.are_held([1, 1], 2) and shares.are_held([2, 1], 3)
    assert not shares.are_held([0, 1], 1) and not shares.are_held([2, 0], 2) and not shares.are_held([3, 0], 3)


weights_strategy = st.lists(
    st.fractions(min_value=Fraction(1, 1000), max_value=1000, max_denominator=1000), min_size=1, max_size=9
)


@settings(max_examples=60, deadline=None)
@given(weights=weights_strategy)
def test_every_corpus_counts_its_samples_without_gap_and_keeps_its_share(weights: list[Fraction]) -> None:
    blend, counts, shares = Blend(weights), [0] * len(weights), Shares(weights)
    for k in range(300):
        corpus, number = blend.choose(k)
        assert number == counts[corpus]
        counts[corpus] += 1
        assert shares.are_held(counts, k + 1)


@settings(max_examples=40, deadline=None)
@given(weights=weights_strategy, k=st.integers(0, 10**15))
def test_far_samples_follow_on_each_other(weights: list[Fraction], k: int) -> None:
    """The number within a corpus grows by one from each of its samples to the next, wherever reading starts."""
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


MIXTURES = [
    [1, 1],
    [Fraction(1, 3), Fraction(2, 3)],
    [Fraction(1, 3)] * 3,
    [Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)],
    [5, 1, 1, 1],
    [Fraction(1, 1000), 1, Fraction(1, 3), Fraction(1, 7), 2],
    [1, 2, 3, 4, 5, 6],
    [Fraction(1, 3), 1, 1, 100, Fraction(1, 3), Fraction(22, 7), 1],
    [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89],
    [Fraction(1, 3) ** (number % 7) for number in range(24)],
]


@pytest.mark.parametrize("weights", MIXTURES, ids=lambda weights: ",".join(map(str, weights)))
def test_proportions_hold_after_every_single_sample(weights: list[Fraction]) -> None:
    """At every point of 4000 samples, no corpus is off its share by more than the bound, however many there are."""
    blend, counts, shares = Blend(weights), [0] * len(weights), Shares(weights)
    assert [most_off(2), most_off(3)] == [Fraction(1, 2), 1] and most_off(len(weights)) < Fraction(17, 10)
    for k in range(4000):
        corpus, number = blend.choose(k)
        assert number == counts[corpus], "every corpus gives its samples in their order"
        counts[corpus] += 1
        assert shares.are_held(counts, k + 1), k


@pytest.fixture
def mixture(tmp_path: Path) -> Samples:
    """Return a mixture, 3 : 2 : 1, of three corpora of 40, 25 and 11 samples, whose tokens are all different."""
    sources = []
    for number, count in enumerate((40, 25, 11)):
        tokens = [1000 * number + token for token in range(4 * count + 1)]
        dataset = IndexedDataset(write_corpus(tmp_path / str(number), [[tokens]]))
        sources.append(SampleSource(dataset, sequences=range(1), seq_length=4, seed=7, vocab_size=3000, stream=number))
    return BlendedSamples(sources, [3, 2, 1])


def test_no_sample_is_seen_twice_before_its_corpus_has_been_read(mixture: Samples) -> None:
    firsts = [int(mixture.sample(k)[0]) for k in range(600)]
    for number, count in enumerate((40, 25, 11)):
        own = [first for first in firsts if first // 1000 == number]
        assert len(own) >= 99
        for begin in range(0, len(own) - count + 1, count):
            assert sorted(own[begin : begin + count]) == [1000 * number + 4 * i for i in range(count)]


def rows_of_steps(source: Samples, steps: int, *, data_size: int, start: int = 0) -> list[list[list[int]]]:
    """Return the rows of all ranks in every step from sample `start` up to step `steps`, in the order of samples."""
    found: list[list[list[int]]] = []
    for step in range(start // 24, steps):
        rows: dict[int, list[int]] = {}
        for rank in range(data_size):
            layout = BatchLayout(global_batch_size=24, micro_batch_size=2, data_rank=rank, data_size=data_size)
            with BatchLoader(source, layout, start_sample=24 * step, prefetch=0) as loader:
                for batch in next(loader).micro_batches:
                    for row, (tokens, labels) in enumerate(zip(batch.tokens, batch.labels, strict=True)):
                        rows[batch.first_sample + row] = [*tokens.tolist(), int(labels[-1])]
        assert sorted(rows) == [*range(24 * step, 24 * step + 24)]
        found.append([rows[k] for k in sorted(rows)])
    return found


@pytest.mark.parametrize("skipped", [[], [range(5, 9), range(30, 75)]], ids=["all", "some skipped"])
def test_layouts_and_a_resume_within_an_epoch_give_the_same_samples(mixture: Samples, skipped: list[range]) -> None:
    source = RemainingSamples(mixture, skipped)
    alone = rows_of_steps(source, 8, data_size=1)
    assert rows_of_steps(source, 8, data_size=3) == alone
    assert rows_of_steps(source, 8, data_size=4, start=72) == alone[3:]
    numbers = [k for k in range(300) if not any(k in span for span in skipped)][: 8 * 24]
    assert [row for step in alone for row in step] == [mixture.sample(k).tolist() for k in numbers]


class Numbered:
    """A source whose sample k is [name, k]."""

    seq_length = 1

    def __init__(self, name: int) -> None:
        self.name = name

    def loss_mask(self, k: int) -> NDArray[np.uint8]:
        return np.array([self.name, k], np.uint8)

    def sample(self, k: int) -> NDArray[np.int64]:
        return np.array([self.name, k])


def test_blended_samples_come_from_the_chosen_corpus() -> None:
    blended = BlendedSamples([Numbered(0), Numbered(1), Numbered(2)], [1, 2, 3])
    blend = Blend([1, 2, 3])
    assert blended.seq_length == 1
    for k in range(50):
        assert blended.sample(k).tolist() == list(blend.choose(k))
        assert blended.loss_mask(k).tolist() == list(blend.choose(k))


@each(
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


@each(
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


def test_a_bad_path_names_its_flag() -> None:
    with pytest.raises(DataError, match="--valid-data-path 0 a: weight 0"):
        parse_data_path(["0", "a"], "--valid-data-path")
