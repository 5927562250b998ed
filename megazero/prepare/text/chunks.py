"""Cuts the input into chunks, which can be distributed over workers and machines.

A chunk is made of about a mebibyte of whole documents.  Its beginning depends on the files alone, never on the number
of workers: a file that can be read from its middle is cut at multiples of CHUNK_BYTES, and a line belongs to the chunk
in which it begins; a file that can only be read from its beginning is cut by its reader, at the same lines.

    LineRange   the lines that begin in bytes [start, stop) of a file, which the worker reads
    LineBlock   whole lines that have been read already, out of a compressed file or standard input
    Records     rows of a table, or documents between separators, that have been read already

A *shard* is the part for one of several machines: the chunks that begin in its share of all bytes, and whole files if
these cannot be cut.  The shards one after the other are the whole input.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megazero.errors import DataError, Problem, raise_problems
from megazero.prepare.text.inputs import JSON, PARQUET, TEXT, InputFile, find_inputs
from megazero.prepare.text.parquet import read_rows
from megazero.prepare.text.streams import read_blocks
from megazero.units import format_bytes

CHUNK_BYTES = 1 << 20
MAX_DOCUMENT_BYTES = 1 << 28  # of a line, or of a document of plain text: what a reader holds in memory at a time
AT_MOST = f"at most {format_bytes(MAX_DOCUMENT_BYTES)} long"
TEXT_RULES = ("blocks", "lines", "file", "separator")
# Documents whose answers alone are learnt: a prompt and an answer, or a list of messages.
ANSWERS = ("pair", "chat")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
INVALID_UTF8 = ("refuse", "replace")


@dataclass(frozen=True)
class DocumentRules:
    """The rules by which documents are found in the input.

    json_keys: the keys (or columns) whose texts are read.  text_rule: one of TEXT_RULES, for plain text.
    separator: the text between documents of plain text under the rule "separator".
    invalid_utf8: bytes that are no UTF-8 are refused, or replaced by U+FFFD.
    input_format: the format of standard input, and of files without a known ending.
    answers: one of ANSWERS, where a document is a dialogue, of which answers alone are learnt; "" for plain texts.
    """

    json_keys: tuple[str, ...] = ("text",)
    text_rule: str = "blocks"
    separator: str | None = None
    invalid_utf8: str = "refuse"
    input_format: str | None = None
    answers: str = ""


class LineRange(NamedTuple):
    """The lines of a file that begin in bytes [start, stop); input_bytes, as in every chunk, counts these bytes."""

    file: InputFile
    start: int
    stop: int

    @property
    def input_bytes(self) -> int:
        return self.stop - self.start


class LineBlock(NamedTuple):
    """A block of whole lines, which have been read; first_line counts from 1."""

    file: InputFile
    first_line: int
    data: bytes
    input_bytes: int


class Records(NamedTuple):
    """Objects whose texts are str, or bytes that are not decoded yet; `first` is the first one's number, from 1.

    unit: the name of what is counted, "row" or "document".
    """

    file: InputFile
    first: int
    rows: tuple[dict[str, Any], ...]
    input_bytes: int
    unit: str


Chunk = LineRange | LineBlock | Records


@dataclass(frozen=True)
class Shard:
    """The part number `index`, from 0, of `count`."""

    index: int
    count: int

    def owns(self, start: int, total: int) -> bool:
        """Return True if a chunk at byte `start` of `total` belongs to the shard; the end is the last shard's."""
        return min(start, max(0, total - 1)) * self.count // max(1, total) == self.index


WHOLE = Shard(0, 1)


def rule_problems(files: Sequence[InputFile], rules: DocumentRules) -> list[Problem]:
    """Return the problems of reading these files by these rules."""
    problems = []
    keys = " ".join(rules.json_keys)
    once = " ".join(dict.fromkeys(rules.json_keys))
    if rules.answers:
        return [*_answer_problems(files, rules)]
    if keys != once:
        rule = "every key has a corpus of its own, so it is given once"
        problems.append(Problem(f"--json-keys {keys}", rule, f"--json-keys {once}"))
    texts = [file.path for file in files if file.format == TEXT]
    if texts and len(rules.json_keys) > 1:
        problems.append(Problem(f"--input {texts[0]} with --json-keys {keys}", "plain text has one key only"))
    if (rules.text_rule == "separator") != bool(rules.separator):
        given = f"--text-rule {rules.text_rule} " + ("with" if rules.separator else "without") + " --separator"
        problems.append(Problem(given, "the two go together", "--text-rule separator --separator TEXT"))
    return problems


def _answer_problems(files: Sequence[InputFile], rules: DocumentRules) -> Iterator[Problem]:
    flags = "--chat-key" if rules.answers == "chat" else "--prompt-key and --answer-key"
    legal = (JSON,) if rules.answers == "chat" else (JSON, PARQUET)
    if len(set(rules.json_keys)) < len(rules.json_keys):
        given = f"--prompt-key {rules.json_keys[0]} --answer-key {rules.json_keys[1]}"
        yield Problem(given, "the two are read from keys of their own")
    for file in files:
        if file.format not in legal:
            yield Problem(f"--input {file.path} with {flags}", f"is of the format {' or '.join(legal)}", ".jsonl")


def readable_files(words: Sequence[str], rules: DocumentRules) -> list[InputFile]:
    """Return every file that the words of --input name; raise DataError if there is none, or if the rules forbid it."""
    files = find_inputs(words, rules.input_format)
    raise_problems(DataError, rule_problems(files, rules))
    return files


def find_chunks(
    files: Sequence[InputFile], rules: DocumentRules, shard: Shard = WHOLE, columns: Sequence[str] | None = None
) -> Iterator[Chunk]:
    """Yield the chunks of a shard in order; files that can be cut are not opened.

    columns: the columns of tables to read; None for all.  Raises DataError for a file that cannot be read.
    """
    total, before = sum(file.size for file in files), 0
    for file in files:
        if file.is_seekable and rules.text_rule not in ("file", "separator"):
            for start in range(0, file.size, CHUNK_BYTES):
                if shard.owns(before + start, total):
                    yield LineRange(file, start, min(start + CHUNK_BYTES, file.size))
        elif shard.owns(before, total):
            yield from _whole_file(file, rules, columns)
        before += file.size


def _whole_file(file: InputFile, rules: DocumentRules, columns: Sequence[str] | None) -> Iterator[Chunk]:
    if file.format == PARQUET:
        for table in read_rows(file, columns, CHUNK_BYTES):
            yield Records(file, table.first, table.rows, table.input_bytes, "row")
    elif file.format == TEXT and rules.text_rule == "separator":
        yield from _separated(file, rules.json_keys[0], (rules.separator or "").encode())
    elif file.format == TEXT and rules.text_rule == "file":
        held = bytearray()
        for block in read_blocks(file):
            held += block.data
            if len(held) > MAX_DOCUMENT_BYTES:
                raise DataError(Problem(file.path, f"the file is a document {AT_MOST}", "--text-rule blocks, or lines"))
        if held:
            yield LineBlock(file, 1, bytes(held), file.size)
    elif file.is_seekable:
        yield from (
            LineRange(file, start, min(start + CHUNK_BYTES, file.size)) for start in range(0, file.size, CHUNK_BYTES)
        )
    else:
        yield from _line_blocks(file)


def _line_blocks(file: InputFile) -> Iterator[LineBlock]:
    """Yield blocks at the same lines as a seekable file is cut: a chunk holds the lines between two multiples."""
    held, offset, searched, line, counted, position = bytearray(), 0, 0, 1, 0, 0
    for block in read_blocks(file):
        held += block.data
        position = block.position
        while True:
            limit = (offset // CHUNK_BYTES + 1) * CHUNK_BYTES - offset
            cut = held.find(b"\n", max(limit - 1, searched)) + 1
            if not cut:
                searched = max(limit - 1, len(held))
                if len(held) - limit > MAX_DOCUMENT_BYTES:  # no line ends in these bytes
                    number = line + held.count(b"\n")
                    raise DataError(Problem(f"{file.path}:{number}", f"every line is {AT_MOST}"))
                break
            data = bytes(held[:cut])
            del held[:cut]
            yield LineBlock(file, line, data, position - counted)
            offset, searched, line, counted = offset + cut, 0, line + data.count(b"\n"), position
    if held:
        yield LineBlock(file, line, bytes(held), position - counted)


def _separated(file: InputFile, key: str, separator: bytes) -> Iterator[Records]:
    """Yield the documents between separators, about CHUNK_BYTES at a time."""
    rows: list[dict[str, Any]] = []
    size, first, counted, position = 0, 1, 0, 0
    for text, position in _between(file, separator):
        rows.append({key: text})
        size += len(text) + len(separator)
        if size >= CHUNK_BYTES:
            yield Records(file, first, tuple(rows), position - counted, "document")
            first, rows, size, counted = first + len(rows), [], 0, position
    if rows:
        yield Records(file, first, tuple(rows), position - counted, "document")


def _between(file: InputFile, separator: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield every document between separators, with the number of the file's bytes read by then."""
    held, position, mark = bytearray(), 0, BYTE_ORDER_MARK
    for block in read_blocks(file):
        # The held bytes have been searched; a separator that ends in the block begins at most in their last bytes.
        unsearched = max(0, len(held) - len(separator) + 1)
        held += block.data
        position = block.position
        if held.find(separator, unsearched) < 0:
            if len(held) > MAX_DOCUMENT_BYTES:
                given = f"{file.path}: no separator in {format_bytes(len(held))}"
                raise DataError(Problem(given, f"every document is {AT_MOST}", "--text-rule blocks, or lines"))
            continue
        *whole, rest = bytes(held).split(separator)
        held = bytearray(rest)
        for text in whole:
            yield text.removeprefix(mark), position
            mark = b""
    yield bytes(held).removeprefix(mark), position
