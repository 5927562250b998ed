"""Statistics of document lengths, computed block by block, equal those of numpy on the whole corpus."""

from pathlib import Path

import numpy as np
import pytest
from support.token_files import write_corpus

from megazero.data.indexed_dataset import IndexedDataset
from megazero.errors import DataError
from megazero.prepare.inspect import lengths as module
from megazero.prepare.inspect.lengths import LengthRange, count_lengths, document_lengths, num_blocks

# These have empty documents at both ends and in a row, documents of several sequences, and one across several blocks.
DOCUMENTS = [[], [[1, 2, 3]], [], [], [[4], [5, 6], [7, 8, 9, 10]], [[1]], [[0] * 9], [[2], [3]], []]
SIZES = [0, 3, 0, 0, 7, 1, 9, 2, 0]


@pytest.mark.parametrize("block", [1, 2, 3, 4, 100])
def test_every_document_has_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "c", DOCUMENTS))
    monkeypatch.setattr(module, "CHECK_BLOCK", block)
    blocks = list(document_lengths(dataset))
    assert np.concatenate(blocks).tolist() == SIZES
    assert len(blocks) == num_blocks(dataset) and max(map(len, blocks)) <= block


def test_lengths_that_miss_tokens_are_refused(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "c", DOCUMENTS))
    dataset.num_tokens += 1
    with pytest.raises(DataError, match="add up to 22 tokens of 23"):
        list(document_lengths(dataset))


def test_a_corpus_without_documents_is_all_zeros(tmp_path: Path) -> None:
    found = count_lengths(document_lengths(IndexedDataset(write_corpus(tmp_path / "c", []))))
    assert found == (0, 0, 0, 0, 0, 0, 0, ()) and found.mean == 0


@pytest.mark.parametrize("table_size", [1, 50, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 1000])
def test_figures_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch, table_size: int, count: int) -> None:
    monkeypatch.setattr(module, "TABLE_SIZE", table_size)
    drawn = np.random.default_rng(count).integers(0, 200, count)
    found = count_lengths(np.array_split(drawn, 3))
    assert (found.documents, found.empty, found.tokens) == (count, (drawn == 0).sum(), drawn.sum())
    assert (found.shortest, found.longest) == (drawn.min(), drawn.max())
    assert found.median == np.percentile(drawn, 50, method="inverted_cdf")
    assert found.percentile_95 == np.percentile(drawn, 95, method="inverted_cdf")
    assert found.mean == pytest.approx(drawn.mean())
    assert sum(each.documents for each in found.ranges) == count


def test_ranges_double_without_gap() -> None:
    found = count_lengths([np.array([0, 0, 1, 2, 3, 8, 15, 15])])
    assert found.ranges == (
        LengthRange(0, 0, 2, 0), LengthRange(1, 1, 1, 1), LengthRange(2, 3, 2, 5), LengthRange(4, 7, 0, 0),
        LengthRange(8, 15, 3, 38),
    )  # fmt: skip
    assert [each.name for each in found.ranges] == ["0", "1", "2-3", "4-7", "8-15"]


def test_documents_longer_than_the_table_count_exactly() -> None:
    long = (1 << 40) + 5
    found = count_lengths([np.array([3, long, long])])
    assert (found.median, found.longest, found.tokens) == (long, long, 2 * long + 3)
    assert found.ranges[-1] == LengthRange(1 << 40, (1 << 41) - 1, 2, 2 * long)
