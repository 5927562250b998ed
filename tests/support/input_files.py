"""Input for tests of reading: files that other libraries have compressed, and short ways to read their documents."""

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

# A skippable frame of Zstandard, which decompresses to nothing.
SKIPPABLE = b"\x52\x2a\x4d\x18" + (7).to_bytes(4, "little") + b"nothing"


def gzip_member(data: bytes) -> bytes:
    """Compress `data` as one gzip member."""
    return gzip.compress(data, mtime=0)


def zstd_frame(data: bytes) -> bytes:
    """Compress `data` as one Zstandard frame with a checksum."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def packed(data: bytes, ending: str, cuts: Sequence[int] = ()) -> bytes:
    """Return the content of a file with that ending: a member for each part between cuts, or `data` if uncompressed."""
    if ending not in (".gz", ".zst"):
        return data
    pack = gzip_member if ending == ".gz" else zstd_frame
    places = [0, *sorted(cuts), len(data)]
    return b"".join(pack(data[start:stop]) for start, stop in pairwise(places))


@contextmanager
def small_chunks(chunk_bytes: int, read_bytes: int = 1 << 20) -> Iterator[None]:
    """Set the bytes of a chunk and the bytes read from a stream at a time, inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(streams, "READ_BYTES", read_bytes)
        patch.setattr(streams, "PACKED_BYTES", min(read_bytes, streams.PACKED_BYTES))
        yield


def chunks_of(*paths: Path | str, rules: DocumentRules, shard: Shard = WHOLE) -> list[Chunk]:
    """Return all chunks of these inputs that lie in the shard."""
    return list(find_chunks(find_inputs([str(path) for path in paths], rules.input_format), rules, shard))


def objects_of(
    *paths: Path | str, rules: DocumentRules | None = None, bad: BadLines | None = None
) -> Iterator[dict[str, Any]]:
    """Yield every record of the files in order, with all its keys."""
    rules = rules or DocumentRules()
    for chunk in find_chunks(readable_files([str(path) for path in paths], rules), rules):
        yield from read_objects(chunk, rules, bad)


def texts_of(
    *paths: Path | str, rules: DocumentRules | None = None, shard: Shard = WHOLE, bad: BadLines | None = None
) -> list[tuple[str, ...]]:
    """Return the texts of every document of the files."""
    rules = rules or DocumentRules()
    found = chunks_of(*paths, rules=rules, shard=shard)
    return [document.texts for chunk in found for document in read_documents(chunk, rules, bad)]
