"""Input for reading tests: files packed by other hands than megazero's, and a short way to their documents."""

import gzip
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megazero.prepare.text import chunks, streams
from megazero.prepare.text.bad_lines import BadLines
from megazero.prepare.text.chunks import WHOLE, Chunk, DocumentRules, Shard, find_chunks, readable_files
from megazero.prepare.text.documents import read_documents, read_objects
from megazero.prepare.text.inputs import find_inputs

# A frame of Zstandard that stands for nothing.
SKIPPABLE = b"\x52\x2a\x4d\x18" + (7).to_bytes(4, "little") + b"nothing"


def gzip_member(data: bytes) -> bytes:
    """One member."""
    return gzip.compress(data, mtime=0)


def zstd_frame(data: bytes) -> bytes:
    """One frame, with a checksum."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def packed(data: bytes, ending: str, cuts: Sequence[int] = ()) -> bytes:
    """A file's content by its ending, of as many members as the cuts make; without compression `data` itself."""
    if ending not in (".gz", ".zst"):
        return data
    pack = gzip_member if ending == ".gz" else zstd_frame
    places = [0, *sorted(cuts), len(data)]
    return b"".join(pack(data[start:stop]) for start, stop in pairwise(places))


@contextmanager
def small_chunks(chunk_bytes: int, read_bytes: int = 1 << 20) -> Iterator[None]:
    """Chunks, and what is read of a stream at a time, of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(streams, "READ_BYTES", read_bytes)
        patch.setattr(streams, "PACKED_BYTES", min(read_bytes, streams.PACKED_BYTES))
        yield


def chunks_of(*paths: Path | str, rules: DocumentRules, shard: Shard = WHOLE) -> list[Chunk]:
    """All chunks of these inputs."""
    return list(find_chunks(find_inputs([str(path) for path in paths], rules.input_format), rules, shard))


def objects_of(
    *paths: Path | str, rules: DocumentRules | None = None, bad: BadLines | None = None
) -> Iterator[dict[str, Any]]:
    """Every record in order, with all its keys."""
    rules = rules or DocumentRules()
    for chunk in find_chunks(readable_files([str(path) for path in paths], rules), rules):
        yield from read_objects(chunk, rules, bad)


def texts_of(
    *paths: Path | str, rules: DocumentRules | None = None, shard: Shard = WHOLE, bad: BadLines | None = None
) -> list[tuple[str, ...]]:
    """The texts of all documents."""
    rules = rules or DocumentRules()
    found = chunks_of(*paths, rules=rules, shard=shard)
    return [document.texts for chunk in found for document in read_documents(chunk, rules, bad)]
