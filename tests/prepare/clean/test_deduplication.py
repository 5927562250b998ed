"""Deduplication drops the documents that plain Python sets of digests and of shingles identify as duplicates."""

import random
import re
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from megazero.errors import DataError
from megazero.prepare.clean import deduplication
from megazero.prepare.clean.cleaning_steps import Dropped
from megazero.prepare.clean.deduplication import (
    EXACT_BYTES,
    NEAR_BYTES,
    ExactDuplicates,
    NearDuplicates,
    PairTable,
    shingles,
)

WORDS = [f"w{number}" for number in range(5000)]


def document(draw: random.Random, words: int = 200) -> list[str]:
    return draw.choices(WORDS, k=words)


def jaccard(first: list[str], second: list[str]) -> float:
    """Return the Jaccard similarity of the sets of five-word shingles of two lists of words, from its definition."""
    one, other = ({tuple(words[n : n + 5]) for n in range(len(words) - 4)} for words in (first, second))
    return len(one & other) / len(one | other)


def test_a_table_finds_what_a_dictionary_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplication, "_LEAST_LATEST", 7)
    draw, table, expected = random.Random(1), PairTable(np.uint32), dict[int, list[int]]()
    for number in range(3000):
        key = draw.choice([draw.randrange(400), 2**64 - 1 - draw.randrange(400)])
        table.add(key, number)
        expected.setdefault(key, []).append(number)
    assert len(table) == 3000
    for key in [*range(500), *range(2**64 - 500, 2**64)]:
        assert sorted(table.find([key])) == expected.get(key, [])
    several = [*list(expected)[:3], 450]
    assert sorted(table.find(several)) == sorted(number for key in several[:3] for number in expected[key])


def test_exact_duplicates_are_those_of_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplication, "_LEAST_LATEST", 16)
    draw, step, seen = random.Random(2), ExactDuplicates(), set()
    texts = [f"text {draw.randrange(600)}" + " é" * draw.randrange(2) for _ in range(3000)]
    for text in [*texts, "", " ", ""]:
        assert (step.apply(text) == text) is (text not in seen)
        seen.add(text)


def test_digests_that_share_a_half_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two digests that share only one 64-bit half are not taken for a duplicate; the other half is compared too."""
    digests = [5 << 64 | 1, 5 << 64 | 2, 6 << 64 | 1, 5 << 64 | 2]
    monkeypatch.setattr(deduplication, "xxh3_128_intdigest", lambda data: digests[int(data)])
    monkeypatch.setattr(deduplication, "_LEAST_LATEST", 1)
    step = ExactDuplicates()
    assert [isinstance(step.apply(str(number)), Dropped) for number in range(4)] == [False, False, False, True]


def test_shingles_are_the_different_runs_of_five_words() -> None:
    text = "The cat, the dog; the cat the dog the CAT the dog."
    words = re.findall(r"\w+", text.lower())
    assert len(shingles(text)) == len({tuple(words[n : n + 5]) for n in range(len(words) - 4)})
    assert np.array_equal(shingles("a b c d e f"), np.sort([shingles("A b, c d e")[0], shingles("b c d e F!")[0]]))
    assert shingles("a b c d e") != shingles("b a c d e")
    assert len(shingles("a b")) == len(shingles("")) == len(shingles("!!!")) == 1
    assert shingles("!!!") != shingles("???") and shingles("a b") == shingles("a, b")
    assert len(shingles("\u4e2d\u6587\u6ca1\u6709\u7a7a\u683c\u7684\u6587\u5b57")) == 5  # nine letters without a space


def test_words_of_ascii_are_those_of_any_text() -> None:
    text = "".join(map(chr, range(128))) + " x1 _y-z "
    for word in ("é", "中"):
        assert set(shingles(text * 2 + word)) > set(shingles(text)) and len(shingles(text)) == 3


def test_near_duplicates_are_found_by_similarity() -> None:
    """Of documents of known similarity, all well above the threshold are dropped, and all well below it are kept."""
    draw, counts = random.Random(3), {True: [0, 0], False: [0, 0]}
    step = NearDuplicates(0.8)
    for _ in range(150):
        words = document(draw)
        assert step.apply(" ".join(words)) == " ".join(words)
        other = list(words)
        for _ in range(draw.choice([1, 2, 12, 20])):
            other[draw.randrange(len(other))] = "changed"
        similarity = jaccard(words, other)
        if 0.7 < similarity < 0.9:
            continue
        counts[similarity > 0.8][isinstance(step.apply(" ".join(other)), Dropped)] += 1
    assert counts[False][1] == 0 and counts[False][0] > 30
    assert counts[True][0] == 0 and counts[True][1] > 30


def test_similarities_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, errors = random.Random(4), []
    for changes in (2, 4, 7):
        words = document(draw, 600)
        other = list(words)
        for place in draw.sample(range(600), changes):
            other[place] = "changed"
        step = NearDuplicates(0.3)
        step.apply(" ".join(words))
        dropped = step.apply(" ".join(other))
        assert isinstance(dropped, Dropped)
        told = re.fullmatch(r"similarity (\S+) to document 1 of the output", dropped.reason)
        assert told
        errors.append(abs(float(told[1]) - jaccard(words, other)))
    assert max(errors) < 0.13  # three standard errors


def test_the_nearest_document_is_named() -> None:
    draw, step = random.Random(5), NearDuplicates(0.5)
    for _ in range(3):
        step.apply(" ".join(document(draw)))
    words = document(draw)
    step.apply(" ".join(words))
    dropped = step.apply("  ".join(words).upper() + ".")
    assert dropped == Dropped("similarity 1.00 to document 4 of the output")


def test_decisions_are_the_same_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import random\n"
        "from megazero.prepare.clean.deduplication import NearDuplicates\n"
        "draw, step = random.Random(6), NearDuplicates(0.6)\n"
        "for _ in range(100):\n"
        "    print(step.apply(' '.join(draw.choices('ab', k=9))))\n"
    )
    exec(program, {})
    here, there = (
        capsys.readouterr().out,
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True),
    )
    assert here == there.stdout and here.count("Dropped") > 3


def test_the_memory_of_a_document_is_as_told() -> None:
    draw = random.Random(7)
    tracemalloc.start()
    table = PairTable(np.uint64)
    for _ in range(60_000):
        table.add(draw.getrandbits(64), draw.getrandbits(64))
    exact = tracemalloc.get_traced_memory()[0] / 60_000
    tracemalloc.stop()
    assert 16 <= exact <= EXACT_BYTES + 4096 * 300 / 60_000  # up to 4096 entries of 300 bytes wait to be merged
    assert 128 + 14 * 12 <= NEAR_BYTES <= 1000


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(DataError, match="--deduplicate near without the package datasketch"):
        NearDuplicates(0.8)
