"""Tests of writing token files: the bytes of an independent writer, continuing after a stop, and publishing again."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.indexed_writing import add_documents, add_nested
from support.token_files import index_bytes, token_bytes, write_corpus

from megazero import files
from megazero.data import indexed_dataset
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import digest_of
from megazero.errors import DataError
from megazero.prepare.tokens import indexed_writer
from megazero.prepare.tokens.indexed_writer import IndexedDatasetWriter, Position, publish_corpus

DOCUMENTS = [[[1, 2, 3]], [], [[4], [5, 6]], [], [[7, 8, 9, 10]]]

documents_strategy = st.lists(
    st.lists(st.lists(st.integers(0, 120), min_size=1, max_size=9), max_size=3), min_size=1, max_size=12
)


@settings(max_examples=40, deadline=None)
@given(documents=documents_strategy, code=st.sampled_from([1, 2, 3, 4, 5, 8]))
def test_writer_is_byte_identical_to_the_format(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], code: int
) -> None:
    prefix = tmp_path_factory.mktemp("written") / "c"
    with IndexedDatasetWriter(prefix, np.dtype(indexed_dataset.INTEGER_TYPES[code])) as writer:
        add_nested(writer, documents)
    assert Path(f"{prefix}.idx").read_bytes() == index_bytes(documents, code)
    assert Path(f"{prefix}.bin").read_bytes() == token_bytes(documents, code)


def test_bulk_writing_equals_writing_one_by_one(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "bulk", np.dtype(np.uint16)) as writer:
        add_documents(writer, np.array([1, 2, 3]), [3, 0])
        add_documents(writer, np.array([], np.int64), [])
        add_documents(writer, np.array([4, 5, 6, 7]), [0, 4])
    documents = [[[1, 2, 3]], [], [], [[4, 5, 6, 7]]]
    assert (tmp_path / "bulk.idx").read_bytes() == index_bytes(documents)
    assert (tmp_path / "bulk.bin").read_bytes() == token_bytes(documents)


def test_a_known_file_byte_for_byte(tmp_path: Path) -> None:
    """The documents [5, 6, 7] and [8] in uint16 give these bytes, written by hand from the table of the format."""
    with IndexedDatasetWriter(tmp_path / "c", np.dtype(np.uint16)) as writer:
        add_documents(writer, np.array([5, 6, 7, 8]), [3, 1])
    expected = (
        "4d4d49444944580000"  # magic
        "0100000000000000 08 0200000000000000 0300000000000000"  # version, dtype, sequences, document entries
        "03000000 01000000"  # lengths
        "0000000000000000 0600000000000000"  # pointers
        "0000000000000000 0100000000000000 0200000000000000"  # document index
    )
    assert (tmp_path / "c.idx").read_bytes() == bytes.fromhex(expected.replace(" ", ""))
    assert (tmp_path / "c.bin").read_bytes() == bytes.fromhex("0500060007000800")


def test_a_failed_write_leaves_the_old_corpus(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyError), IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        add_nested(writer, [[[1]]])
        raise KeyError("planted")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("token", [-1, 65536])
def test_a_token_that_does_not_fit_is_refused(tmp_path: Path, token: int) -> None:
    with (
        pytest.raises(DataError, match="must fit uint16"),
        IndexedDatasetWriter(tmp_path / "c", np.dtype("u2")) as writer,
    ):
        add_nested(writer, [[[1, token]]])
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=30, deadline=None)
@given(parts=st.lists(documents_strategy, min_size=1, max_size=3), block=st.integers(1, 5))
def test_appending_corpora_gives_one_of_all_documents(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[list[int]]]], block: int
) -> None:
    folder = tmp_path_factory.mktemp("appended")
    datasets = [IndexedDataset(write_corpus(folder / str(number), part)) for number, part in enumerate(parts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_writer, "CHECK_BLOCK", block)
        patch.setattr(indexed_writer, "BLOCK_BYTES", 8 * block)
        with IndexedDatasetWriter(folder / "all", np.dtype(np.uint16)) as writer:
            for dataset in datasets:
                writer.append(dataset)
    documents = [document for part in parts for document in part]
    assert (folder / "all.idx").read_bytes() == index_bytes(documents)
    assert (folder / "all.bin").read_bytes() == token_bytes(documents)
    assert writer.digests == {ending: digest_of(folder / f"all.{ending}") for ending in ("bin", "idx")}


def write_from(position: Position, scratch: Path, prefix: Path) -> IndexedDatasetWriter:
    return IndexedDatasetWriter(prefix, np.dtype(np.uint16), scratch=scratch, position=position)


def test_a_later_writer_goes_on_where_an_earlier_one_synced(tmp_path: Path) -> None:
    """A later writer overwrites all that was written after the given position, whether or not it reached the disk."""
    scratch, prefix = tmp_path / "scratch", tmp_path / "c"
    first = write_from(Position(), scratch, prefix)
    add_documents(first, np.array([1, 2, 3]), [3, 0])
    position = first.sync()
    add_documents(first, np.array([90, 91]), [1, 0, 1])
    first.sync()
    first.discard()
    assert not Path(f"{prefix}.bin").exists()
    with write_from(position, scratch, prefix) as second:
        add_documents(second, np.array([4, 5, 6, 7]), [0, 4])
    documents = [[[1, 2, 3]], [], [], [[4, 5, 6, 7]]]
    assert Path(f"{prefix}.idx").read_bytes() == index_bytes(documents)
    assert Path(f"{prefix}.bin").read_bytes() == token_bytes(documents)


def test_a_scratch_folder_that_lost_what_was_finished_is_refused(tmp_path: Path) -> None:
    first = write_from(Position(), tmp_path, tmp_path / "c")
    add_documents(first, np.array([1, 2, 3]), [3])
    position = first.sync()
    first.discard()
    (tmp_path / "c.bin").write_bytes(b"12")
    with pytest.raises(DataError, match="2 bytes of the 6"):
        write_from(position, tmp_path, tmp_path / "c")


@pytest.mark.parametrize("ending", ["bin", "lengths", "documents"])
def test_a_scratch_folder_whose_files_have_changed_is_refused(tmp_path: Path, ending: str) -> None:
    """A changed byte is found even if the format stays valid."""
    first = write_from(Position(), tmp_path, tmp_path / "c")
    add_documents(first, np.array([1, 2, 3]), [2, 1])
    position = first.sync()
    first.discard()
    write_from(position, tmp_path, tmp_path / "c").discard()
    path = tmp_path / f"c.{ending}"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(DataError, match=rf"c\.{ending}: other bytes"):
        write_from(position, tmp_path, tmp_path / "c")


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_publishing_again_ends_what_was_interrupted(tmp_path: Path, moved: int) -> None:
    """Publishing again completes a move that stopped after 0, 1 or 2 files; an old index is never beside new tokens."""
    scratch = tmp_path / "scratch"
    prefix = Path(write_corpus(tmp_path / "c", [[[9, 9]]]))
    Path(f"{prefix}.json").write_text("of the earlier corpus")
    writer = write_from(Position(), scratch, prefix)
    add_documents(writer, np.array([1, 2, 3]), [3])
    writer.seal()
    real, left = files.os.replace, iter(range(moved))

    def interrupted(source: Path, target: str) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        real(source, target)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files.os, "replace", interrupted)
        publish_corpus(scratch, prefix)
        raise KeyboardInterrupt  # interrupted after the last file
    assert not Path(f"{prefix}.json").exists()
    assert Path(f"{prefix}.idx").exists() == (moved == 2)
    publish_corpus(scratch, prefix)
    assert Path(f"{prefix}.idx").read_bytes() == index_bytes([[[1, 2, 3]]])
    assert Path(f"{prefix}.bin").read_bytes() == token_bytes([[[1, 2, 3]]])
    assert list(scratch.iterdir()) == []
