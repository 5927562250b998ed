"""Documents: reading texts out of jsonl and plain text files, in pieces that workers can share out.

A *chunk* is a byte range of an input file that begins and ends at a line's end, about a mebibyte long.  Chunks depend
on the files alone, never on how many workers read them.

    .jsonl .json   one JSON object a line, one document each; lines of white space alone are passed over
    .txt           plain text has no documents of its own, so a rule makes them (`TEXT_RULES`):
                   blocks   cut at the first blank line after 4 KiB, or the first line's end after 16 KiB; nothing is
                            lost, the documents put together are the file
                   lines    every line that is not blank is a document, without its line end
                   file     the whole file is one document
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megazero.data.files import cannot_read
from megazero.errors import DataError, Problem, raise_problems

JSON_ENDINGS = (".jsonl", ".json")
TEXT_ENDINGS = (".txt",)
TEXT_RULES = ("blocks", "lines", "file")

CHUNK_BYTES = 1 << 20
BLOCK_BYTES = 4 << 10
BLOCK_LIMIT_BYTES = 4 * BLOCK_BYTES
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class DocumentRules:
    """What a document is.

    json_keys: the keys whose texts are taken from a JSON object.  text_rule: one of TEXT_RULES.
    """

    json_keys: tuple[str, ...] = ("text",)
    text_rule: str = "blocks"


class Chunk(NamedTuple):
    """Bytes [start, stop) of a file: whole lines."""

    path: Path
    start: int
    stop: int


class Document(NamedTuple):
    """One document: a text for every key asked for, and its size.

    text_bytes: UTF-8 bytes of each text.
    """

    texts: tuple[str, ...]
    text_bytes: tuple[int, ...]


class _Line(NamedTuple):
    offset: int  # in the chunk
    data: bytes


def input_problems(paths: Sequence[Path], rules: DocumentRules) -> list[Problem]:
    """What speaks against reading these files: missing ones, unknown endings, several keys for plain text."""
    return [problem for path in paths for problem in _path_problems(path, rules)]


def find_chunks(paths: Sequence[Path], rules: DocumentRules) -> list[Chunk]:
    """All chunks of all files in order; raises DataError with every file that cannot be used."""
    raise_problems(DataError, input_problems(paths, rules))
    return [chunk for path in paths for chunk in _chunks(path, whole=_is_text(path) and rules.text_rule == "file")]


def read_documents(chunk: Chunk, rules: DocumentRules) -> Iterator[Document]:
    """The documents of a chunk in order; raises DataError with file and line for one that cannot be read."""
    data = _read(chunk)
    if _is_text(chunk.path):
        for offset, text in _text_documents(data, rules.text_rule):
            yield _document(chunk, offset, (_decode(chunk, offset, text),))
        return
    for offset, line in _lines(data):
        if line.strip():
            yield _document(chunk, offset, _json_texts(chunk, offset, line, rules.json_keys))


def _is_text(path: Path) -> bool:
    return path.suffix.lower() in TEXT_ENDINGS


def _path_problems(path: Path, rules: DocumentRules) -> Iterator[Problem]:
    if not path.is_file():
        yield Problem(f"--input {path}", "must be a file")
    elif path.suffix.lower() not in JSON_ENDINGS + TEXT_ENDINGS:
        yield Problem(
            f"--input {path}", "the ending tells the format", f"{', '.join(JSON_ENDINGS)} (JSON lines) or .txt (text)"
        )
    elif _is_text(path) and len(rules.json_keys) > 1:
        yield Problem(f"--input {path} with --json-keys {' '.join(rules.json_keys)}", "plain text has one key only")


def _chunks(path: Path, *, whole: bool) -> Iterator[Chunk]:
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            start = 0
            while start < size:
                stream.seek(size if whole else min(start + CHUNK_BYTES, size))
                stream.readline()
                yield Chunk(path, start, stream.tell())
                start = stream.tell()
    except OSError as error:
        raise cannot_read(path, error) from error


def _read(chunk: Chunk) -> bytes:
    try:
        with open(chunk.path, "rb") as stream:
            stream.seek(chunk.start)
            return stream.read(chunk.stop - chunk.start)
    except OSError as error:
        raise cannot_read(chunk.path, error) from error


def _lines(data: bytes) -> Iterator[_Line]:
    """Lines with their ends.  Only a line feed ends a line: JSON strings may hold other separators."""
    offset = 0
    while offset < len(data):
        stop = data.find(b"\n", offset) + 1 or len(data)
        yield _Line(offset, data[offset:stop])
        offset = stop


def _text_documents(data: bytes, rule: str) -> Iterator[_Line]:
    if rule == "file":
        yield _Line(0, data)
    elif rule == "lines":
        yield from (_Line(offset, line.rstrip(b"\r\n")) for offset, line in _lines(data) if line.strip())
    else:
        yield from _blocks(data)


def _blocks(data: bytes) -> Iterator[_Line]:
    start = 0
    for offset, line in _lines(data):
        stop = offset + len(line)
        length = stop - start
        if length >= BLOCK_LIMIT_BYTES or (length >= BLOCK_BYTES and not line.strip()):
            yield _Line(start, data[start:stop])
            start = stop
    if start < len(data):
        yield _Line(start, data[start:])


def _json_texts(chunk: Chunk, offset: int, line: bytes, keys: tuple[str, ...]) -> tuple[str, ...]:
    try:
        content = json.loads(_decode(chunk, offset, line))
    except (json.JSONDecodeError, RecursionError) as error:
        raise _bad_line(chunk, offset, f"is JSON: {error}") from error
    if not isinstance(content, dict):
        raise _bad_line(chunk, offset, f"is a JSON object, not {type(content).__name__}")
    for key in keys:
        if key not in content:
            raise _bad_line(chunk, offset, f"has the key {key!r}", f"--json-keys {' '.join(sorted(content))}")
        if not isinstance(content[key], str):
            raise _bad_line(chunk, offset, f"holds a string under {key!r}, not {type(content[key]).__name__}")
    return tuple(content[key] for key in keys)


def _document(chunk: Chunk, offset: int, texts: tuple[str, ...]) -> Document:
    try:
        return Document(texts, tuple(len(text.encode()) for text in texts))
    except UnicodeEncodeError as error:
        raise _bad_line(chunk, offset, f"holds Unicode text: {error.reason} at character {error.start}") from error


def _decode(chunk: Chunk, offset: int, data: bytes) -> str:
    if chunk.start == offset == 0:
        data = data.removeprefix(BYTE_ORDER_MARK)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _bad_line(chunk, offset + error.start, f"is UTF-8: {error.reason} (0x{data[error.start]:02x})") from error


def _bad_line(chunk: Chunk, offset: int, rule: str, legal: str = "") -> DataError:
    stop = chunk.start + offset
    # In pieces: what comes before the line may be more than memory holds.
    pieces = (Chunk(chunk.path, start, min(start + CHUNK_BYTES, stop)) for start in range(0, stop, CHUNK_BYTES))
    number = 1 + sum(_read(piece).count(b"\n") for piece in pieces)
    return DataError(Problem(f"{chunk.path}:{number}", f"every line {rule}", legal))
