"""Tests storage of corpora: all ways of reading return the same, stores may fail for a while, copies stay correct."""

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.sidecars import byte_sidecar, write_sidecar
from support.token_files import count_up, write_corpus

from megazero.data import storage
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import read_sidecar
from megazero.data.storage import Access, is_remote, output_problems
from megazero.errors import DataError

SIDECAR = byte_sidecar(documents=9, tokens=100, text_bytes=300, token_bytes=[3] * 257)
STORE = "memory://bucket/folder/c"


@pytest.fixture
def local(tmp_path: Path) -> str:
    prefix = write_corpus(tmp_path / "c", count_up(100, 9))
    write_sidecar(prefix, SIDECAR)
    return prefix


@pytest.fixture
def stored(local: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the prefix of a corpus in memory, behind fsspec; failed reads are repeated without a pause."""
    monkeypatch.setattr(storage, "FIRST_PAUSE_SECONDS", 0.0)
    put(local)
    yield STORE
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def put(local: str, endings: tuple[str, ...] = ("idx", "bin", "json")) -> None:
    for ending in endings:
        fsspec.filesystem("memory").pipe_file(f"/bucket/folder/c.{ending}", Path(f"{local}.{ending}").read_bytes())


def patch_reads(monkeypatch: pytest.MonkeyPatch, change: Callable[..., bytes]) -> list[tuple[str, Any]]:
    """Make `change(read, path, start, end)` answer range requests, and return the list that records the requests."""
    read, asked = MemoryFileSystem.cat_file, []

    def answer(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        asked.append((path.rsplit(".", 1)[-1], (start, end)))
        return change(lambda first, last: read(self, path, start=first, end=last), path, start, end)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", answer)
    return asked


@pytest.mark.parametrize("kind", ["map", "positions", "file://", "memory://"])
@pytest.mark.parametrize("code", [3, 4, 8])
def test_every_way_of_reading_gives_the_same(tmp_path: Path, kind: str, code: int) -> None:
    prefix = write_corpus(tmp_path / "c", count_up(100, 9), code)
    access = Access(maps=kind != "positions", index_folder=tmp_path / "cache")
    name = prefix
    if kind == "file://":
        name = f"file://{prefix}"
    if kind == "memory://":
        put(prefix, ("idx", "bin"))
        name = STORE
    dataset = IndexedDataset(name, access)
    assert (dataset.name, dataset.num_tokens, dataset.num_documents) == (name, 100, 9)
    for start, stop in ((0, 100), (17, 61), (99, 100), (5, 5), (100, 100)):
        tokens = dataset.tokens(start, stop)
        assert tokens.tolist() == list(range(start, stop))
        assert tokens.dtype == dataset.dtype and not tokens.flags.writeable
    assert dataset.document(3).tolist() == list(range(33, 44))
    assert dataset.locate(50) == (4, 6)
    if kind == "memory://":
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_long_ranges_of_large_files_are_asked_for_ahead(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefetching accepts any range of tokens, although the system accepts only ranges that begin at a page's start."""
    monkeypatch.setattr(storage, "SMALL_FILE_BYTES", 0)
    monkeypatch.setattr(storage, "LONG_RANGE_BYTES", 100)
    write_corpus(Path(local), count_up(9000))
    dataset = IndexedDataset(local)
    for start, stop in ((0, 9000), (5000, 5049), (5000, 5050), (8000, 9000), (8999, 9000)):
        assert dataset.tokens(start, stop).tolist() == list(range(start, stop))


def test_an_empty_corpus_is_read_by_positions_too(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "c", [[]]), Access(maps=False))
    assert dataset.tokens(0, 0).tolist() == []


def test_a_file_that_shrinks_while_it_is_read_is_an_error(local: str) -> None:
    dataset = IndexedDataset(local, Access(maps=False))
    Path(f"{local}.bin").write_bytes(b"\x00" * 40)
    assert len(dataset.tokens(0, 20)) == 20
    with pytest.raises(DataError, match=r"c\.bin: ends at byte 40, while bytes up to 60 are read"):
        dataset.tokens(10, 30)


def test_an_object_stores_sidecar_is_read(stored: str, tmp_path: Path) -> None:
    assert read_sidecar(IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))) == SIDECAR
    fsspec.filesystem("memory").rm("/bucket/folder/c.json")
    assert read_sidecar(IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))) is None


def test_the_index_is_copied_once(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = patch_reads(monkeypatch, lambda read, path, start, end: read(start, end))
    monkeypatch.setattr(storage, "COPY_BYTES", 100)
    for _ in range(3):
        IndexedDataset(stored, Access(index_folder=tmp_path / "cache")).tokens(3, 7)
    size = 34 + 20 * 9 + 8
    copied, tried = [(0, 100), (100, 200), (200, size)], (0, 1)
    assert [bounds for ending, bounds in asked if ending == "idx"] == [tried, *copied, tried, tried]
    assert [bounds for ending, bounds in asked if ending == "bin"] == [(6, 14)] * 3
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".idx", ".json", ".lock"]


@pytest.mark.parametrize("changed", ["tokens", "documents", "sidecar"])
def test_a_corpus_that_was_made_again_has_a_copy_of_its_own(
    stored: str, local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """A copy is not reused for another corpus of the same prefix and sizes; where the store has no times or checksums,
    the sidecar differs.
    """
    if changed == "sidecar":
        monkeypatch.setattr(MemoryFileSystem, "checksum", lambda self, path: 0)
    access = Access(index_folder=tmp_path / "cache")
    before = IndexedDataset(stored, access)
    documents = count_up(100, 9)
    if changed == "documents":
        documents = [[documents[0][0][:-1]], [[10, *documents[1][0]]], *documents[2:]]
    write_corpus(Path(local), [[[token + 1 for token in one] for one in document] for document in documents])
    write_sidecar(local, replace(SIDECAR, digests={"bin": "1", "idx": "2"}))
    put(local)
    after = IndexedDataset(stored, access)
    assert after.prefix != before.prefix
    assert after.document(0).tolist() == [token + 1 for token in documents[0][0]]


def test_an_index_that_changes_while_it_is_copied_is_no_copy(
    stored: str, local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(read: Callable[..., bytes], path: str, start: Any, end: Any) -> bytes:
        found = read(start, end)
        if path.endswith(".idx"):
            put(local)
        return found

    patch_reads(monkeypatch, change)
    with pytest.raises(DataError, match=r"c\.idx: changed while it was copied"):
        IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))
    assert not [*(tmp_path / "cache").glob("*.idx")]


def test_reads_that_fail_or_come_short_are_tried_again(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of every four tries raises an error, the next two return too few bytes, and the last one succeeds."""
    tries = 0

    def change(read: Callable[..., bytes], path: str, start: Any, end: Any) -> bytes:
        nonlocal tries
        tries += 1
        if tries % 4 == 1:
            raise RuntimeError("an error of the driver's own kind")
        if tries % 4 == 2:
            return read(start, end)[:-1]
        return read(start, end)[:1] if tries % 4 == 3 else read(start, end)

    dataset = IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))
    patch_reads(monkeypatch, change)
    assert dataset.tokens(8, 12).tolist() == [8, 9, 10, 11]
    assert dataset.tokens(20, 90).tolist() == list(range(20, 90))
    assert tries == 8


def test_a_store_that_stays_away_is_told(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(read: Callable[..., bytes], path: str, start: Any, end: Any) -> bytes:
        raise TimeoutError("no answer")

    dataset = IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))
    asked = patch_reads(monkeypatch, fail)
    with pytest.raises(
        DataError,
        match=r"memory://bucket/folder/c\.bin: TimeoutError no answer\n.* can be read; 5 attempts have failed",
    ):
        dataset.tokens(8, 12)
    assert len(asked) == 5
    with pytest.raises(DataError, match=r"c\.json: TimeoutError"):
        IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))


def test_whoever_is_not_welcome_asks_once(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(read: Callable[..., bytes], path: str, start: Any, end: Any) -> bytes:
        raise PermissionError("Forbidden")

    dataset = IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))
    asked = patch_reads(monkeypatch, refuse)
    with pytest.raises(DataError, match=r"c\.bin: PermissionError Forbidden\n.*1 attempts have failed\n.*credentials"):
        dataset.tokens(8, 12)
    assert len(asked) == 1


def test_a_store_that_says_nothing_is_not_waited_for(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes after the time limit of a request has passed; a long range has a longer limit."""
    hangs = threading.Event()

    def hang(read: Callable[..., bytes], path: str, start: Any, end: Any) -> bytes:
        hangs.wait(30)
        return read(start, end)

    dataset = IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))
    asked = patch_reads(monkeypatch, hang)
    monkeypatch.setattr(storage, "REQUEST_SECONDS", 0.05)
    with pytest.raises(DataError, match=r"c\.bin: TimeoutError no answer within 0 s\n"):
        dataset.tokens(8, 12)
    assert len(asked) == 5
    monkeypatch.setattr(storage, "SLOWEST_BYTES_A_SECOND", 1)
    threading.Timer(0.5, hangs.set).start()
    assert dataset.tokens(8, 12).tolist() == [8, 9, 10, 11]


def test_a_store_without_ranges_is_refused(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_reads(monkeypatch, lambda read, path, start, end: read(None, None))
    with pytest.raises(DataError, match=r"c\.idx: \d+ bytes received for 1\n.*byte ranges"):
        IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))


@pytest.mark.parametrize("size", [198, 200, 300])
def test_tokens_that_are_replaced_while_they_are_read_are_noticed(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    dataset = IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))
    monkeypatch.setattr(storage, "CHECK_SECONDS", 0.0)
    assert dataset.tokens(0, 2).tolist() == [0, 1]
    fsspec.filesystem("memory").pipe_file("/bucket/folder/c.bin", b"\x01" * size)
    with pytest.raises(DataError, match=rf"c\.bin: was replaced by another object, of {size} bytes"):
        dataset.tokens(0, 2)


def test_a_size_that_is_not_told_is_an_error(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFileSystem, "size", lambda self, path: None)
    with pytest.raises(DataError, match=r"c\.idx: the store does not return its size"):
        IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))


class WebFailure(Exception):
    """An error with a status code, such as the driver of web servers raises."""

    def __init__(self, status: int | None) -> None:
        self.status = status


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, r"c\.idx\n.*must be an object"), (410, r"must be an object"), (500, "WebFailure"), (None, "WebFailure")],
)
def test_not_found_means_something_else_on_the_web(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, message: str
) -> None:
    def size(self: Any, path: str) -> int:
        raise FileNotFoundError(path) from WebFailure(status)

    real = fsspec.url_to_fs
    monkeypatch.setattr(fsspec, "url_to_fs", lambda url: real(url.replace("http://", "memory://")))
    monkeypatch.setattr(MemoryFileSystem, "size", size)
    with pytest.raises(DataError, match=message):
        IndexedDataset("http://bucket/folder/c", Access(index_folder=tmp_path / "cache"))


def test_objects_that_are_not_there_are_named(stored: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        IndexedDataset("memory://bucket/none", Access(index_folder=tmp_path / "cache"))
    given = [problem.given for problem in caught.value.problems]
    assert given == ["memory://bucket/none.idx", "memory://bucket/none.bin"]
    dataset = IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))
    fsspec.filesystem("memory").rm("/bucket/folder/c.bin")
    with pytest.raises(DataError, match="is not moved"):
        dataset.tokens(0, 3)


def test_a_truncated_object_is_refused_like_a_file(stored: str, local: str, tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/folder/c.bin", b"\x00" * 198)
    with pytest.raises(DataError, match=r"memory://bucket/folder/c\.bin: the file has 198 bytes"):
        IndexedDataset(stored, Access(index_folder=tmp_path / "cache"))


def test_a_missing_driver_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DataError, match=r"s3://bucket/c\n.*driver of fsspec: Install s3fs.*\n.*pip install s3fs"):
        IndexedDataset("s3://bucket/c", Access(index_folder=tmp_path))
    with pytest.raises(DataError, match=r"nowhere://bucket/c\n.*Protocol not known"):
        IndexedDataset("nowhere://bucket/c", Access(index_folder=tmp_path))
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(DataError, match=r"https://host/c\n.*\n.*pip install aiohttp"):
        IndexedDataset("https://host/c", Access(index_folder=tmp_path))
    with pytest.raises(DataError, match=r"S3://bucket/c\n.*lower case\n.*s3://bucket/c"):
        IndexedDataset("S3://bucket/c", Access(index_folder=tmp_path))


def test_corpora_are_not_written_to_stores() -> None:
    assert [problem.given for problem in output_problems("s3://b/c")] == ["--output-prefix s3://b/c"]
    assert output_problems("/data/c") == output_problems("data:c") == []


def test_what_names_an_object_store() -> None:
    assert [is_remote(name) for name in ("s3://b/c", "memory://c", "simplecache::s3://b/c")] == [True, True, False]
    assert [is_remote(name) for name in ("/data/c", "c", "data:c", "C:/c", "../s3:/c")] == [False] * 5


def test_the_users_own_cache_folder(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert Path(IndexedDataset(stored).prefix).parent == tmp_path / "mine" / "megazero"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Path(IndexedDataset(stored).prefix).parent == tmp_path / "home" / ".cache" / "megazero"


def open_and_sum(prefix: str, cache: Path) -> int:
    return int(np.sum(IndexedDataset(f"file://{prefix}", Access(index_folder=cache)).tokens(0, 100)))


def test_processes_that_start_together_share_one_copy(local: str, tmp_path: Path) -> None:
    with get_context("fork").Pool(4) as pool:
        sums = pool.starmap(open_and_sum, [(local, tmp_path / "cache")] * 8)
    assert sums == [sum(range(100))] * 8
    assert len([*(tmp_path / "cache").glob("*.idx")]) == 1 and not [*(tmp_path / "cache").glob("*.tmp")]
