"""Reads, in blocks, files that can only be read from their beginning: compressed ones and standard input.

A truncated file is an error, not a short file: both formats mark their end, which must be present.
"""

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import zstandard

from megazero.errors import DataError, Problem
from megazero.prepare.text.inputs import STANDARD_INPUT, InputFile

READ_BYTES = 1 << 20
# The number of compressed bytes read at a time: so few, because each may expand to ten thousands.
PACKED_BYTES = 512
_GZIP = 16 + zlib.MAX_WBITS


class FileBlock(NamedTuple):
    """A block of a file's content; position: the number of the file's bytes read so far."""

    data: bytes
    position: int


def read_blocks(file: InputFile) -> Iterator[FileBlock]:
    """Yield the content of a file, decompressed, in blocks; raise DataError if it cannot be read or is damaged."""
    try:
        if file.path == STANDARD_INPUT:
            yield from _content(sys.stdin.buffer, file)
        else:
            with open(file.path, "rb") as stream:
                yield from _content(stream, file)
    except (zlib.error, zstandard.ZstdError) as error:
        raise _damaged(file, str(error)) from error
    except OSError as error:
        raise DataError(Problem(file.path, f"must be a readable file: {error.strerror or error}")) from error


def _content(stream: BinaryIO, file: InputFile) -> Iterator[FileBlock]:
    if file.compression:
        yield from _unpacked(stream, file)
        return
    position = 0
    while data := stream.read(READ_BYTES):
        position += len(data)
        yield FileBlock(data, position)


def _unpacked(stream: BinaryIO, file: InputFile) -> Iterator[FileBlock]:
    openers: dict[str, Callable[[], Any]] = {
        "gzip": lambda: zlib.decompressobj(_GZIP),
        "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
    }
    opener = openers[file.compression]
    # A file may be several compressed ones put together, and those of gzip may be followed by padding zeros.
    member, filling, position = None, b"", 0
    while data := stream.read(PACKED_BYTES):
        position += len(data)
        while data := (data if member else data.lstrip(filling)):
            member = member or opener()
            content = member.decompress(data)
            if content:
                yield FileBlock(content, position)
            if not member.eof:
                break
            data, member, filling = member.unused_data, None, b"\0" if file.compression == "gzip" else b""
    if member is not None:
        raise _damaged(file, "it ends in the middle of a compressed member")
    if not position:
        raise _damaged(file, "it is empty")


def _damaged(file: InputFile, reason: str) -> DataError:
    return DataError(Problem(file.path, f"is an undamaged {file.compression} file: {reason}", "a whole copy of it"))
