"""What a corpus holds, told to a person."""

from pathlib import Path

import pytest
from support.token_files import write_corpus

from megazero.data import inspect
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import Sidecar
from megazero.data.tokenizers import ByteTokenizer


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    return IndexedDataset(write_corpus(tmp_path / "c", [[[104, 105]], [], [[9], [3, 7]]]))


def test_header_lines_tell_counts(dataset: IndexedDataset) -> None:
    text = "\n".join(inspect.header_lines(dataset, None))
    assert "documents      3" in text and "sequences      3" in text and "tokens         5 of uint16, 10 B" in text
    sidecar = Sidecar(3, 3, 5, 20, "ByteTokenizer", 257, 256, False, {"vocab_file": "ab" * 32}, [])
    text = "\n".join(inspect.header_lines(dataset, sidecar))
    assert "ByteTokenizer vocab_file abababababab" in text
    assert "257, end of document 256 (not appended)" in text and "4.00 bytes a token" in text


def test_documents_are_shown_as_ids_or_text(dataset: IndexedDataset) -> None:
    assert inspect.shown_document(dataset, 0, 5, None) == "[104, 105] (2 tokens)"
    assert inspect.shown_document(dataset, 0, 1, ByteTokenizer()) == "'h' ... (2 tokens)"
    assert inspect.shown_document(dataset, 1, 5, None) == "[] (0 tokens)"


@pytest.mark.parametrize("block", [1, 2, 100])
def test_the_range_of_ids(dataset: IndexedDataset, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(inspect, "CHECK_BLOCK", block)
    assert inspect.find_id_range(dataset) == (3, 105)
