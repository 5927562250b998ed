"""Reads the documents of a chunk: texts, or objects with all their keys.

    JSON lines   one object a line, one document each; lines of white space alone are skipped
    plain text   has no documents of its own, so a rule makes them:
                 blocks      cut at the first blank line after 4 KiB, or the first line's end after 16 KiB; nothing is
                             lost, the documents put together are the file
                 lines       every line that is not blank is a document, without its line end
                 file        the whole file is one document
                separator   the text between two separators, where it is not white space alone
    tables       a document a row

A record that cannot be read is an error that names file and line, or is skipped and listed.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import orjson

from megazero.errors import DataError, Problem
from megazero.files import cannot_read, open_regular
from megazero.prepare.text.bad_lines import BadLines, LineCounter, line_numbers
from megazero.prepare.text.chunks import (
    AT_MOST,
    BYTE_ORDER_MARK,
    MAX_DOCUMENT_BYTES,
    Chunk,
    DocumentRules,
    LineBlock,
    LineRange,
    Records,
)
from megazero.prepare.text.inputs import JSON

BLOCK_BYTES = 4 << 10
BLOCK_LIMIT_BYTES = 4 * BLOCK_BYTES


class Document(NamedTuple):
    """One document: a text for every key, or the parts of a dialogue.

    contents: the texts in UTF-8; ASCII, which is most text, stays a str, since encoding it would only copy it.  The
    length of each is its size in bytes.  learnt: of a dialogue, whether each part is an answer; empty for others.
    """

    texts: tuple[str, ...]
    contents: tuple[str | bytes, ...]
    learnt: tuple[bool, ...] = ()


class _Unusable(Exception):
    """Raised for an unusable record, with the broken rule, a legal alternative and, in a line of text, the position."""

    def __init__(self, rule: str, legal: str = "", offset: int = 0) -> None:
        super().__init__(rule)
        self.rule, self.legal, self.offset = rule, legal, offset


# A raw record is (position, content); the position is in bytes from the chunk's first line, or a row's number in it.
_Record = tuple[int, Any]
_TOO_LONG: Final = object()  # in place of the content of a line that is longer than a reader holds


class _Opened(NamedTuple):
    """The opened records of a chunk: the raw records, a function that parses one, and one that locates an error.

    locate is called for errors only, and in ascending order, as it counts the lines before.
    """

    records: Iterator[_Record]
    read: Callable[[Any], dict[str, Any]]
    locate: Callable[[int, int], str]


def read_documents(chunk: Chunk, rules: DocumentRules, bad: BadLines | None = None) -> Iterator[Document]:
    """Yield the documents of a chunk in order; raise DataError with file and line for one that cannot be read.

    bad: collects these instead.
    """
    yield from _usable(_open(chunk, rules, bad), bad, lambda content: _document(content, rules))


def read_objects(chunk: Chunk, rules: DocumentRules, bad: BadLines | None = None) -> Iterator[dict[str, Any]]:
    """Yield whole objects, with all keys and integers of any size; the keys of `rules` hold text."""

    def checked(content: dict[str, Any]) -> dict[str, Any]:
        return {**content, **dict(zip(rules.json_keys, _document(content, rules).texts, strict=True))}

    yield from _usable(_open(chunk, rules, bad, is_exact=True), bad, checked)


def _usable(opened: _Opened, bad: BadLines | None, convert: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield the results of `convert` for each record's object."""
    records, read, locate = opened
    for offset, content in records:
        try:
            if content is _TOO_LONG:
                raise _Unusable(f"is {AT_MOST}")
            converted = convert(read(content))
        except _Unusable as error:
            problem = Problem(locate(offset, error.offset), f"every line {error.rule}", error.legal)
            if bad is None:
                raise DataError(problem) from error
            bad.add(problem.given, error.rule)
        else:
            yield converted


def _open(chunk: Chunk, rules: DocumentRules, bad: BadLines | None, *, is_exact: bool = False) -> _Opened:
    """Open a chunk.  is_exact: integers of any size keep their value."""
    if isinstance(chunk, Records):
        return _open_records(chunk)
    start, data, is_cut = _read_lines(chunk)
    cut = [(len(data), _TOO_LONG)] if is_cut else []
    is_first = start == 0 if isinstance(chunk, LineRange) else chunk.first_line == 1
    mark = len(BYTE_ORDER_MARK) if is_first and data.startswith(BYTE_ORDER_MARK) else 0
    locate = _locator(chunk, start, data, bad.counter if bad else LineCounter())
    if chunk.file.format != JSON:
        key = rules.json_keys[0]
        return _Opened(chain(_text_documents(data, mark, rules.text_rule), cut), lambda text: {key: text}, locate)
    lines = ((offset, line) for offset, line in _lines(data, mark) if not line.isspace())
    read = partial(_object, replaces=rules.invalid_utf8 == "replace", is_exact=is_exact)
    return _Opened(chain(lines, cut), read, locate)


def _open_records(chunk: Records) -> _Opened:
    rows = ((number, row) for number, row in enumerate(chunk.rows) if not _is_blank(row, chunk.unit))
    return _Opened(rows, _as_it_is, lambda number, _: f"{chunk.file.path}: {chunk.unit} {chunk.first + number}")


def _is_blank(row: dict[str, Any], unit: str) -> bool:
    """Return True if a record is no document: there may be nothing between two separators; a row always counts."""
    return unit == "document" and not any(text.strip() for text in row.values())


def _as_it_is(row: dict[str, Any]) -> dict[str, Any]:
    return row


def _read_lines(chunk: LineRange | LineBlock) -> tuple[int, bytes, bool]:
    """Return the position of the first line in the file, all lines, and True if a last one was left out as too long.

    A block's position is 0.
    """
    if isinstance(chunk, LineBlock):
        return 0, chunk.data, False
    try:
        with open_regular(Path(chunk.file.path)) as stream:
            return _range_lines(stream, chunk.start, chunk.stop)
    except OSError as error:
        raise cannot_read(chunk.file.path, error) from error


def _range_lines(stream: BinaryIO, start: int, stop: int) -> tuple[int, bytes, bool]:
    """Return the position and the bytes of the lines that begin in [start, stop), and True if the last was too long."""
    if start:
        # The line that holds the byte before belongs to another chunk; all of this range may lie in that line.
        stream.seek(start - 1)
        head = stream.readline(stop - start + 1)
        if not head.endswith(b"\n"):
            return stop, b"", False
        start += len(head) - 1
    data = stream.read(stop - start) if start < stop else b""
    if data and not data.endswith(b"\n"):
        rest = stream.readline(MAX_DOCUMENT_BYTES + 1)
        if len(rest) > MAX_DOCUMENT_BYTES:
            return start, data[: data.rfind(b"\n") + 1], True
        data += rest
    return start, data, False


def _lines(data: bytes, start: int = 0) -> Iterator[_Record]:
    """Yield lines with their ends.  Only a line feed ends a line: JSON strings may hold other separators."""
    stream = BytesIO(data)
    offset = stream.seek(start)
    for line in stream:
        yield offset, line
        offset += len(line)


def _text_documents(data: bytes, start: int, rule: str) -> Iterator[_Record]:
    if rule == "file":
        if start < len(data):
            yield start, data[start:]
    elif rule == "lines":
        yield from ((offset, line.rstrip(b"\r\n")) for offset, line in _lines(data, start) if line.strip())
    else:
        yield from _blocks(data, start)


def _blocks(data: bytes, start: int) -> Iterator[_Record]:
    for offset, line in _lines(data, start):
        stop = offset + len(line)
        length = stop - start
        if length >= BLOCK_LIMIT_BYTES or (length >= BLOCK_BYTES and not line.strip()):
            yield start, data[start:stop]
            start = stop
    if start < len(data):
        yield start, data[start:]


def _object(line: bytes, *, replaces: bool, is_exact: bool) -> dict[str, Any]:
    """Parse a line of JSON; the fast reader turns long integers into floats."""
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError:
        # orjson is the stricter and faster of two readers; the other one may accept the line, or has a better message.
        content = _lenient_object(line, replaces=replaces)
    try:
        is_rounded = is_exact and _may_be_rounded(content)
    except RecursionError as error:  # only some hundred levels can be written again
        raise _Unusable(f"is JSON: {error}") from error
    if is_rounded:
        content = _lenient_object(line, replaces=replaces)
    if not isinstance(content, dict):
        raise _Unusable(f"is a JSON object, not {type(content).__name__}")
    return content


def _may_be_rounded(value: Any) -> bool:
    """Return True if the value has a float that may have been an integer of more than 64 bits."""
    if isinstance(value, float):
        return abs(value) >= 1 << 63
    if isinstance(value, dict):
        return any(map(_may_be_rounded, value.values()))
    return isinstance(value, list) and any(map(_may_be_rounded, value))


def _lenient_object(line: bytes, *, replaces: bool) -> Any:
    try:
        return json.loads(line.decode(errors="replace" if replaces else "strict").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise _not_utf8(line, error) from error
    except json.JSONDecodeError as error:
        raise _Unusable(f"is JSON: {error.msg} at character {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise _Unusable(f"is JSON: {error}") from error


def _document(content: dict[str, Any], rules: DocumentRules) -> Document:
    if rules.answers == "chat":
        return _chat(content, rules)
    if len(rules.json_keys) == 1:  # as nearly always
        text, utf8 = _text(content, rules.json_keys[0], rules)
        return Document((text,), (utf8,))
    texts = [_text(content, key, rules) for key in rules.json_keys]
    learnt = (False, True) if rules.answers == "pair" else ()
    return Document(tuple(text for text, _ in texts), tuple(utf8 for _, utf8 in texts), learnt)


def _chat(content: dict[str, Any], rules: DocumentRules) -> Document:
    """Return the parts of a list of messages in ChatML, of which the assistant's texts and their ends are learnt."""
    key = rules.json_keys[0]
    if key not in content:
        raise _Unusable(f"has the key {key!r}", f"--chat-key {' '.join(sorted(content))}")
    messages = content[key]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _Unusable(f"has a list of messages under {key!r}, each an object with role and content")
    parts: list[str] = []
    learnt: list[bool] = []
    opening = ""
    for message in messages:
        (role, _), (text, _) = (_text(message, name, rules) for name in ("role", "content"))
        is_answer = role == "assistant"
        heading, body = f"{opening}<|im_start|>{role}\n", f"{text}<|im_end|>"
        # A heading is of one part with the text before it, unless that is an answer's.
        if not is_answer:
            heading, body = heading + body, ""
        parts += [part for part in (heading, body) if part]
        learnt += [False, True] if is_answer else [False]
        opening = "\n"
    contents = (part if part.isascii() else part.encode() for part in parts)
    return Document(tuple(parts), tuple(contents), tuple(learnt))


def _text(content: dict[str, Any], key: str, rules: DocumentRules) -> tuple[str, str | bytes]:
    """Return the text under a key, and its UTF-8 if it is not ASCII."""
    try:
        value = content[key]
    except KeyError:
        raise _Unusable(f"has the key {key!r}", f"--json-keys {' '.join(sorted(content))}") from None
    if isinstance(value, bytes):
        try:
            value = value.decode(errors="replace" if rules.invalid_utf8 == "replace" else "strict")
        except UnicodeDecodeError as error:
            raise _not_utf8(value, error) from error
    if not isinstance(value, str):
        raise _Unusable(f"has a string under {key!r}, not {type(value).__name__}")
    if value.isascii():
        return value, value
    try:
        return value, value.encode()
    except UnicodeEncodeError as error:
        if rules.invalid_utf8 == "replace":
            value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return value, value.encode()
        raise _Unusable(f"has Unicode text: {error.reason} at character {error.start}") from error


def _not_utf8(data: bytes, error: UnicodeDecodeError) -> _Unusable:
    legal = "--invalid-utf8 replace"
    return _Unusable(f"is UTF-8: {error.reason} (0x{data[error.start]:02x})", legal, offset=error.start)


def _locator(chunk: LineRange | LineBlock, start: int, data: bytes, counter: LineCounter) -> Callable[[int, int], str]:
    """Return a function from a record's offset in the chunk, and an offset in the record, to FILE:LINE."""

    def first() -> int:
        return 1 + counter.before(chunk.file, start) if isinstance(chunk, LineRange) else chunk.first_line

    number = line_numbers(data, first)
    return lambda offset, inner: f"{chunk.file.path}:{number(offset + inner)}"
