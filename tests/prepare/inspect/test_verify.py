"""Verification accepts an undamaged corpus and reports every kind of damage."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import xxhash
from support.token_files import write_corpus

from megazero.console import Console
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import Sidecar
from megazero.errors import DataError
from megazero.prepare.inspect import verify as module
from megazero.prepare.inspect.verify import scan_tokens, verify

DOCUMENTS = [[[104, 105]], [], [[9], [3, 7]]]


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    return IndexedDataset(write_corpus(tmp_path / "c", DOCUMENTS))


def sidecar(digests: Mapping[str, str]) -> Sidecar:
    return Sidecar(3, 3, 5, 20, "ByteTokenizer", 257, 256, False, {}, [], digests)


def digests(dataset: IndexedDataset) -> dict[str, str]:
    paths = {ending: Path(f"{dataset.prefix}.{ending}") for ending in ("bin", "idx")}
    return {ending: xxhash.xxh3_128(path.read_bytes()).hexdigest() for ending, path in paths.items()}


@pytest.mark.parametrize("block", [1, 2, 100])
def test_tokens_are_read_once(dataset: IndexedDataset, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(module, "CHECK_BLOCK", block)
    done: list[int] = []
    found = scan_tokens(dataset, done.append)
    assert found == (3, 105, digests(dataset)["bin"]) and sum(done) == 5


def test_no_tokens(tmp_path: Path) -> None:
    found = scan_tokens(IndexedDataset(write_corpus(tmp_path / "c", [[]])), lambda tokens: None)
    assert found == (0, -1, xxhash.xxh3_128(b"").hexdigest())


def test_a_whole_corpus(dataset: IndexedDataset) -> None:
    ids, index, told = verify(dataset, sidecar(digests(dataset)), 257, Console())
    assert (ids.split(maxsplit=1)[1], index.split()[1]) == ("3 to 105", "consistent")
    assert told.endswith("bin and idx are as written")
    assert "none to compare with" in verify(dataset, sidecar({}), None, Console())[-1]
    assert "none to compare with" in verify(dataset, None, None, Console())[-1]


def test_everything_that_is_wrong_is_told_at_once(dataset: IndexedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    known = sidecar(digests(dataset))
    for ending, place in (("bin", 0), ("idx", -1)):
        path = Path(f"{dataset.prefix}.{ending}")
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
    # Opening would find the damage to so small an index by itself; only verification checks all of a large one.
    monkeypatch.setattr(IndexedDataset, "_check_blocks", lambda *_: None)
    damaged = IndexedDataset(dataset.prefix)
    monkeypatch.undo()
    with pytest.raises(DataError) as caught:
        verify(damaged, known, 100, Console())
    told = [problem.given for problem in caught.value.problems]
    assert len(told) == 4 and "the document index" in told[0] and told[1].endswith("ids from 3 to 105")
    assert f"{dataset.name}.bin: xxh3_128" in told[2] and f"{dataset.name}.idx: xxh3_128" in told[3]


def test_negative_ids_are_outside_any_vocabulary(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "c", [[[-1, 5]]], 4))
    with pytest.raises(DataError, match="ids from -1 to 5"):
        verify(dataset, None, None, Console())
