"""The facts beside a corpus."""

import json
import math
from dataclasses import replace
from pathlib import Path

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
)


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    return IndexedDataset(write_corpus(tmp_path / "c", [[[1, 2, 3]], []]))


def test_it_reads_back(dataset: IndexedDataset) -> None:
    assert read_sidecar(dataset) is None
    write_sidecar(dataset.prefix, SIDECAR)
    assert read_sidecar(dataset) == SIDECAR


def test_bits_per_byte() -> None:
    """A loss of ln 256 nats a token is 8 bits a token; 3 tokens stand for 12 bytes."""
    assert math.isclose(SIDECAR.bits_per_byte(math.log(256)), 8 * 3 / 12)
    assert math.isnan(replace(SIDECAR, text_bytes=0).bits_per_byte(1.0))


@pytest.mark.parametrize("field", ["documents", "sequences", "tokens"])
def test_one_of_other_data_is_refused(dataset: IndexedDataset, field: str) -> None:
    write_sidecar(dataset.prefix, replace(SIDECAR, **{field: 7}))
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
