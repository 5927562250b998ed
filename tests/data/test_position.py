"""Tests of a run's place in its corpora: no sample is repeated or lost by another mixture, length or batch."""

import json
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.token_files import count_up, write_corpus

from megazero.data.blend import Blend
from megazero.data.corpora import Corpora
from megazero.data.position import Part, Stretch, changes, stretch_at
from megazero.data.reading import Reading
from megazero.errors import CheckpointError

# Tokens of three corpora, which all differ: a's from 0 on, b's from 20,000, c's from 40,000.
SIZES = {"a": 6001, "b": 3778, "c": 901}


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("corpora")
    return {
        name: write_corpus(folder / name, [[[20_000 * place + token for token in range(size)]]])
        for place, (name, size) in enumerate(SIZES.items())
    }


class Run:
    """A run that is started again and again with other settings, and reads batches of samples."""

    def __init__(self, prefixes: dict[str, str]) -> None:
        self.prefixes = prefixes
        self.saved: str | None = None
        self.consumed = 0
        self.read: list[list[int]] = []

    def start(self, mixture: str, length: int, *, samples: int, batch: int = 8) -> Stretch:
        words = [self.prefixes.get(word, word) for word in mixture.split()]
        saved = None if self.saved is None else json.loads(self.saved)
        source, stretch = Corpora(words, split="1").training(
            saved, self.consumed, seq_length=length, seed=5, vocab_size=65_000
        )
        for _ in range(samples // batch):
            self.read += [source.sample(self.consumed + place).tolist() for place in range(batch)]
            self.consumed += batch
        self.saved = json.dumps(stretch.to_json())
        return stretch


def inputs_of(read: list[list[int]], corpus: int) -> list[int]:
    return [token for sample in read for token in sample[:-1] if token // 20_000 == corpus]


def epochs(tokens: list[int]) -> list[Counter[int]]:
    """Return the counts of tokens in consecutive pieces, each of which ends before a token would repeat."""
    found = [Counter[int]()]
    for token in tokens:
        if found[-1][token]:
            found.append(Counter())
        found[-1][token] += 1
    return found


def test_the_same_mixture_goes_on_as_if_nothing_had_been(prefixes: dict[str, str]) -> None:
    whole, parts = Run(prefixes), Run(prefixes)
    whole.start("0.6 a 0.4 b", 10, samples=800)
    for samples, batch in ((80, 8), (400, 4), (320, 32)):
        stretch = parts.start("0.6 a 0.4 b", 10, samples=samples, batch=batch)
    assert parts.read == whole.read and stretch.start == 0
    plain = Corpora(["0.6", prefixes["a"], "0.4", prefixes["b"]], split="1").samples(
        "train", seq_length=10, seed=5, vocab_size=65_000
    )
    assert whole.read == [plain.sample(k).tolist() for k in range(800)], "a first stretch has the order of old"


def test_other_mixtures_read_every_sample_of_an_epoch_once(prefixes: dict[str, str]) -> None:
    """Weights change, a corpus comes, goes, and comes back; each goes through its epochs without a gap."""
    run = Run(prefixes)
    run.start("0.6 a 0.4 b", 10, samples=400)
    run.start("0.2 c 0.1 a 0.7 b", 10, samples=240, batch=24)
    run.start("c b", 10, samples=80)
    run.start("0.5 b 0.5 a", 10, samples=720, batch=3)
    for corpus, size in enumerate(SIZES.values()):
        whole = [*range(20_000 * corpus, 20_000 * corpus + (size - 1) // 10 * 10)]
        found = epochs(inputs_of(run.read, corpus))
        assert all(sorted(each) == whole for each in found[:-1]) and set(found[-1]) <= {*whole}
        assert max(max(each.values()) for each in found) == 1
    assert len(epochs(inputs_of(run.read, 0))) == 2
    assert sum(map(len, run.read)) == 11 * run.consumed == 11 * 1440
    shares = Counter(sample[0] // 20_000 for sample in run.read[400:640])
    assert shares == {2: 48, 0: 24, 1: 168}


@pytest.mark.parametrize("lengths", [(10, 5, 10), (10, 20, 7), (7, 30, 30, 4), (16, 3, 100)])
def test_other_lengths_finish_the_epoch_with_what_is_unread(lengths: tuple[int, ...], prefixes: dict[str, str]) -> None:
    """Of an epoch less than a sample of every length that it was cut to remains unread, and nothing is read twice."""
    run = Run(prefixes)
    for length in lengths:
        run.start("b", length, samples=4000 // length // len(lengths), batch=1)
    first = epochs(inputs_of(run.read, 1))[0]
    assert max(first.values()) == 1
    run.start("b", lengths[-1], samples=4000 // lengths[-1], batch=1)
    first, second, *_ = epochs(inputs_of(run.read, 1))
    assert SIZES["b"] - sum(lengths) - 1 <= sum(first.values()) <= SIZES["b"] - 1
    assert max(first.values()) == 1
    again = SIZES["b"] - 1 - (SIZES["b"] - 1) % lengths[-1]
    assert sorted(second) == [*range(20_000, 20_000 + again)] or len(second) < again
    for length, sample in ((len(sample) - 1, sample) for sample in run.read):
        # A label is the next token of the corpus, but where two unread pieces meet.
        joints = sum(after != before + 1 for before, after in pairwise(sample))
        assert joints <= length // min(lengths) + 1


def test_a_shorter_length_that_divides_cuts_samples_up(prefixes: dict[str, str]) -> None:
    run, whole = Run(prefixes), Run(prefixes)
    whole.start("a", 12, samples=500, batch=1)
    run.start("a", 12, samples=100, batch=1)
    run.start("a", 4, samples=1200, batch=1)
    pieces = [sample[first : first + 5] for sample in whole.read[100:500] for first in (0, 4, 8)]
    assert run.read[100:] == pieces


def test_counts_of_100_000_samples_are_those_of_the_places() -> None:
    """Places by arithmetic are those of counting one by one, over 100,000 samples of changing mixtures and lengths."""
    random = np.random.default_rng(0)
    tokens = {"a": 40_013, "b": 9_001, "c": 500}
    stretch: Stretch | None = None
    number, counted = 0, dict.fromkeys(tokens, 0)
    for _ in range(20):
        names = random.permutation(list(tokens))[: random.integers(1, 4)].tolist()
        parts = [Part(name, Fraction(int(random.integers(1, 9)), 7), tokens[name]) for name in names]
        length = int(random.integers(8, 40))
        stretch = stretch_at(number, parts, length, stretch)
        blend = Blend([part.weight for part in parts])
        for k in range(5000):
            counted[parts[blend.choose(number + k - stretch.start).corpus].key] += length
        number += 5000
        for name, reading in stretch.at(number).items():
            size = reading.epoch_size(reading.length) * reading.length
            read = reading.taken * reading.length + reading.offset
            assert 0 <= read <= size <= tokens[name]
            # Each epoch leaves less than a sample of each length unread, here of 39 inputs at most.
            epochs_of_it = reading.epoch
            assert epochs_of_it * (tokens[name] - 21 * 40) <= counted[name] <= epochs_of_it * tokens[name] + read
    assert number == 100_000 and sum(counted.values()) > 10**6


def test_places_move_one_by_one_as_at_once() -> None:
    for start in (
        Reading(0, 1000, 10),
        Reading(0, 1000, 10, 2, 37),
        Reading(0, 1000, 10, 1, 50, 13),
        Reading(3, 90, 7, 0, 12),
    ):
        for length in (3, 10, 45):
            place = start
            for count in range(1, 400):
                place = place.after(1, length)
                assert place == start.after(count, length)


def test_parts_are_recognised_by_their_content(prefixes: dict[str, str], tmp_path: Path) -> None:
    """A corpus that has moved goes on; another part of it, and a longer one, are others."""
    run = Run(prefixes)
    first = run.start("0.5 a 0.5 c", 10, samples=80)
    moved = Run({**prefixes, "a": write_corpus(tmp_path / "elsewhere", count_up(SIZES["a"]))})
    moved.saved, moved.consumed = run.saved, run.consumed
    assert moved.start("0.5 a 0.5 c", 10, samples=8) == first
    moved.prefixes["a"] = write_corpus(tmp_path / "longer", count_up(SIZES["a"] + 1))
    moved.saved, moved.consumed = run.saved, run.consumed
    other = moved.start("0.5 a 0.5 c", 10, samples=8)
    (line,) = changes(json.loads(run.saved or ""), other)
    assert line == (
        "another mixture from sample 80 on: 1 of 2 corpora go on where they were left, 1 begin; 1 are read no more"
    )
    assert changes(None, other) == () and changes(first.to_json(), first) == ()
    twice = Run(prefixes).start("0.5 a 0.5 a", 10, samples=8)
    assert len({key for key, _ in twice.mixture}) == 2


def test_a_place_of_another_form_is_refused() -> None:
    for wrong in ({}, {"start": 0, "seq_length": 1, "mixture": 3, "readings": {}}, {"start": "x"}):
        with pytest.raises(CheckpointError, match="place in its corpora"):
            Stretch.from_json(wrong)


def test_a_stretch_is_what_it_was_after_being_stored() -> None:
    stretch = stretch_at(0, [Part("x", Fraction(1, 3), 100), Part("y", Fraction(2), 50)], 7, None)
    assert Stretch.from_json(json.loads(json.dumps(stretch.to_json()))) == stretch
    assert [reading.stream for reading in stretch.readings.values()] == [0, 1]
