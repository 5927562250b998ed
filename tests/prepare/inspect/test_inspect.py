"""Tests of the readable description of a corpus: its header, its documents and its samples."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.token_files import count_up, write_corpus

from megazero.data.corpora import Corpora
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import Sidecar
from megazero.data.tokenizers import ByteTokenizer
from megazero.errors import DataError
from megazero.prepare.inspect.inspect import SampleRequest, header_lines, shown_document, whole_document, whole_sample


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    return IndexedDataset(write_corpus(tmp_path / "c", [[[104, 105]], [], [[9], [3, 7]]]))


def test_header_lines_tell_counts(dataset: IndexedDataset) -> None:
    text = "\n".join(header_lines(dataset, None))
    assert "documents      3" in text and "sequences      3" in text and "tokens         5 of uint16, 10 B" in text
    sidecar = Sidecar(3, 3, 5, 20, "ByteTokenizer", 257, 256, False, {"vocab_file": "ab" * 32}, [])
    text = "\n".join(header_lines(dataset, sidecar))
    assert "ByteTokenizer vocab_file abababababab" in text
    assert "257, end of document 256 (not appended)" in text and "4.00 bytes a token" in text
    assert "sequences      3\n" in text
    assert "sequences      3, of at most 64 tokens\n" in "\n".join(
        header_lines(dataset, replace(sidecar, split_documents=64))
    )


def test_documents_are_shown_as_ids_or_text(dataset: IndexedDataset) -> None:
    assert shown_document(dataset, 0, 5, None) == "[104, 105] (2 tokens)"
    assert shown_document(dataset, 0, 1, ByteTokenizer()) == "'h' ... (2 tokens)"
    assert shown_document(dataset, 1, 5, None) == "[] (0 tokens)"


def test_a_document_is_shown_whole(dataset: IndexedDataset) -> None:
    assert whole_document(dataset, 2, None) == ["document 2     3 tokens", "9 3 7"]
    assert whole_document(dataset, 2, ByteTokenizer())[1] == "\t\x03\x07"
    assert whole_document(dataset, 1, None) == ["document 1     0 tokens", ""]


@pytest.mark.parametrize("number", [-1, 3])
def test_a_document_that_is_not_there_is_refused(dataset: IndexedDataset, number: int) -> None:
    with pytest.raises(DataError, match="the corpus has 3 documents\n    legal: 0 to 2"):
        whole_document(dataset, number, None)


@pytest.mark.parametrize(("part", "number"), [("train", 0), ("train", 1000), ("valid", 3), ("test", 0)])
def test_a_sample_is_the_one_a_run_reads(tmp_path: Path, part: str, number: int) -> None:
    prefix = write_corpus(tmp_path / "n", count_up(200, num_documents=20))
    run = Corpora([prefix], split="8,1,1").samples(part, seq_length=4, seed=7, vocab_size=200)
    head, ids = whole_sample(IndexedDataset(prefix), SampleRequest(number, part, "8,1,1", 4, 7), None)
    assert head == f"sample {number}       5 tokens of {part}, seed 7"
    assert [int(word) for word in ids.split()] == run.sample(number).tolist()
    _, text = whole_sample(IndexedDataset(prefix), SampleRequest(number, part, "8,1,1", 4, 7), ByteTokenizer())
    assert text == ByteTokenizer().decode(run.sample(number).tolist())


def test_samples_that_are_not_there_are_refused(dataset: IndexedDataset) -> None:
    with pytest.raises(DataError, match="a sample takes 9 tokens"):
        whole_sample(dataset, SampleRequest(0, "train", "1", 8, 7), None)
    with pytest.raises(DataError, match="samples count from 0"):
        whole_sample(dataset, SampleRequest(-1, "train", "1", 2, 7), None)
