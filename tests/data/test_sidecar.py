"""The facts beside a corpus."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.token_files import write_corpus

from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import Sidecar, read_sidecar, sidecar_path, write_sidecar
from megazero.errors import DataError

SIDECAR = Sidecar(
    documents=2,
    sequences=1,
    tokens=3,
    text_bytes=12,
    tokenizer_type="ByteTokenizer",
    vocab_size=257,
    eod=256,
    append_eod=True,
    tokenizer_files={"tokenizer_model": "ab"},
    token_bytes=[1] * 256 + [0],
)


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
    assert '  "vocab_size": 257,' in lines and len(lines) == 13


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


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_one_that_is_no_object_is_refused(dataset: IndexedDataset, text: str) -> None:
    sidecar_path(dataset.prefix).write_text(text)
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
