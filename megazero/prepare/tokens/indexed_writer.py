"""Writes token files, `PREFIX.bin` and `PREFIX.idx`, byte for byte as Megatron-LM's tools do, in constant memory.

A corpus grows in a *scratch folder* beside its destination: tokens, sequence lengths and document ends each in a
separate file.  *Sealing* makes the index out of these, in blocks, and syncs everything to the disk; *publishing*
renames the files to their final names, the .idx last.  Each rename can be repeated, so an interrupted publication is
completed by publishing once more.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from megazero.data.indexed_dataset import (
    CHECK_BLOCK,
    HEADER,
    LARGEST_LENGTH,
    MAGIC,
    TYPE_CODES,
    VERSION,
    IndexedDataset,
    Tokens,
    idx_path,
)
from megazero.errors import DataError, Problem
from megazero.files import cannot_write, move_into_place, remove_file

# The number of bytes of a file that are read at a time.
BLOCK_BYTES = 8 << 20
# The files of a corpus: its tokens, its index, and the sidecar, which only some writers make.
ENDINGS = ("bin", "idx", "json")
SPOOLED = ("lengths", "documents")


class Position(NamedTuple):
    """The size of a corpus written so far; digests: those of its files, against which a later writer checks them."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0
    digests: Sequence[str] = ()


class Spool:
    """A file that grows; bytes beyond `size` when it is opened are cut off.

    Raises DataError if the disk refuses, or if the file has fewer than `size` bytes or another digest than `digest`.
    """

    def __init__(self, path: Path, size: int = 0, digest: str = "") -> None:
        self.path = path
        self._digest = xxhash.xxh3_128()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream: BinaryIO = open(path, "r+b" if size else "w+b")  # noqa: SIM115 (lives until close)
            found = os.fstat(self._stream.fileno()).st_size
            self._stream.truncate(min(size, found))
            while block := self._stream.read(BLOCK_BYTES):
                self._digest.update(block)
        except OSError as error:
            raise cannot_write(path, error) from error
        lost = f"{found} bytes of the {size} that were written" if found < size else ""
        if not lost and digest not in ("", self.digest):
            lost = "other bytes than those that were written"
        if lost:
            self._stream.close()
            rule = "the files of an earlier run are unchanged"
            raise DataError(Problem(f"{path}: {lost}", rule, "start again, without it"))

    @property
    def digest(self) -> str:
        """The xxh3_128 of all that has been written, in hexadecimal."""
        return self._digest.hexdigest()

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        try:
            self._stream.write(content)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._digest.update(content)

    def sync(self) -> None:
        """Sync every byte to the disk."""
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        """Close without syncing; a second call has no effect."""
        with suppress(OSError):
            self._stream.close()


class IndexedDatasetWriter:
    """A writer of a corpus, which is published when the `with` block ends well, and removed when it does not.

    scratch: a folder that the caller removes; None for a private one beside the corpus.
    position: the size up to which an earlier writer's files in `scratch` are continued; None to overwrite them.
    digests: after sealing, xxh3_128 in hexadecimal by file ending.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: "np.dtype[Any]",
        *,
        scratch: Path | None = None,
        position: Position | None = None,
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.digests: dict[str, str] = {}
        self._limits = np.iinfo(self.dtype)
        self._position = done = position or Position()
        self._owns_scratch = scratch is None
        name = Path(prefix).name
        self._scratch = scratch or Path(prefix).with_name(f".{name}.{os.getpid()}.tmp")
        sizes = (done.tokens * self.dtype.itemsize, 4 * done.sequences, 8 * done.documents)
        paths = [self._scratch / f"{name}.{ending}" for ending in ("bin", *SPOOLED)]
        self._tokens, self._lengths, self._documents = map(Spool, paths, sizes, done.digests or ("", "", ""))

    @property
    def position(self) -> Position:
        """The size written so far."""
        return self._position

    @property
    def num_sequences(self) -> int:
        """The number of sequences written so far."""
        return self._position.sequences

    @property
    def num_documents(self) -> int:
        """The number of documents ended so far."""
        return self._position.documents

    @property
    def num_tokens(self) -> int:
        """The number of tokens written so far."""
        return self._position.tokens

    def add(self, tokens: Tokens, lengths: NDArray[Any], counts: NDArray[Any]) -> None:
        """Append whole documents: `lengths` of all sequences, none of them 0, and `counts` of sequences by document."""
        self._append(tokens, lengths, self.num_sequences + np.cumsum(counts, dtype=np.int64))

    def append(self, dataset: IndexedDataset) -> None:
        """Append every document of another corpus of the same integer type, with its sequences unchanged."""
        assert dataset.dtype == self.dtype, f"{dataset.prefix} holds {dataset.dtype}, {self.prefix} {self.dtype}"
        before = self.num_sequences
        nothing = np.empty(0, np.int64)
        for first in range(0, dataset.num_tokens, CHECK_BLOCK):
            self._append(dataset.tokens(first, min(first + CHECK_BLOCK, dataset.num_tokens)), None, nothing)
        for first in range(0, dataset.num_sequences, CHECK_BLOCK):
            stop = min(first + CHECK_BLOCK, dataset.num_sequences)
            self._append(None, dataset.sequence_lengths(first, stop), nothing)
        for first in range(0, dataset.num_documents, CHECK_BLOCK):
            stop = min(first + CHECK_BLOCK, dataset.num_documents)
            self._append(None, nothing, before + dataset.document_ends(first, stop))

    def _append(self, tokens: Tokens | None, lengths: NDArray[Any] | None, ends: NDArray[np.int64]) -> None:
        """Append to each of the three files, except those of None, which a separate call appends to."""
        sizes = np.empty(0, np.int64) if lengths is None else lengths
        if tokens is not None and len(tokens):
            assert lengths is None or int(sizes.sum()) == len(tokens), "lengths and tokens disagree"
            self._write_tokens(tokens)
        if len(sizes):
            self._check_lengths(sizes)
            self._lengths.write(sizes.astype("<i4").tobytes())
        if len(ends):
            self._documents.write(ends.astype("<i8").tobytes())
        written = 0 if tokens is None else len(tokens)
        done = self._position
        self._position = Position(done.tokens + written, done.sequences + len(sizes), done.documents + len(ends))

    def _write_tokens(self, tokens: Tokens) -> None:
        if tokens.dtype != self.dtype and not (self._limits.min <= tokens.min() and tokens.max() <= self._limits.max):
            raise DataError(Problem(f"{self.prefix}: token {tokens.max()}", f"must fit {self.dtype.name}"))
        self._tokens.write(np.ascontiguousarray(tokens, self.dtype).data.cast("B"))

    def _check_lengths(self, lengths: NDArray[Any]) -> None:
        if lengths.max() > LARGEST_LENGTH:
            raise DataError(
                Problem(f"{self.prefix}: a sequence of {lengths.max()} tokens", f"at most {LARGEST_LENGTH} tokens")
            )

    def sync(self) -> Position:
        """Sync everything to the disk, so that a later writer can continue at this position."""
        for spool in (self._tokens, self._lengths, self._documents):
            spool.sync()
        return self._position._replace(
            digests=[spool.digest for spool in (self._tokens, self._lengths, self._documents)]
        )

    def seal(self) -> None:
        """Sync the whole corpus to the disk, under its scratch names; nothing can be added afterwards."""
        self.sync()
        index = Spool(self._tokens.path.with_suffix(".idx"))
        try:
            self._write_index(index)
            index.sync()
        finally:
            index.close()
        for spool in (self._lengths, self._documents, self._tokens):
            spool.close()
        self.digests = {"bin": self._tokens.digest, "idx": index.digest}

    def _write_index(self, index: Spool) -> None:
        count, entries = self.num_sequences, self.num_documents + 1
        index.write(HEADER.pack(MAGIC, VERSION, TYPE_CODES[self.dtype.newbyteorder("=")], count, entries))
        for block in _blocks(self._lengths.path):
            index.write(block)
        start = 0
        for block in _blocks(self._lengths.path):
            lengths = np.frombuffer(block, "<i4").astype(np.int64)
            ends = start + np.cumsum(lengths)
            index.write(((ends - lengths) * self.dtype.itemsize).astype("<i8").tobytes())
            start = int(ends[-1])
        index.write(np.zeros(1, "<i8").tobytes())
        for block in _blocks(self._documents.path):
            index.write(block)

    def publish(self) -> None:
        """Rename both files to their final names; the corpus is readable afterwards."""
        if not self.digests:
            self.seal()
        publish_corpus(self._scratch, self.prefix)
        self.discard()

    def discard(self) -> None:
        """Remove a private scratch folder; without effect after `publish`."""
        for spool in (self._tokens, self._lengths, self._documents):
            spool.close()
        if self._owns_scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

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


def publish_corpus(scratch: Path, prefix: str | Path) -> None:
    """Move a corpus's files from `scratch` to their final names; those that an earlier call has moved stay there.

    An index or sidecar of an earlier corpus is removed before the new tokens get their name, so no moment pairs an old
    index with new tokens.
    """
    sealed = {ending: scratch / f"{Path(prefix).name}.{ending}" for ending in ENDINGS}
    if sealed["bin"].exists():
        remove_file(idx_path(prefix))
        remove_file(Path(f"{prefix}.json"))
    for ending, path in sealed.items():
        move_into_place(path, Path(f"{prefix}.{ending}"))
    for ending in SPOOLED:  # the files from which the index was made
        remove_file(scratch / f"{Path(prefix).name}.{ending}")


def _blocks(path: Path) -> Iterable[bytes]:
    with open(path, "rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block
