"""The token files: bytes against an independent writer, and every defect a file can have."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_files import index_bytes, token_bytes, write_corpus

from megazero.data import indexed_dataset
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, token_dtype
from megazero.errors import DataError

DOCUMENTS = [[[1, 2, 3]], [], [[4], [5, 6]], [], [[7, 8, 9, 10]]]
FIRST_POINTER = 34 + 4 * 4
FIRST_ENTRY = 34 + 12 * 4

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
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    assert Path(f"{prefix}.idx").read_bytes() == index_bytes(documents, code)
    assert Path(f"{prefix}.bin").read_bytes() == token_bytes(documents, code)


@settings(max_examples=40, deadline=None)
@given(
    documents=documents_strategy, code=st.sampled_from([1, 3, 4, 5, 8]), modes=st.booleans(), block=st.integers(1, 5)
)
def test_reader_gives_back_what_the_format_holds(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[list[int]]],
    code: int,
    modes: bool,
    block: int,
) -> None:
    prefix = write_corpus(tmp_path_factory.mktemp("read") / "c", documents, code, modes=modes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_dataset, "CHECK_BLOCK", block)
        dataset = IndexedDataset(prefix)
    sequences = [sequence for document in documents for sequence in document]
    flat = [token for sequence in sequences for token in sequence]
    assert (dataset.num_documents, dataset.num_sequences, dataset.num_tokens) == (
        len(documents),
        len(sequences),
        len(flat),
    )
    assert dataset.has_modes == (modes and bool(sequences))
    assert [dataset.sequence(i).tolist() for i in range(len(sequences))] == sequences
    assert [dataset.document(i).tolist() for i in range(len(documents))] == [
        [token for sequence in document for token in sequence] for document in documents
    ]
    assert dataset.tokens(0, len(flat)).tolist() == flat
    middle = len(flat) // 2
    assert dataset.tokens(middle // 2, middle).tolist() == flat[middle // 2 : middle]
    places = [(d, p) for d, document in enumerate(documents) for p in range(sum(map(len, document)))]
    assert [dataset.place(token) for token in range(len(flat))] == places


def test_bulk_writing_equals_writing_one_by_one(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "bulk", np.dtype(np.uint16)) as writer:
        writer.add_documents(np.array([1, 2, 3]), [3, 0])
        writer.add_documents(np.array([], np.int64), [])
        writer.add_documents(np.array([4, 5, 6, 7]), [0, 4])
    documents = [[[1, 2, 3]], [], [], [[4, 5, 6, 7]]]
    assert (tmp_path / "bulk.idx").read_bytes() == index_bytes(documents)
    assert (tmp_path / "bulk.bin").read_bytes() == token_bytes(documents)


def test_a_known_file_byte_for_byte(tmp_path: Path) -> None:
    """Two documents, [5, 6, 7] and [8], in uint16; the hexadecimal text was written by hand from the table."""
    with IndexedDatasetWriter(tmp_path / "c", np.dtype(np.uint16)) as writer:
        writer.add_documents(np.array([5, 6, 7, 8]), [3, 1])
    expected = (
        "4d4d49444944580000"  # magic
        "0100000000000000 08 0200000000000000 0300000000000000"  # version, dtype, sequences, document entries
        "03000000 01000000"  # lengths
        "0000000000000000 0600000000000000"  # pointers
        "0000000000000000 0100000000000000 0200000000000000"  # document index
    )
    assert (tmp_path / "c.idx").read_bytes() == bytes.fromhex(expected.replace(" ", ""))
    assert (tmp_path / "c.bin").read_bytes() == bytes.fromhex("0500060007000800")


@pytest.mark.parametrize(
    ("vocab_size", "expected"),
    [(257, "uint16"), (50257, "uint16"), (65499, "uint16"), (65500, "int32"), (65536, "int32"), (250_000, "int32")],
)
def test_token_dtype(vocab_size: int, expected: str) -> None:
    assert token_dtype(vocab_size).name == expected


def put(position: int, packed: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + packed + data[position + len(packed) :]


DEFECTS: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("idx", lambda data: b"", "has 0 bytes"),
    ("idx", lambda data: data[:33], "header of 34 bytes"),
    ("idx", put(0, b"TNTIDX\x00\x00"), "starts with"),
    ("idx", put(9, struct.pack("<Q", 2)), "version 2"),
    ("idx", put(17, b"\x09"), "dtype code 9 .unknown"),
    ("idx", put(17, b"\x07"), "dtype code 7 .floating"),
    ("idx", put(18, struct.pack("<Q", 3)), "header tells of 3 sequences"),
    ("idx", put(18, struct.pack("<Q", 2**63)), "header tells of 9223372036854775808 sequences"),
    ("idx", put(26, struct.pack("<Q", 0)), "0 entries"),
    ("idx", put(26, struct.pack("<Q", 7)), "7 entries"),
    ("idx", lambda data: data[:-1], "that takes"),
    ("idx", lambda data: data + b"\x00", "that takes"),
    ("idx", put(34, struct.pack("<i", -3)), "sequence 0 has length -3"),
    ("idx", put(38, struct.pack("<i", 2)), "sequence 2 starts at byte 8; the lengths before it give 10"),
    ("idx", put(FIRST_POINTER + 8, struct.pack("<q", 4)), "sequence 1 starts at byte 4"),
    ("idx", put(46, struct.pack("<i", 5)), "tells of 11 tokens"),
    ("idx", put(FIRST_ENTRY, struct.pack("<q", 1)), "document index starts with 1"),
    ("idx", put(FIRST_ENTRY + 16, struct.pack("<q", 0)), "entry 2 of the document index goes back"),
    ("idx", put(FIRST_ENTRY + 40, struct.pack("<q", 5)), "ends at 5; the file has 4 sequences"),
    ("bin", lambda data: data[:-1], "the file has 19 bytes"),
    ("bin", lambda data: data[:-2], "the file has 18 bytes"),
    ("bin", lambda data: data + b"\x00\x00", "the file has 22 bytes"),
    ("bin", lambda data: b"", "the file has 0 bytes"),
]


@pytest.mark.parametrize(("ending", "damage", "message"), DEFECTS, ids=[message for _, _, message in DEFECTS])
def test_every_defect_is_refused_with_file_and_finding(
    tmp_path: Path, ending: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    path = Path(f"{prefix}.{ending}")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert f"{prefix}." in str(caught.value)


def test_both_missing_files_are_named_with_prefixes_nearby(tmp_path: Path) -> None:
    write_corpus(tmp_path / "there", DOCUMENTS)
    with pytest.raises(DataError) as caught:
        IndexedDataset(tmp_path / "here")
    assert [problem.given for problem in caught.value.problems] == [
        str(tmp_path / "here.idx"),
        str(tmp_path / "here.bin"),
    ]
    assert str(tmp_path / "there") in str(caught.value)


def test_a_prefix_with_an_ending_is_told_the_prefix(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    with pytest.raises(DataError, match=f"without its ending: {prefix}$"):
        IndexedDataset(f"{prefix}.bin")


def test_a_corpus_without_tokens_opens(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "c", [[], []]))
    assert (dataset.num_documents, dataset.num_sequences, dataset.num_tokens) == (2, 0, 0)
    assert dataset.tokens(0, 0).tolist() == []


def test_reading_outside_is_an_index_error(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "c", DOCUMENTS))
    for call in (
        lambda: dataset.sequence(4),
        lambda: dataset.sequence(-1),
        lambda: dataset.tokens(3, 11),
        lambda: dataset.document(5),
        lambda: dataset.place(10),
    ):
        with pytest.raises(IndexError):
            call()


def test_a_failed_write_leaves_the_old_corpus(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyError), IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_sequence([1])
        raise KeyError("planted")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("token", [-1, 65536])
def test_a_token_that_does_not_fit_is_refused(tmp_path: Path, token: int) -> None:
    with (
        pytest.raises(DataError, match="must fit uint16"),
        IndexedDatasetWriter(tmp_path / "c", np.dtype("u2")) as writer,
    ):
        writer.add_sequence([1, token])
    assert list(tmp_path.iterdir()) == []
