"""Reads token files through mmap: the `.bin/.idx` pair of the Megatron family.

`PREFIX.bin` holds the ids of all *sequences*, back to back, in one integer type.  `PREFIX.idx` lists where sequences
and *documents* begin (all integers little endian, nothing aligned; S sequences, D - 1 documents):

    offset      size   content
    0           9      magic
    9           8      version, 1
    17          1      code of the .bin's integer type
    18          8      S
    26          8      D
    34          4 S    length of every sequence, in tokens
    34 + 4 S    8 S    byte offset of every sequence in the .bin
    34 + 12 S   8 D    document index: 0, then after every document the number of sequences so far
    34 + 12S+8D S      mode of every sequence; multimodal files only, recognised by the file's size

Sequences lie back to back, so the token range [a, b) of the corpus is the slice [a, b) of the .bin.  When a file is
opened, all of its index is checked, in blocks of bounded size.  Reading the index of a *large* corpus would take
minutes, so there only the header, the sizes, both ends and blocks spread evenly over it are checked; every lookup
compares its entries with their neighbours, which finds a series of wrong ones at its edges, and `check` checks all.

The int64 arrays start at an odd multiple of two.  numpy copies a misaligned array whole before it searches in it or
computes with it, so queries read single elements (bisect) and only blocks are ever copied.
"""

import mmap
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megazero.data.storage import PLAIN_ACCESS, Access, advise, is_remote, locate_corpus, map_file
from megazero.errors import DataError, Problem

Tokens = NDArray[Any]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
INTEGER_TYPES = MappingProxyType({1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16})
TYPE_CODES = MappingProxyType({np.dtype(kind): code for code, kind in INTEGER_TYPES.items()})
FLOAT_CODES = frozenset({6, 7})

LARGEST_LENGTH = 2**31 - 1
# Vocabularies of at least this size are stored as int32; the field's tools leave a little room below 2**16.
UINT16_VOCABULARY = 65_500
# The number of elements checked at a time: 8 MiB of int64.
CHECK_BLOCK = 1 << 20
# A corpus with more than WHOLE_BLOCKS blocks of sequences or documents has only SPREAD_BLOCKS small ones checked.
WHOLE_BLOCKS = 4
SPREAD_BLOCKS, SPREAD_BLOCK = 64, 4096


def token_dtype(vocab_size: int) -> "np.dtype[Any]":
    """Return the integer type in which the ids of a vocabulary of `vocab_size` entries are stored."""
    return np.dtype(np.uint16 if vocab_size < UINT16_VOCABULARY else np.int32)


def bin_path(prefix: str | Path) -> Path:
    """Return the path of a corpus's tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of a corpus's index."""
    return Path(f"{prefix}.idx")


class TokenPosition(NamedTuple):
    """The position of a token of the corpus: its document and its place in that, both from 0."""

    document: int
    position: int


class _Header(NamedTuple):
    dtype: "np.dtype[Any]"
    num_sequences: int
    num_entries: int  # of the document index: documents + 1


class IndexedDataset:
    """A corpus, its index memory-mapped and checked (see above for how much of it).

    name: the prefix as it was given.  prefix: that of the .idx and .json on this machine; for a corpus in an object
    store, that of the cached copy.
    Raises DataError, with every missing file or the first defect that makes the rest meaningless.
    """

    def __init__(self, prefix: str | Path, access: Access = PLAIN_ACCESS) -> None:
        self.name = str(prefix)
        if not is_remote(self.name):
            _require_files(self.name)
        location = locate_corpus(self.name, access)
        self.prefix = location.prefix
        index = self._index = map_file(idx_path(self.prefix))
        header = _read_header(f"{self.name}.idx", index)
        count = header.num_sequences
        self.dtype = header.dtype
        self.num_tokens = location.bin_bytes // self.dtype.itemsize
        self._bin_bytes = location.bin_bytes
        self._lengths = np.frombuffer(index, "<i4", count, HEADER.size)
        self._pointers = np.frombuffer(index, "<i8", count, HEADER.size + 4 * count)
        self._documents = np.frombuffer(index, "<i8", header.num_entries, HEADER.size + 12 * count)
        self.has_modes = len(index) > HEADER.size + 12 * count + 8 * header.num_entries
        if self.is_large:
            advise(index, mmap.MADV_RANDOM)
            self._check_blocks(_spread(self.num_sequences), _spread(header.num_entries))
        else:
            self.check()
        self._reader = location.read_as(self.dtype)

    @property
    def is_large(self) -> bool:
        """True if only a part of the index was checked when the corpus was opened."""
        return max(self.num_sequences, self.num_documents) > WHOLE_BLOCKS * CHECK_BLOCK

    @property
    def num_sequences(self) -> int:
        """The number of sequences in the corpus."""
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        """The number of documents in the corpus, those without any token included."""
        return len(self._documents) - 1

    def sequence(self, index: int) -> Tokens:
        """Return the tokens of one sequence: a read-only array [length] in the file's dtype."""
        return self.tokens(self.sequence_start(index), self.sequence_start(index + 1))

    def sequence_start(self, index: int) -> int:
        """Return the number of tokens before sequence `index`; `num_sequences` is legal and gives `num_tokens`."""
        if not 0 <= index <= self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences} in {self.name}")
        if index == self.num_sequences:
            return self.num_tokens
        self._check_sequences(max(0, index - 1), index)
        start, rest = divmod(int(self._pointers[index]), self.dtype.itemsize)
        if rest or not 0 <= start <= self.num_tokens:
            rule = f"tokens have {self.dtype.itemsize} bytes, and the .bin {self._bin_bytes}"
            raise self._defect(f"sequence {index} starts at byte {self._pointers[index]}", rule)
        return start

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop) of the whole corpus, across sequences: a read-only array [stop - start]."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.num_tokens} in {self.name}")
        return self._reader.tokens(start, stop)

    def document(self, index: int) -> Tokens:
        """Return the tokens of one document: a read-only array [length]; empty for a document without tokens."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents} in {self.name}")
        sequences = self._sequences_of(index)
        for block in _cut(len(sequences)):
            self._check_sequences(sequences[block.start], sequences.start + block.stop)
        return self.tokens(self.sequence_start(sequences.start), self.sequence_start(sequences.stop))

    def sequence_lengths(self, first: int, stop: int) -> NDArray[np.int32]:
        """Return the lengths of sequences [first, stop) in tokens: an aligned copy."""
        self._check_sequences(first, stop)
        return np.array(self._lengths[first:stop], np.int32)

    def document_ends(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the number of sequences up to the end of each of documents [first, stop): an aligned copy."""
        self._check_entries(first, stop + 1)
        return np.array(self._documents[first + 1 : stop + 1], np.int64)

    def locate(self, token: int) -> TokenPosition:
        """Return the document of token number `token` of the corpus, and its position in it."""
        if not 0 <= token < self.num_tokens:
            raise IndexError(f"token {token} of {self.num_tokens} in {self.name}")
        sequence = bisect_right(self._pointers, token * self.dtype.itemsize) - 1
        document = bisect_right(self._documents, sequence) - 1
        # A search's result depends on the entries there alone, so these are checked against those beside them.
        self._check_sequences(max(0, sequence - 1), sequence + 1)
        return TokenPosition(document, token - self.sequence_start(self._sequences_of(document).start))

    def check(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every entry of the index; call progress(entries done, entries in all) after every block.

        Raises DataError for the first wrong entry.
        """
        advise(self._index, mmap.MADV_SEQUENTIAL)
        self._check_blocks(_cut(self.num_sequences), _cut(len(self._documents)), progress)
        advise(self._index, mmap.MADV_RANDOM if self.is_large else mmap.MADV_NORMAL)

    def _check_blocks(
        self,
        sequences: Iterable[range],
        entries: Iterable[range],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        done, in_all = 0, self.num_sequences + len(self._documents)
        kinds = (
            (sequences, self._check_sequences, self._check_bin),
            (entries, self._check_entries, self._check_document_ends),
        )
        for blocks, check_block, check_ends in kinds:
            for block in blocks:
                check_block(block.start, block.stop)
                done += len(block)
                if progress is not None:
                    progress(done, in_all)
            check_ends()

    def _check_sequences(self, first: int, stop: int) -> None:
        """Check that each of sequences [first, stop) ends where the next one starts."""
        lengths = np.array(self._lengths[first:stop], np.int64)
        starts = np.array(self._pointers[first : stop + 1])
        if lengths.min(initial=0) < 0:
            bad = int(np.argmax(lengths < 0))
            raise self._defect(f"sequence {first + bad} has length {lengths[bad]}", "lengths are not negative")
        if starts.min(initial=0) < 0:
            bad = int(np.argmax(starts < 0))
            raise self._defect(f"sequence {first + bad} starts at byte {starts[bad]}", "bytes are counted from 0")
        # The last sequence of all has no next one.
        expected = (starts[: len(lengths)] + lengths * self.dtype.itemsize)[: len(starts) - 1]
        if not np.array_equal(expected, starts[1:]):
            bad = int(np.argmax(expected != starts[1:]))
            raise self._defect(
                f"sequence {first + bad + 1} starts at byte {starts[bad + 1]}; the lengths before it give"
                f" {expected[bad]}",
                "a sequence starts where the one before it ends",
            )

    def _check_bin(self) -> None:
        """Check that the first sequence starts, and the last one ends, where the .bin does."""
        itemsize = self.dtype.itemsize
        if self.num_sequences and self._pointers[0] != 0:
            raise self._defect(f"sequence 0 starts at byte {self._pointers[0]}", "the first one starts at 0")
        listed = int(self._pointers[-1]) + int(self._lengths[-1]) * itemsize if self.num_sequences else 0
        if listed != self._bin_bytes:
            raise _defect(
                f"{self.name}.bin",
                f"the file has {self._bin_bytes} bytes; its index lists {listed // itemsize} tokens of"
                f" {itemsize} bytes",
                f"the .bin holds exactly what the .idx lists: {listed} bytes",
            )

    def _check_entries(self, first: int, stop: int) -> None:
        """Check that entries [first, stop) of the document index don't decrease, compared also with the one before."""
        begin = max(0, first - 1)
        steps = np.diff(np.array(self._documents[begin:stop]))
        if steps.min(initial=0) < 0:
            bad = begin + 1 + int(np.argmax(steps < 0))
            raise self._defect(f"entry {bad} of the document index goes back", "it never decreases")

    def _check_document_ends(self) -> None:
        """Check that the document index begins with no sequence and ends with all."""
        first, last = self._documents[0], self._documents[-1]
        if first != 0:
            raise self._defect(f"the document index starts with {first}", "it starts with 0")
        if last != self.num_sequences:
            raise self._defect(
                f"the document index ends at {last}; the file has {self.num_sequences} sequences",
                "it ends at the number of sequences",
            )

    def _sequences_of(self, document: int) -> range:
        # Check the document's two entries, and those beside them: an entry out of order contradicts a neighbour.
        self._check_entries(document, document + 3)
        first, stop = int(self._documents[document]), int(self._documents[document + 1])
        if not 0 <= first <= stop <= self.num_sequences:
            found = f"document {document} has sequences {first} to {stop} of {self.num_sequences}"
            raise self._defect(found, "the document index counts sequences, and never decreases")
        return range(first, stop)

    def _defect(self, found: str, rule: str) -> DataError:
        return _defect(f"{self.name}.idx", found, rule)


def _require_files(prefix: str) -> None:
    missing = [path for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    if missing:
        rule = "must be a file; a corpus is PREFIX.bin and PREFIX.idx"
        raise DataError(Problem(" and ".join(map(str, missing)), rule, _prefixes_nearby(prefix)))


def _prefixes_nearby(prefix: str) -> str:
    stem = prefix.removesuffix(".bin").removesuffix(".idx")
    if stem != prefix and idx_path(stem).is_file():
        return f"the prefix without its ending: {stem}"
    folder = Path(prefix).parent
    indexes = folder.glob("*.idx") if folder.is_dir() else ()
    found = sorted(str(path.with_suffix("")) for path in indexes if path.with_suffix(".bin").is_file())[:5]
    return ", ".join(found) or "a prefix that megazero preprocess wrote"


def _read_header(path: str, index: mmap.mmap | bytes) -> _Header:
    if len(index) < HEADER.size:
        raise _defect(path, f"the file has {len(index)} bytes", f"an index has a header of {HEADER.size} bytes")
    magic, version, code, num_sequences, num_entries = HEADER.unpack(index[: HEADER.size])
    if magic != MAGIC:
        raise _defect(path, f"the file starts with {magic!r}", f"an index starts with {MAGIC!r}")
    if version != VERSION:
        raise _defect(path, f"version {version}", f"the version is {VERSION}")
    if code not in INTEGER_TYPES:
        what = "floating point" if code in FLOAT_CODES else "unknown"
        legal = ", ".join(f"{number} {np.dtype(kind).name}" for number, kind in INTEGER_TYPES.items())
        raise _defect(path, f"dtype code {code} ({what})", f"tokens are integers: {legal}")
    plain = HEADER.size + 12 * num_sequences + 8 * num_entries
    if num_entries < 1 or len(index) not in (plain, plain + num_sequences):
        raise _defect(
            path,
            f"the file has {len(index)} bytes; its header lists {num_sequences} sequences, {num_entries} entries",
            f"that takes {plain} bytes ({plain + num_sequences} with modes), and at least one entry",
        )
    return _Header(np.dtype(INTEGER_TYPES[code]).newbyteorder("<"), num_sequences, num_entries)


def _cut(count: int) -> Iterator[range]:
    """Cut [0, count) into blocks."""
    return (range(first, min(first + CHECK_BLOCK, count)) for first in range(0, count, CHECK_BLOCK))


def _spread(count: int) -> Iterator[range]:
    """Cut small blocks, spread evenly from begin to end, out of [0, count); all of it if that is no more."""
    if count <= SPREAD_BLOCKS * SPREAD_BLOCK:
        return _cut(count)
    firsts = ((count - SPREAD_BLOCK) * number // (SPREAD_BLOCKS - 1) for number in range(SPREAD_BLOCKS))
    return (range(first, first + SPREAD_BLOCK) for first in firsts)


def _defect(path: str, found: str, rule: str) -> DataError:
    return DataError(Problem(f"{path}: {found}", rule, "an undamaged copy, or preprocess the text again"))
