"""Writes a jsonl corpus: a JSON object a line, compressed by the file's ending, whole or not at all.

.jsonl .json   plain
.gz            gzip; the same objects give the same bytes, as no time is written to the file
.zst           Zstandard
"""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import orjson
import zstandard

from megazero.errors import DataError, Problem
from megazero.files import written_aside

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json")
_GZIP_LEVEL = 6
_ZSTANDARD_LEVEL = 3


def ending_problems(flag: str, path: Path) -> list[Problem]:
    """Return the problem of a name whose ending is not one of ENDINGS."""
    if path.name.lower().endswith(ENDINGS):
        return []
    return [Problem(f"{flag} {path}", "must have one of these endings", ", ".join(ENDINGS))]


@contextmanager
def written_lines(path: Path) -> Iterator[IO[bytes]]:
    """Open a stream of lines that becomes `path`, compressed by its ending, and leaves no trace after an error.

    Raises DataError when the file cannot be written.
    """
    with written_aside(path) as stream, ExitStack() as stack:
        packed: IO[bytes] = stream
        if path.suffix.lower() == ".gz":
            opener: Callable[..., Any] = gzip.GzipFile
            packed = stack.enter_context(
                opener(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=stream, mtime=0)
            )
        elif path.suffix.lower() == ".zst":
            compressor = zstandard.ZstdCompressor(level=_ZSTANDARD_LEVEL, write_checksum=True)
            packed = stack.enter_context(compressor.stream_writer(stream, closefd=False))
        yield packed


def json_line(content: Mapping[str, Any]) -> bytes:
    """Return an object as a line.  Raises DataError for values that JSON does not have."""
    try:
        line = orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)
        # orjson writes NaN and Infinity as null, while the other writer's output can be read back.
        if b"null" not in line or _is_finite(content):
            return line
    except TypeError:
        pass
    # orjson is the stricter and faster of two writers; json accepts large integers and lone surrogates as well.
    try:
        return json.dumps(content).encode() + b"\n"
    except TypeError as error:
        shown = ", ".join(content)
        raise DataError(Problem(f"an object of the keys {shown}", f"must be made of JSON's types: {error}")) from error


def _is_finite(content: Mapping[str, Any]) -> bool:
    try:
        json.dumps(content, allow_nan=False)
    except ValueError:
        return False
    return True
