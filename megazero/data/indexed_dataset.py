"""Token files: the `.bin/.idx` pair of the Megatron family, read through mmap and written byte for byte.

`PREFIX.bin` holds the ids of all *sequences*, back to back, in one integer type.  `PREFIX.idx` tells where sequences
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

Everything is checked when a file is opened, in blocks of bounded size, so later reads need no check: sequences are
known to lie back to back, and the token range [a, b) of the corpus is the slice [a, b) of the .bin.

The int64 arrays start at an odd multiple of two.  numpy copies a misaligned array whole before it searches in it or
computes with it, so queries look at single elements (bisect) and only blocks are ever copied.
"""

import mmap
import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from megazero.data.files import AsideFile, cannot_read, remove_file
from megazero.errors import DataError, Problem

Tokens = NDArray[Any]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
INTEGER_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
TYPE_CODES = {np.dtype(kind): code for code, kind in INTEGER_TYPES.items()}
FLOAT_CODES = frozenset({6, 7})

LARGEST_LENGTH = 2**31 - 1
# Vocabularies from here on are stored as int32; the field's tools leave a little room below 2**16.
UINT16_VOCABULARY = 65_500
# Elements checked at a time when a file is opened: 8 MiB of int64.
CHECK_BLOCK = 1 << 20


def token_dtype(vocab_size: int) -> "np.dtype[Any]":
    """The integer type in which ids of a vocabulary of `vocab_size` entries are stored."""
    return np.dtype(np.uint16 if vocab_size < UINT16_VOCABULARY else np.int32)


def bin_path(prefix: str | Path) -> Path:
    """Where the tokens of a corpus are."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Where the index of a corpus is."""
    return Path(f"{prefix}.idx")


class Place(NamedTuple):
    """Where a token of the corpus sits: its document and its position in it, both from 0."""

    document: int
    position: int


class _Header(NamedTuple):
    dtype: "np.dtype[Any]"
    num_sequences: int
    num_entries: int  # of the document index: documents + 1


class IndexedDataset:
    """A corpus on disk, memory-mapped and checked.

    Raises DataError, with every missing file or the first defect that makes the rest meaningless: the file, what was
    found, the rule.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        _require_files(self.prefix)
        index, tokens = _map(idx_path(prefix)), _map(bin_path(prefix))
        header = _read_header(idx_path(prefix), index)
        count = header.num_sequences
        self.dtype = header.dtype
        self._lengths = np.frombuffer(index, "<i4", count, HEADER.size)
        self._pointers = np.frombuffer(index, "<i8", count, HEADER.size + 4 * count)
        self._documents = np.frombuffer(index, "<i8", header.num_entries, HEADER.size + 12 * count)
        self.has_modes = len(index) > HEADER.size + 12 * count + 8 * header.num_entries
        self._check_sequences(len(tokens))
        self._check_documents()
        self._tokens: Tokens = np.frombuffer(tokens, self.dtype)

    @property
    def num_sequences(self) -> int:
        """Sequences in the corpus."""
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        """Documents in the corpus, those without any token included."""
        return len(self._documents) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens in the corpus."""
        return len(self._tokens)

    def sequence(self, index: int) -> Tokens:
        """Tokens of one sequence: a read-only view [length] in the file's dtype."""
        return self.tokens(self.sequence_start(index), self.sequence_start(index + 1))

    def sequence_start(self, index: int) -> int:
        """Number of tokens before sequence `index`; `num_sequences` is legal and gives `num_tokens`."""
        if not 0 <= index <= self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences} in {self.prefix}")
        return self.num_tokens if index == self.num_sequences else int(self._pointers[index]) // self.dtype.itemsize

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the whole corpus, across sequences: a read-only view [stop - start]."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.num_tokens} in {self.prefix}")
        return self._tokens[start:stop]

    def document(self, index: int) -> Tokens:
        """Tokens of one document: a read-only view [length]; empty when the document gave no token."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents} in {self.prefix}")
        first, last = int(self._documents[index]), int(self._documents[index + 1])
        return self.tokens(self.sequence_start(first), self.sequence_start(last))

    def place(self, token: int) -> Place:
        """The document and the position in it of token number `token` of the corpus."""
        if not 0 <= token < self.num_tokens:
            raise IndexError(f"token {token} of {self.num_tokens} in {self.prefix}")
        sequence = bisect_right(self._pointers, token * self.dtype.itemsize) - 1
        document = bisect_right(self._documents, sequence) - 1
        return Place(document, token - self.sequence_start(int(self._documents[document])))

    def _check_sequences(self, bin_bytes: int) -> None:
        path, itemsize = idx_path(self.prefix), self.dtype.itemsize
        total = 0
        for first, lengths in _blocks(self._lengths):
            if lengths.min() < 0:
                bad = int(np.argmax(lengths < 0))
                raise _defect(path, f"sequence {first + bad} has length {lengths[bad]}", "lengths are not negative")
            ends = (total + np.cumsum(lengths, dtype=np.int64)) * itemsize
            starts = ends - lengths.astype(np.int64) * itemsize
            found = np.array(self._pointers[first : first + len(lengths)])
            if not np.array_equal(starts, found):
                bad = int(np.argmax(starts != found))
                raise _defect(
                    path,
                    f"sequence {first + bad} starts at byte {found[bad]}; the lengths before it give {starts[bad]}",
                    "a sequence starts where the one before it ends",
                )
            total = int(ends[-1]) // itemsize
        if total * itemsize != bin_bytes:
            raise _defect(
                bin_path(self.prefix),
                f"the file has {bin_bytes} bytes; its index tells of {total} tokens of {itemsize} bytes",
                f"the .bin holds exactly what the .idx lists: {total * itemsize} bytes",
            )

    def _check_documents(self) -> None:
        path, before = idx_path(self.prefix), 0
        if self._documents[0] != 0:
            raise _defect(path, f"the document index starts with {self._documents[0]}", "it starts with 0")
        for first, entries in _blocks(self._documents):
            steps = np.diff(entries, prepend=before)
            if steps.min() < 0:
                bad = int(np.argmax(steps < 0))
                raise _defect(path, f"entry {first + bad} of the document index goes back", "it never decreases")
            before = int(entries[-1])
        if before != self.num_sequences:
            raise _defect(
                path,
                f"the document index ends at {before}; the file has {self.num_sequences} sequences",
                "it ends at the number of sequences",
            )


class IndexedDatasetWriter:
    """Writes a corpus aside and publishes it when the `with` block ends well; the .idx comes last.

    An index of an earlier corpus under the same prefix is removed before the new tokens get their name, so no moment
    pairs an old index with new tokens.
    """

    def __init__(self, prefix: str | Path, dtype: "np.dtype[Any]") -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._limits = np.iinfo(self.dtype)
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._num_tokens = 0
        self._bin = AsideFile(bin_path(prefix))

    @property
    def num_sequences(self) -> int:
        """Sequences written so far."""
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        """Documents ended so far."""
        return len(self._documents) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._num_tokens

    def add_sequence(self, tokens: Tokens | Sequence[int]) -> None:
        """Append one sequence [length] to the open document; nothing is written for an empty one."""
        if len(tokens):
            self._append(np.asarray(tokens), [len(tokens)])

    def end_document(self) -> None:
        """Close the open document; without sequences since the last one it is an empty document."""
        self._documents.append(self.num_sequences)

    def add_documents(self, tokens: Tokens, lengths: Iterable[int]) -> None:
        """Append whole documents of one sequence each: `tokens` [sum of lengths], 0 for an empty document."""
        sizes = list(lengths)
        before = self.num_sequences
        self._append(tokens, [size for size in sizes if size])
        for size in sizes:
            before += size > 0
            self._documents.append(before)

    def _append(self, tokens: Tokens, lengths: list[int]) -> None:
        assert sum(lengths) == len(tokens), "lengths and tokens disagree"
        if len(tokens) and not (self._limits.min <= tokens.min() and tokens.max() <= self._limits.max):
            raise DataError(Problem(f"{self.prefix}: token {tokens.max()}", f"must fit {self.dtype.name}"))
        if lengths and max(lengths) > LARGEST_LENGTH:
            raise DataError(
                Problem(f"{self.prefix}: a sequence of {max(lengths)} tokens", f"at most {LARGEST_LENGTH} tokens")
            )
        self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._lengths.extend(lengths)
        self._num_tokens += len(tokens)

    def _write_index(self, index: AsideFile) -> None:
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        code = TYPE_CODES[self.dtype.newbyteorder("=")]
        index.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._documents)))
        index.write(lengths.astype("<i4").tobytes())
        ends = np.cumsum(lengths, dtype=np.int64)
        index.write(((ends - lengths) * self.dtype.itemsize).astype("<i8").tobytes())
        index.write(np.frombuffer(self._documents, np.int64).astype("<i8").tobytes())
        index.seal()

    def publish(self) -> None:
        """Give both files their names; the corpus is readable afterwards."""
        self._bin.seal()
        index = AsideFile(idx_path(self.prefix))
        try:
            self._write_index(index)
            remove_file(idx_path(self.prefix))
            self._bin.publish()
            index.publish()
        finally:
            index.discard()

    def discard(self) -> None:
        """Leave nothing behind; harmless after `publish`."""
        self._bin.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.publish()
        finally:
            self.discard()


def _require_files(prefix: str) -> None:
    missing = [path for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    if missing:
        legal = _prefixes_nearby(prefix)
        raise DataError(
            *(Problem(str(path), "must be a file; a corpus is PREFIX.bin and PREFIX.idx", legal) for path in missing)
        )


def _prefixes_nearby(prefix: str) -> str:
    stem = prefix.removesuffix(".bin").removesuffix(".idx")
    if stem != prefix and idx_path(stem).is_file():
        return f"the prefix without its ending: {stem}"
    folder = Path(prefix).parent
    indexes = folder.glob("*.idx") if folder.is_dir() else ()
    found = sorted(str(path.with_suffix("")) for path in indexes if path.with_suffix(".bin").is_file())[:5]
    return ", ".join(found) or "a prefix that tools/preprocess_data.py wrote"


def _map(path: Path) -> mmap.mmap | bytes:
    try:
        with open(path, "rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                return b""  # mmap refuses empty files; a corpus without tokens has an empty .bin
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise cannot_read(path, error) from error


def _read_header(path: Path, index: mmap.mmap | bytes) -> _Header:
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
            f"the file has {len(index)} bytes; its header tells of {num_sequences} sequences, {num_entries} entries",
            f"that takes {plain} bytes ({plain + num_sequences} with modes), and at least one entry",
        )
    return _Header(np.dtype(INTEGER_TYPES[code]).newbyteorder("<"), num_sequences, num_entries)


def _blocks(values: Tokens) -> Iterator[tuple[int, Tokens]]:
    """Aligned copies of `values`, CHECK_BLOCK elements at a time, each with the index of its first element."""
    for first in range(0, len(values), CHECK_BLOCK):
        yield first, np.array(values[first : first + CHECK_BLOCK])


def _defect(path: Path, found: str, rule: str) -> DataError:
    return DataError(Problem(f"{path}: {found}", rule, "an undamaged copy, or preprocess the text again"))
