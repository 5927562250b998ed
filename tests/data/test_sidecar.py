"""Tests the sidecar, the file of facts beside a corpus."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from support.hugging_face_files import write_hugging_face_files
from support.sidecars import byte_sidecar, write_sidecar
from support.token_files import write_corpus

from megazero.data import sidecar as module
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import digest_of, load_sidecar, read_sidecar, recorded_tokenizer, sidecar_path
from megazero.data.tokenizers import TokenizerSpec
from megazero.errors import DataError

SIDECAR = byte_sidecar(documents=2, sequences=1, tokens=3, text_bytes=12, tokenizer_files={"tokenizer_model": "ab"})


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    return IndexedDataset(write_corpus(tmp_path / "c", [[[1, 2, 3]], []]))


def test_it_reads_back(dataset: IndexedDataset) -> None:
    assert read_sidecar(dataset) is None
    write_sidecar(dataset.prefix, SIDECAR)
    assert read_sidecar(dataset) == SIDECAR


def test_it_can_be_read_by_a_person(dataset: IndexedDataset) -> None:
    write_sidecar(dataset.prefix, SIDECAR)
    lines = sidecar_path(dataset.prefix).read_text().splitlines()
    assert '  "vocab_size": 257,' in lines and len(lines) == 16


def test_the_table_has_an_entry_for_every_id(dataset: IndexedDataset) -> None:
    write_sidecar(dataset.prefix, replace(SIDECAR, token_bytes=[1]))
    with pytest.raises(DataError, match="one for every id of the vocabulary: 257"):
        read_sidecar(dataset)


@pytest.mark.parametrize("field", ["documents", "sequences", "tokens"])
def test_one_of_other_data_is_refused(dataset: IndexedDataset, field: str) -> None:
    changed: dict[str, Any] = {field: 7}
    write_sidecar(dataset.prefix, replace(SIDECAR, **changed))
    with pytest.raises(DataError, match="describes the corpus beside it"):
        read_sidecar(dataset)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, "\udcff"])
def test_one_that_is_no_object_is_refused(dataset: IndexedDataset, text: str) -> None:
    sidecar_path(dataset.prefix).write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match="is a JSON object"):
        read_sidecar(dataset)


def test_every_bad_field_is_named(dataset: IndexedDataset) -> None:
    write_sidecar(dataset.prefix, SIDECAR)
    path = sidecar_path(dataset.prefix)
    content = json.loads(path.read_text())
    content |= {"tokens": "3", "append_eod": 1, "vocab_size": True}
    del content["eod"]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        read_sidecar(dataset)
    assert len(caught.value.problems) == 4


def test_digests_are_kept_and_older_files_have_none(dataset: IndexedDataset) -> None:
    digests = {"bin": "0" * 32, "idx": "f" * 32}
    write_sidecar(dataset.prefix, replace(SIDECAR, digests=digests))
    found = read_sidecar(dataset)
    assert found is not None and found.digests == digests
    path = sidecar_path(dataset.prefix)
    content = json.loads(path.read_text())
    del content["digests"], content["split_documents"]
    path.write_text(json.dumps(content | {"of a later version": 1}))
    assert load_sidecar(path) == SIDECAR


def test_every_bad_entry_is_named(dataset: IndexedDataset) -> None:
    changed: dict[str, Any] = {"digests": {"bin": 3}, "tokenizer_files": {"vocab_file": None}, "token_bytes": [True]}
    write_sidecar(dataset.prefix, replace(SIDECAR, **changed))
    with pytest.raises(DataError) as caught:
        load_sidecar(sidecar_path(dataset.prefix))
    told = [f"{problem.given.rsplit(': ')[-1]}: {problem.rule}" for problem in caught.value.problems]
    assert told == [
        "token_bytes: holds nothing but int",
        "tokenizer_files: holds nothing but str",
        "digests: holds nothing but str",
        "token_bytes has 1 entries: one for every id of the vocabulary: 257",
    ]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
def test_a_digest_is_that_of_the_whole_file(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DIGEST_BLOCK_BYTES", 8)
    content = bytes(range(size))
    path = tmp_path / "a"
    path.write_bytes(content)
    told: list[int] = []
    assert digest_of(path) == digest_of(path, told.append) == xxhash.xxh3_128_hexdigest(content)
    assert sum(told) == size and max(told, default=0) <= 8


def test_a_digest_of_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a readable file"):
        digest_of(tmp_path / "none")


def test_the_tokenizer_is_found_where_it_was_or_beside_the_corpus(tmp_path: Path) -> None:
    """A tokenizer whose files have changed, or are gone, is not the one that made the corpus."""
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    write_hugging_face_files(tmp_path / "there", "words")
    spec = TokenizerSpec("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "there"))
    made = replace(SIDECAR, tokenizer_type=spec.type, tokenizer_files=spec.digests(), tokenizer_paths=spec.paths())
    file = tmp_path / "there" / "tokenizer.json"
    assert recorded_tokenizer(made, tmp_path / "here") == replace(spec, tokenizer_model=str(file))
    moved = file.rename(tmp_path / "here" / "tokenizer.json")
    assert recorded_tokenizer(made, tmp_path / "here") == replace(spec, tokenizer_model=str(moved))
    assert recorded_tokenizer(made, tmp_path) is None
    moved.write_text(moved.read_text() + "\n")
    assert recorded_tokenizer(made, tmp_path / "here") is None
    assert recorded_tokenizer(replace(SIDECAR, tokenizer_files={}), tmp_path) == TokenizerSpec("ByteTokenizer")
    assert recorded_tokenizer(replace(SIDECAR, tokenizer_type="Other"), tmp_path) is None
