"""Tests the reader of token files against an independent writer's files, and against every defect a file can have."""

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.each import each
from support.token_files import count_up, write_corpus, write_sparse_corpus

from megazero.data import indexed_dataset
from megazero.data.indexed_dataset import IndexedDataset, token_dtype
from megazero.errors import DataError

DOCUMENTS = [[[1, 2, 3]], [], [[4], [5, 6]], [], [[7, 8, 9, 10]]]
FIRST_POINTER = 34 + 4 * 4
FIRST_ENTRY = 34 + 12 * 4

documents_strategy = st.lists(
    st.lists(st.lists(st.integers(0, 120), min_size=1, max_size=9), max_size=3), min_size=1, max_size=12
)


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
    assert [dataset.locate(token) for token in range(len(flat))] == places


@each(
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
    ("idx", put(18, struct.pack("<Q", 3)), "header lists 3 sequences"),
    ("idx", put(18, struct.pack("<Q", 2**63)), "header lists 9223372036854775808 sequences"),
    ("idx", put(26, struct.pack("<Q", 0)), "0 entries"),
    ("idx", put(26, struct.pack("<Q", 7)), "7 entries"),
    ("idx", lambda data: data[:-1], "that takes"),
    ("idx", lambda data: data + b"\x00", "that takes"),
    ("idx", put(34, struct.pack("<i", -3)), "sequence 0 has length -3"),
    ("idx", put(38, struct.pack("<i", 2)), "sequence 2 starts at byte 8; the lengths before it give 10"),
    ("idx", put(FIRST_POINTER + 8, struct.pack("<q", 4)), "sequence 1 starts at byte 4"),
    ("idx", put(46, struct.pack("<i", 5)), "lists 11 tokens"),
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
    assert [problem.given for problem in caught.value.problems] == [f"{tmp_path}/here.idx and {tmp_path}/here.bin"]
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
        lambda: dataset.locate(10),
    ):
        with pytest.raises(IndexError):
            call()


# --- corpora whose index is too long to be checked whole --------------------------------------------------------------


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every corpus count as large, with only 2 blocks of 2 entries checked at opening."""
    for name, value in {"WHOLE_BLOCKS": 0, "SPREAD_BLOCKS": 2, "SPREAD_BLOCK": 2}.items():
        monkeypatch.setattr(indexed_dataset, name, value)


MANY = [[[10 * number + token for token in range(1 + number % 3)]] for number in range(12)]
MANY[5:5] = [[], [[100, 101], [102]], []]
SEQUENCES = [sequence for document in MANY for sequence in document]
WHOLE = [[token for sequence in document for token in sequence] for document in MANY]
PLACES = [(number, position) for number, document in enumerate(WHOLE) for position in range(len(document))]


def all_lookups(dataset: IndexedDataset) -> Iterator[tuple[Callable[[], object], object]]:
    """Yield pairs of a lookup and the value that it must return."""
    for i, sequence in enumerate(SEQUENCES):
        yield lambda i=i: dataset.sequence(i).tolist(), sequence
        yield lambda i=i: dataset.sequence_start(i), sum(map(len, SEQUENCES[:i]))
        yield lambda i=i: dataset.sequence_lengths(i, i + 3).tolist(), [*map(len, SEQUENCES[i : i + 3])]
    for i, document in enumerate(WHOLE):
        yield lambda i=i: dataset.document(i).tolist(), document
    for token, place in enumerate(PLACES):
        yield lambda token=token: dataset.locate(token), place


@pytest.mark.usefixtures("few_checks")
def test_a_large_corpus_gives_the_same(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "c", MANY))
    assert dataset.is_large
    for lookup, expected in all_lookups(dataset):
        assert lookup() == expected
    assert dataset.document_ends(0, 15).tolist() == [1, 2, 3, 4, 5, 5, 7, 7, 8, 9, 10, 11, 12, 13, 14]


def damaged_entries() -> Iterator[tuple[int, bytes]]:
    """Yield (position in the .idx file, bytes to put there) such that the bytes contradict the entries beside them."""
    count = len(SEQUENCES)
    starts = [2 * sum(map(len, SEQUENCES[:i])) for i in range(count)]
    ends = [0, *accumulate(map(len, MANY))]
    for i in range(count):
        for length in (-1, 9, 2**31 - 1):
            yield 34 + 4 * i, struct.pack("<i", length)
        for start in (starts[i] + 1, starts[i] + 2, starts[i] - 2, -(2**63), 2**62, 1000):
            yield 34 + 4 * count + 8 * i, struct.pack("<q", start)
    for i in range(1, len(MANY)):
        for end in (-1, 0, count, count + 1, 2**40):
            if not ends[i - 1] <= end <= ends[i + 1]:
                yield 34 + 12 * count + 8 * i, struct.pack("<q", end)


@pytest.mark.usefixtures("few_checks")
def test_a_large_corpus_with_a_wrong_entry_gives_the_truth_or_an_error(tmp_path: Path) -> None:
    """Whichever entry is wrong, some openings find it, every whole check does, and no lookup returns wrong tokens."""
    prefix = write_corpus(tmp_path / "c", MANY)
    good, opened, refused = Path(f"{prefix}.idx").read_bytes(), 0, 0
    for position, packed in damaged_entries():
        Path(f"{prefix}.idx").write_bytes(put(position, packed)(good))
        try:
            dataset = IndexedDataset(prefix)
        except DataError:
            continue
        opened += 1
        with pytest.raises(DataError):
            dataset.check()
        for lookup, expected in all_lookups(dataset):
            try:
                assert lookup() == expected, (position, packed)
            except DataError:
                refused += 1
    assert opened > 100 and refused > opened


@pytest.mark.usefixtures("few_checks")
@pytest.mark.parametrize("shift", [1, 2, -2, 2**40])
def test_a_row_of_wrong_entries_that_fit_each_other_is_found_at_its_edges(tmp_path: Path, shift: int) -> None:
    """Sequences 4 to 7 are moved together, and document 3 consists of sequences 3, 4 and 5."""
    documents = count_up(20, 10)
    documents[3:6] = [[document[0] for document in documents[3:6]]]
    prefix = write_corpus(tmp_path / "c", documents)
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    for number in range(4, 8):
        struct.pack_into("<q", index, 34 + 4 * 10 + 8 * number, 4 * number + shift)
    Path(f"{prefix}.idx").write_bytes(index)
    dataset = IndexedDataset(prefix)
    always = (dataset.check, lambda: dataset.document(3), lambda: dataset.sequence(3), lambda: dataset.sequence(8))
    nowhere = (lambda: dataset.sequence(5), lambda: dataset.document(4))
    for lookup in always + (nowhere if shift in (1, 2**40) else ()):
        with pytest.raises(DataError):
            lookup()
    assert [dataset.document(number).tolist() for number in (1, 2, 7)] == [[2, 3], [4, 5], [18, 19]]


def test_the_whole_check_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path / "c", MANY))
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(indexed_dataset, "CHECK_BLOCK", 5)
    dataset.check(lambda done, in_all: told.append((done, in_all)))
    assert told == [(done, 14 + 16) for done in (5, 10, 14, 19, 24, 29, 30)]


OPENING = """
import sys, time
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.samples import SampleSource

def resident():
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * 4096

before, start = resident(), time.process_time()
dataset = IndexedDataset(sys.argv[1])
seconds = time.process_time() - start
print(resident() - before, seconds, dataset.num_documents, *dataset.locate(77))
source = SampleSource(dataset, sequences=range(dataset.num_sequences), seq_length=1024, seed=1, vocab_size=1)
assert source.sample(3).sum() == 0
"""


def test_a_thousand_million_documents_open_at_once(tmp_path: Path) -> None:
    """An index of 10**9 documents opens within 50 MB and 10 seconds of a process of its own.

    All documents but one are empty here, because an index of as many real ones takes 20 GB.
    """
    prefix = write_sparse_corpus(tmp_path / "c", 10**9, 10_000)
    done = subprocess.run([sys.executable, "-c", OPENING, prefix], capture_output=True, text=True, check=True)
    grown, seconds, *found = done.stdout.split()
    assert int(grown) < 50e6 and float(seconds) < 10
    assert found == [str(10**9), str(10**9 - 1), "77"]
