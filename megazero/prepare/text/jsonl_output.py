"""Writing a jsonl corpus: a JSON object a line, packed as the file's ending says, there whole or not at all.

.jsonl .json   plain
.gz            gzip; the same objects give the same bytes, as no time is noted in the file
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
    """A name whose ending tells no format."""
    if path.name.lower().endswith(ENDINGS):
        return []
    return [Problem(f"{flag} {path}", "the ending tells how it is written", ", ".join(ENDINGS))]


@contextmanager
def written_lines(path: Path) -> Iterator[IO[bytes]]:
    """A stream of lines that becomes `path`, packed by its ending; what fails leaves no trace.

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
    """An object as a line.  Raises DataError for what JSON cannot say."""
    try:
        line = orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)
        # It writes NaN and Infinity, which readers of JSON take, as null.
        if b"null" not in line or _is_finite(content):
            return line
    except TypeError:
        pass
    # The stricter and faster of two writers; this one takes large integers and halves of surrogate pairs as well.
    try:
        return json.dumps(content).encode() + b"\n"
    except TypeError as error:
        shown = ", ".join(content)
        raise DataError(Problem(f"an object of the keys {shown}", f"holds what JSON can say: {error}")) from error


def _is_finite(content: Mapping[str, Any]) -> bool:
    try:
        json.dumps(content, allow_nan=False)
    except ValueError:
        return False
    return True
