"""Tests splits and samples against a reference that lists everything."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.each import each
from support.token_files import count_up, write_corpus

from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.samples import RemainingSamples, SampleSource, SplitShares, parse_split, split_sequences
from megazero.errors import DataError
from megazero.rules.files import split_shares


def megatron_ranges(text: str, count: int) -> list[tuple[int, int]]:
    """Return splits by Megatron-LM's rule: cumulative shares of the normalised weights, times the count, rounded."""
    weights = [float(part) for part in text.split(",")]
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    bounds = [0.0]
    for weight in weights:
        bounds.append(bounds[-1] + weight / total)
    return [(round(a * count), round(b * count)) for a, b in pairwise(bounds)]


@each("text", ["969,30,1", "0.9,0.05,0.05", "1", "100,0,0", "98,2", "1,1,1", " 8 , 1 , 1 "])
@each("count", [1, 2, 3, 10, 190, 731, 12345])
def test_split_is_megatrons(text: str, count: int) -> None:
    ranges = [(part.start, part.stop) for part in split_sequences(count, parse_split(text))]
    wanted = megatron_ranges(text, count)
    parts = sum(share > 0 for share in parse_split(text))
    if count < parts or sum(first < last for first, last in wanted) == parts:
        assert ranges == wanted
    assert ranges[-1][1] == count


@each(
    ("text", "count", "sizes"),
    [
        ("949,50,1", 260, [247, 12, 1]),
        ("969,30,1", 10, [8, 1, 1]),
        ("969,30,1", 3, [1, 1, 1]),
        ("1,0,999", 2, [1, 0, 1]),
        ("1,1,998", 5, [1, 1, 3]),
        ("98,2", 2, [1, 1, 0]),
        ("969,30,1", 2, [2, 0, 0]),
        ("1,999", 1, [0, 1, 0]),
    ],
)
def test_a_small_share_is_a_sequence(text: str, count: int, sizes: list[int]) -> None:
    assert [len(part) for part in split_sequences(count, parse_split(text))] == sizes


def test_one_number_gives_all_to_train() -> None:
    assert parse_split("7") == SplitShares(1.0, 0.0, 0.0)


@pytest.mark.parametrize("text", ["90/10", "1e3,1_0", "969, 30, 1"])
def test_what_the_configuration_takes_for_a_split_is_one(text: str) -> None:
    assert tuple(parse_split(text)) == split_shares(text)


@each("text", ["", "a", "1,2,3,4", "1,,2", "-1,2", "nan", "inf,1", "0,0,0", "9 1"])
def test_bad_splits(text: str) -> None:
    with pytest.raises(DataError, match="--split"):
        parse_split(text)


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(2, 300),
    num_documents=st.integers(1, 9),
    seq_length=st.integers(1, 17),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_an_epoch_reads_every_token_once_as_input(
    tmp_path_factory: pytest.TempPathFactory,
    num_tokens: int,
    num_documents: int,
    seq_length: int,
    seed: int,
    data: st.DataObject,
) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path_factory.mktemp("s") / "c", count_up(num_tokens, num_documents)))
    first = data.draw(st.integers(0, dataset.num_sequences - 1))
    sequences = range(first, data.draw(st.integers(first + 1, dataset.num_sequences)))
    begin, end = dataset.sequence_start(sequences.start), dataset.sequence_start(sequences.stop)
    count = (end - begin - 1) // seq_length
    if count < 1:
        with pytest.raises(DataError, match="a sample takes"):
            SampleSource(dataset, sequences=sequences, seq_length=seq_length, seed=seed, vocab_size=num_tokens)
        return
    source = SampleSource(dataset, sequences=sequences, seq_length=seq_length, seed=seed, vocab_size=num_tokens)
    assert source.samples_per_epoch == count
    whole = [list(range(begin + i * seq_length, begin + (i + 1) * seq_length + 1)) for i in range(count)]
    for epoch in range(2):
        samples = [source.sample(epoch * count + i) for i in range(count)]
        assert all(sample.dtype == np.int64 for sample in samples)
        assert sorted(sample.tolist() for sample in samples) == whole


def test_order_depends_on_seed_epoch_and_stream(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "c", count_up(1001)))

    def order(epoch: int, seed: int, stream: int) -> list[int]:
        source = SampleSource(dataset, sequences=range(1), seq_length=10, seed=seed, vocab_size=1001, stream=stream)
        return [int(source.sample(epoch * 100 + i)[0]) for i in range(100)]

    orders = [order(0, 1, 0), order(1, 1, 0), order(0, 2, 0), order(0, 1, 1), list(range(0, 1000, 10))]
    for number, one in enumerate(orders):
        assert sorted(one) == orders[-1]
        assert one == orders[number]
        assert all(sum(a == b for a, b in zip(one, other, strict=True)) < 10 for other in orders[number + 1 :])
    assert order(0, 1, 0) == orders[0]


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    documents = [[[1, 2, 3]], [], [[4, 5], [6, 99, 7]], [[8]]]
    dataset = IndexedDataset(write_corpus(tmp_path / "c", documents))
    source = SampleSource(dataset, sequences=range(4), seq_length=8, seed=0, vocab_size=50)
    with pytest.raises(DataError) as caught:
        source.sample(0)
    (problem,) = caught.value.problems
    assert problem.given == f"{dataset.prefix}: document 2, position 3: token 99"
    assert "vocabulary size 50" in problem.rule


def test_a_negative_token_is_refused(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "c", [[[1, -2, 3]]], code=4))
    source = SampleSource(dataset, sequences=range(1), seq_length=2, seed=0, vocab_size=50)
    with pytest.raises(DataError, match="position 1: token -2"):
        source.sample(0)


def test_samples_may_be_written_to(tmp_path: Path) -> None:
    """A sample is the caller's own memory, not the file's."""
    dataset = IndexedDataset(write_corpus(tmp_path / "c", [[[1, 2, 3]]], code=5))
    source = SampleSource(dataset, sequences=range(1), seq_length=2, seed=0, vocab_size=50)
    source.sample(0)[0] = 9
    assert source.sample(0).tolist() == [1, 2, 3]


# --- samples that are passed over -------------------------------------------------------------------------------------


class Row:
    """A source whose sample k is [k]."""

    seq_length = 0

    def loss_mask(self, k: int) -> NDArray[np.uint8]:
        return np.array([k], np.uint8)

    def sample(self, k: int) -> NDArray[np.int64]:
        return np.array([k])


def left(spans: list[range], count: int) -> list[int]:
    """Return the first `count` numbers of samples that are in none of the spans."""
    skipped = {number for span in spans for number in span}
    return [number for number in range(count + len(skipped)) if number not in skipped][:count]


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=6))
def test_skipped_samples_are_passed_over_and_nothing_else(steps: list[tuple[int, int]]) -> None:
    spans, position = [], 0
    for gap, length in steps:
        spans.append(range(position + gap, position + gap + length))
        position = spans[-1].stop
    remaining = RemainingSamples(Row(), spans)
    assert remaining.seq_length == 0
    assert [int(remaining.sample(k)[0]) for k in range(80)] == left(spans, 80)
    assert [remaining.number(k) for k in (79, 3, 0)] == [left(spans, 80)[k] for k in (79, 3, 0)]
    masks = [remaining.loss_mask(k) for k in range(80)]
    assert [int(mask[0]) for mask in masks if mask is not None] == left(spans, 80)


def test_a_span_that_is_new_at_a_restart() -> None:
    """After 10 samples, a new span ahead removes its own samples; one behind, read already, shifts later numbers."""
    ahead, behind = RemainingSamples(Row(), [range(12, 14)]), RemainingSamples(Row(), [range(3, 5)])
    assert [ahead.number(k) for k in range(10, 15)] == [10, 11, 14, 15, 16]
    assert [behind.number(k) for k in range(10, 13)] == [12, 13, 14]


@pytest.mark.parametrize("itemsize_code", [1, 2, 3, 4, 5, 8])
def test_every_integer_type_is_read(tmp_path: Path, itemsize_code: int) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "c", [[[5, 6, 127]]], code=itemsize_code))
    source = SampleSource(dataset, sequences=range(1), seq_length=2, seed=0, vocab_size=128)
    assert source.sample(0).tolist() == [5, 6, 127] and source.sample(0).dtype == np.int64
    narrow = SampleSource(dataset, sequences=range(1), seq_length=2, seed=0, vocab_size=127)
    with pytest.raises(DataError, match="position 2: token 127"):
        narrow.sample(0)
