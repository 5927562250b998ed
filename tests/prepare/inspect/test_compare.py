"""The first difference of two corpora, searched block by block, is the one that comparing plain lists gives."""

from pathlib import Path

import numpy as np
import pytest
from support.token_files import Documents, write_corpus

from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.tokenizers import ByteTokenizer
from megazero.prepare.inspect import compare as module
from megazero.prepare.inspect import lengths
from megazero.prepare.inspect.compare import CorpusDifference, difference_lines, find_difference

BASE = [[[1, 2, 3]], [], [[4, 5], [6]], [[7]]]


def differ(folder: Path, one: Documents, other: Documents, code: int = 8) -> CorpusDifference | None:
    pair = (
        IndexedDataset(write_corpus(folder / "one", one)),
        IndexedDataset(write_corpus(folder / "other", other, code)),
    )
    return find_difference(*pair, lambda tokens: None)


def by_hand(one: Documents, other: Documents) -> tuple[int, int | None] | None:
    """Return the document and the position in it where the token ids first differ, or None if they are all equal."""
    rows = [[[token for sequence in document for token in sequence] for document in each] for each in (one, other)]
    for document in range(max(map(len, rows))):
        mine, theirs = (row[document] if document < len(row) else None for row in rows)
        if mine is None or theirs is None:
            return document, None
        for position in range(max(len(mine), len(theirs))):
            if mine[position : position + 1] != theirs[position : position + 1]:
                return document, position
    return None


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (BASE, None),
        ([[[1, 2, 9]], [], [[4, 5], [6]], [[7]]], (0, 2, (3, 9), "another id")),
        ([[[1, 2, 3]], [], [[4, 5], [6]], [[8]]], (3, 0, (7, 8), "another id")),
        ([[[1, 2]], [[3]], [[4, 5], [6]], [[7]]], (0, 2, (3, None), "one document ends here")),
        ([[[1, 2, 3]], [[4, 5]], [[6]], [[7]]], (1, 0, (None, 4), "one document ends here")),
        ([[[1, 2, 3]], [], [[4, 5], [6]]], (3, None, (None, None), "one corpus ends here")),
        ([[[1, 2, 3]], [], [[4, 5], [6]], [[7]], []], (4, None, (None, None), "one corpus ends here")),
        ([], (0, None, (None, None), "one corpus ends here")),
        ([[[1, 2, 3]], [], [[4, 5, 6]], [[7]]], (2, None, (None, None), "another number of sequences")),
        ([[[1, 2, 3]], [], [[4], [5, 6]], [[7]]], (2, None, (None, None), "sequence 1 has another length")),
        ([[[1, 2, 3]], [], [[], [4, 5, 6]], [[7]]], (2, None, (None, None), "sequence 1 has another length")),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 100])
def test_the_first_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Documents, expected: object, block: int
) -> None:
    monkeypatch.setattr(module, "CHECK_BLOCK", block)
    monkeypatch.setattr(lengths, "CHECK_BLOCK", block)
    assert differ(tmp_path, BASE, other) == expected


def test_small_changes_of_random_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_BLOCK", 5)
    monkeypatch.setattr(lengths, "CHECK_BLOCK", 3)
    random = np.random.default_rng(0)
    for _ in range(120):
        one: list[list[list[int]]] = [
            [random.integers(0, 3, size).tolist() for size in random.integers(1, 4, random.integers(0, 3))]
            for _ in range(random.integers(1, 8))
        ]
        other = [[list(sequence) for sequence in document] for document in one]
        for _ in range(random.integers(0, 3)):
            document = other[random.integers(len(other))]
            change = random.integers(4)
            if change == 0 and document:
                document[random.integers(len(document))][0] = 9
            elif change == 1 and document:
                document.pop()
            elif change == 2:
                document.append([1])
            elif change == 3:
                other.insert(int(random.integers(len(other))), [])
        found = differ(tmp_path, one, other)
        assert (found and (found.document, found.position)) == by_hand(one, other), (one, other)


def test_another_integer_type_is_a_difference(tmp_path: Path) -> None:
    found = differ(tmp_path, BASE, BASE, code=4)
    assert found is not None and found.document is None
    assert found.what == "the ids are uint16 here and int32 there"
    assert differ(tmp_path, BASE, [[[1, 2, 4]], *BASE[1:]], code=4) == (0, 2, (3, 4), "another id")


def test_modes_are_a_difference(tmp_path: Path) -> None:
    one = IndexedDataset(write_corpus(tmp_path / "one", BASE))
    other = IndexedDataset(write_corpus(tmp_path / "other", BASE, modes=True))
    found = find_difference(one, other, lambda tokens: None)
    assert found is not None and found.what == "one corpus has modes"


def test_progress_counts_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_BLOCK", 3)
    dataset, done = IndexedDataset(write_corpus(tmp_path / "c", BASE)), []
    find_difference(dataset, dataset, done.append)
    assert done == [3, 3, 1]


def test_a_difference_is_told_with_what_is_around_it(tmp_path: Path) -> None:
    texts = [b"the cat sat down", b"the cat sat"]
    one, other = (
        IndexedDataset(write_corpus(tmp_path / name, [[list(text)]])) for name, text in zip("ab", texts, strict=True)
    )
    found = find_difference(one, other, lambda tokens: None)
    lines = difference_lines(one, other, found, None)
    assert lines[0] == "different      document 0, position 11: one document ends here"
    assert lines[1].endswith("a: 1 document, 1 sequence, 16 tokens")
    assert "then 32, [100, 111, 119, 110]" in lines[2] and "then the end, []" in lines[4]
    lines = difference_lines(one, other, found, ByteTokenizer())
    assert lines[2].strip() == "' cat sat' then 32 ' ', 'down'" and lines[4].strip() == "' cat sat' then the end, ''"
    assert difference_lines(one, one, None, None)[0].startswith("equal ")
    types = difference_lines(one, other, CorpusDifference(None, None, (None, None), "types"), None)
    assert types[0] == "different      types" and len(types) == 3
