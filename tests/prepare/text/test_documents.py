"""Documents of jsonl and plain text are read whole and in chunks; unreadable lines are named, or noted and skipped."""

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.each import each
from support.input_files import chunks_of, objects_of, packed, small_chunks, texts_of

from megazero.errors import DataError
from megazero.prepare.text import chunks, documents
from megazero.prepare.text.bad_lines import BadLines
from megazero.prepare.text.chunks import DocumentRules, LineRange
from megazero.prepare.text.documents import read_documents

MARK = b"\xef\xbb\xbf"
ENDINGS = ("", ".gz", ".zst")
REPLACE = DocumentRules(invalid_utf8="replace")


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(packed(content, path.suffix, [len(content) // 2]))
    return path


def objects(path: Path, bad: BadLines | None = None) -> list[dict[str, Any]]:
    return list(objects_of(path, bad=bad))


@settings(max_examples=60)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=12),
    chunk_bytes=st.integers(1, 100),
    ascii_only=st.booleans(),
    ending=st.sampled_from(ENDINGS),
)
def test_jsonl_documents_do_not_depend_on_chunks(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], chunk_bytes: int, ascii_only: bool, ending: str
) -> None:
    lines = [json.dumps({"text": text, "n": 1}, ensure_ascii=ascii_only) for text in texts]
    path = write(tmp_path_factory.mktemp("j") / f"a.jsonl{ending}", "\n".join(lines).encode())
    with small_chunks(chunk_bytes, 13):
        assert texts_of(path) == [(text,) for text in texts]


def test_several_keys_and_their_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '{"b": "é", "a": "xyz"}\n\n  \n{"a": "", "b": "q"}\n'.encode())
    rules = DocumentRules(("a", "b"))
    (chunk,) = chunks_of(path, rules=rules)
    assert [tuple(document)[:2] for document in read_documents(chunk, rules)] == [
        (("xyz", "é"), ("xyz", "é".encode())),
        (("", "q"), ("", "q")),
    ]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, ending: str, chunk_bytes: int) -> None:
    """A byte order mark is skipped at the beginning of a file of any format, and nowhere else."""
    jsonl = write(tmp_path / f"a.jsonl{ending}", MARK + b'{"text": "x"}\r\n{"text": "y"}\r\n')
    later = write(tmp_path / f"b.jsonl{ending}", b'{"text": "x"}\n' + MARK + b'{"text": "y"}\n')
    text = write(tmp_path / f"a.txt{ending}", MARK + b"one\n" + MARK + b"two\n||" + MARK + b"three")
    only = write(tmp_path / f"b.txt{ending}", MARK)
    with small_chunks(chunk_bytes, 2):
        assert texts_of(jsonl) == [("x",), ("y",)]
        with pytest.raises(DataError, match=rf"b\.jsonl{ending}:2\n.*BOM"):
            texts_of(later)
        whole = "one\n\ufefftwo\n||\ufeffthree"
        assert "".join(text for (text,) in texts_of(text)) == whole
        assert texts_of(text, rules=DocumentRules(text_rule="file")) == [(whole,)]
        assert texts_of(text, rules=DocumentRules(text_rule="lines")) == [(line,) for line in whole.split("\n")]
        rules = DocumentRules(text_rule="separator", separator="||")
        assert texts_of(text, rules=rules) == [("one\n\ufefftwo\n",), ("\ufeffthree",)]
        assert texts_of(only) == texts_of(only, rules=rules) == []
        assert texts_of(only, rules=DocumentRules(text_rule="file")) == []


def test_text_blocks_lose_nothing_and_end_at_blank_lines(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {number}\n" * 20 + "\n" for number in range(200)]
    path = write(tmp_path / "a.txt", "".join(paragraphs).encode())
    blocks = [text for (text,) in texts_of(path)]
    assert "".join(blocks) == path.read_text()
    assert len(blocks) > 10
    assert all(block.endswith("\n\n") and 4096 <= len(block) <= 4096 + 400 for block in blocks[:-1])


def test_text_without_blank_lines_is_cut_at_line_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"a line of text\n" * 4000)
    blocks = [text for (text,) in texts_of(path)]
    assert "".join(blocks) == path.read_text()
    assert all(block.endswith("\n") and 16384 <= len(block) < 16384 + 15 for block in blocks[:-1])


def test_blank_lines_of_other_systems_end_blocks_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", (b"x" * 100 + b"\r\n" * 2) * 100)
    assert {len(text) for (text,) in texts_of(path)} == {40 * 104, 20 * 104}


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 300), max_size=30), chunk_bytes=st.integers(1, 100))
def test_blocks_put_together_are_the_text_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], chunk_bytes: int
) -> None:
    content = b"\n".join(b"x" * length for length in lengths)
    path = write(tmp_path_factory.mktemp("b") / "a.txt", content)
    with small_chunks(chunk_bytes):
        assert "".join(text for (text,) in texts_of(path)) == content.decode()


def test_text_lines_and_text_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.TXT", b"one\n\n  \n two\r\nthree\0\x0b\xe2\x80\xa8four")
    assert texts_of(path, rules=DocumentRules(text_rule="lines")) == [("one",), (" two",), ("three\0\x0b\u2028four",)]
    expected = "one\n\n  \n two\r\nthree\0\x0b\u2028four"
    assert texts_of(path, rules=DocumentRules(text_rule="file")) == [(expected,)]


BAD_LINES = [
    (b'{"text": "x"', "is JSON: Expecting ',' delimiter at character 13"),
    (b"[" * 100_000, "is JSON"),
    (b'["text"]', "is a JSON object, not list"),
    (b"3", "is a JSON object, not int"),
    (b"null", "is a JSON object, not NoneType"),
    (b'{"body": "x"}', "has the key 'text'"),
    (b'{"text": 3}', "has a string under 'text', not int"),
    (b'{"text": "\xff"}', "is UTF-8: invalid start byte (0xff)"),
    (b'{"text": "\xc3"}', "is UTF-8: invalid continuation byte (0xc3)"),
    (b'{"text": "\xed\xa0\x80"}', "is UTF-8"),
    (b'{"text": "\\ud800"}', "has Unicode text: surrogates"),
    (b'{"text": "a\0b"}', "is JSON: Invalid control character"),
    (b"\0\0\0", "is JSON"),
    (b'{"text": "x"} {"text": "y"}', "is JSON: Extra data"),
    (b'{"text": "x", "n": %s}' % (b"1" * 5000), "is JSON: Exceeds the limit"),
    (b"{'text': 'x'}", "is JSON"),
]


@each(("line", "message"), BAD_LINES)
@each("chunk_bytes", [10, 1 << 20])
@each("ending", ENDINGS)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str, chunk_bytes: int, ending: str) -> None:
    lines = [b'{"text": "x"}', b"", b'{"text": "y"}', line, b'{"text": "z"}', line]
    path = write(tmp_path / f"a.jsonl{ending}", b"\n".join(lines))
    with small_chunks(chunk_bytes):
        with pytest.raises(DataError) as caught:
            texts_of(path)
        assert caught.value.problems[0].given == f"{path}:4"
        assert caught.value.problems[0].rule.startswith(f"every line {message}")
        bad = BadLines()
        assert texts_of(path, bad=bad) == [("x",), ("y",), ("z",)]
    assert [text.split(": ", 1)[0] for text in bad.lines()] == [f"{path}:4", f"{path}:6"]
    assert f": {message}" in bad.lines()[0]


def test_the_keys_that_are_there_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"title": "x", "body": "y"}')
    with pytest.raises(DataError, match="--json-keys body title"):
        texts_of(path)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "x", "n": [NaN, Infinity, -Infinity, 1e999, -0.0, 1e-999]}', "x"),
        (b'{"text": "x", "n": 123456789012345678901234567890}', "x"),
        (b'{"n": 1, "text": "first", "text": "last", "n": 2}', "last"),
        (b' \t{"text" : "x"}\t \r', "x"),
        (b'{"text": "\\u0000\\ud83d\\ude00"}', "\0\U0001f600"),
        (b'{"text": "x", "other": "\\ud800"}', "x"),
        (b'{"text": "x", "n": %s}' % (b"[" * 200 + b"]" * 200), "x"),
        ('{"text": "\u2028\u0085\x7f"}'.encode(), "\u2028\u0085\x7f"),
    ],
)
def test_lines_that_one_reader_refuses_and_another_takes(tmp_path: Path, line: bytes, text: str) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n' + line + b'\n{"text": "b"}')
    assert texts_of(path) == [("a",), (text,), ("b",)]
    found, expected = objects(path)[1], json.loads(line)
    assert str(found) == str(expected) and found["text"] == text


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**40])
def test_long_integers_of_objects_are_kept(tmp_path: Path, number: int) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "x", "n": {"id": [number]}}).encode())
    assert objects(path) == [{"text": "x", "n": {"id": [number]}}]


def test_bytes_and_halves_of_characters_are_replaced_one_by_one(tmp_path: Path) -> None:
    lines = [
        b'{"text": "a\xffb"}',
        b'{"text": "\\ud800x\\udc00"}',
        b'{"text": "\\ude00\\ud83d"}',
        b'{"text": "\xe2\x82"}',
    ]
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    assert texts_of(path, rules=REPLACE) == [("a\ufffdb",), ("\ufffdx\ufffd",), ("\ufffd\ufffd",), ("\ufffd",)]
    (chunk,) = chunks_of(path, rules=REPLACE)
    assert [len(document.contents[0]) for document in read_documents(chunk, REPLACE)] == [5, 7, 6, 3]


@each("rule", ["blocks", "lines", "file"])
@each("chunk_bytes", [5, 1 << 20])
@each("ending", ENDINGS)
def test_a_bad_byte_in_text_is_named_or_replaced(tmp_path: Path, rule: str, chunk_bytes: int, ending: str) -> None:
    path = write(tmp_path / f"a.txt{ending}", b"one\ntwo\nthr\xffee\nfour\n")
    rules = {answer: DocumentRules(text_rule=rule, invalid_utf8=answer) for answer in ("refuse", "replace")}
    with small_chunks(chunk_bytes):
        with pytest.raises(DataError, match=rf"a\.txt{ending}:3\n.*start byte \(0xff\)\n.*--invalid-utf8 replace"):
            texts_of(path, rules=rules["refuse"])
        texts = "".join(text for (text,) in texts_of(path, rules=rules["replace"]))
    assert texts.replace("\n", "") == "onetwothr\ufffdeefour"


def test_a_bad_byte_between_separators_is_named_or_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one||||a long text\xff||x||\xff")
    rules = DocumentRules(text_rule="separator", separator="||")
    with small_chunks(3):
        with pytest.raises(DataError, match=r"a\.txt: document 3\n.*0xff"):
            texts_of(path, rules=rules)
        bad = BadLines()
        assert texts_of(path, rules=rules, bad=bad) == [("one",), ("x",)]
        assert [line.split(": ")[1] for line in bad.lines()] == ["document 3", "document 5"]
        replaced = DocumentRules(text_rule="separator", separator="||", invalid_utf8="replace")
        assert texts_of(path, rules=replaced) == [("one",), ("a long text\ufffd",), ("x",), ("\ufffd",)]


@settings(max_examples=40)
@given(
    kinds=st.lists(st.sampled_from([b'{"text": "x"}', b"{", b"", b"\xff", b'{"a": 1}', b" "]), max_size=30),
    chunk_bytes=st.integers(1, 100),
    ending=st.sampled_from(ENDINGS),
)
def test_the_same_lines_are_passed_over_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[bytes], chunk_bytes: int, ending: str
) -> None:
    path = write(tmp_path_factory.mktemp("s") / f"a.jsonl{ending}", b"\n".join(kinds))
    bad = BadLines()
    with small_chunks(chunk_bytes, 11):
        assert texts_of(path, bad=bad) == [("x",)] * kinds.count(b'{"text": "x"}')
    expected = [n for n, kind in enumerate(kinds, start=1) if kind.strip() and kind != b'{"text": "x"}']
    assert [int(line.split(": ")[0].rsplit(":", 1)[1]) for line in bad.lines()] == expected
    whole = BadLines()
    texts_of(path, bad=whole)
    assert whole.lines() == bad.lines()


def test_objects_have_all_keys_and_are_of_all_formats(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", b'{"id": 1, "text": "x"}\n{"id": 2}\n')
    b = write(tmp_path / "b.txt.gz", b"plain\n")
    bad = BadLines()
    found = list(objects_of(a, b, bad=bad))
    assert found == [{"id": 1, "text": "x"}, {"text": "plain\n"}]
    assert bad.lines() == [f"{a}:2: has the key 'text'"]
    with pytest.raises(DataError, match="separator without --separator"):
        list(objects_of(a, rules=DocumentRules(text_rule="separator")))


class Counting:
    """A file that counts the bytes that have been read from it."""

    def __init__(self, path: Path, read: list[int]) -> None:
        self._stream, self._read = open(path, "rb", buffering=0), read  # noqa: SIM115

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def seek(self, place: int) -> None:
        self._stream.seek(place)

    def read(self, size: int) -> bytes:
        return self._noted(self._stream.read(size))

    def readline(self, size: int = -1) -> bytes:
        return self._noted(self._stream.readline(size))

    def _noted(self, data: bytes) -> bytes:
        self._read.append(len(data))
        return data


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read: list[int] = []
    opening: Callable[[Path], Counting] = lambda path: Counting(path, read)  # noqa: E731
    monkeypatch.setattr(documents, "open_regular", opening)
    return read


def test_a_line_of_many_chunks_is_read_about_twice(tmp_path: Path, bytes_read: list[int]) -> None:
    """A long line is read once as a whole, and once by the chunks that search for the beginning of a line."""
    lines = [b'{"text": "%s"}\n' % (b"x" * size) for size in (30, 40_000, 5, 70_000)]
    path = write(tmp_path / "a.jsonl", b"".join(lines))
    with small_chunks(100):
        assert [len(text) for (text,) in texts_of(path)] == [30, 40_000, 5, 70_000]
    assert path.stat().st_size <= sum(bytes_read) < 2.1 * path.stat().st_size


def test_short_lines_are_read_once(tmp_path: Path, bytes_read: list[int]) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "abc"}\n' * 1000)
    with small_chunks(1000):
        assert len(texts_of(path)) == 1000
    assert sum(bytes_read) < 1.1 * path.stat().st_size


def test_telling_a_line_of_a_long_file_takes_little_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "%s"}\n' % (b"x" * 1000) * 20_000 + b"{\n")
    chunks = chunks_of(path, rules=DocumentRules())
    tracemalloc.start()
    with pytest.raises(DataError, match=r"a\.jsonl:20001\b"):
        list(read_documents(chunks[-1], DocumentRules()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let readers hold 100,000 bytes; the files here are far longer, and mostly holes."""
    for module in (chunks, documents):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 100_000)
    return 100_000


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_line_that_never_ends_is_named_and_takes_little_memory(tmp_path: Path, ending: str, short_limit: int) -> None:
    path = write(tmp_path / f"a.jsonl{ending}", b'{"text": "a"}\n{"text": "' + bytes(20 * short_limit))
    with small_chunks(1000, 4000):
        tracemalloc.start()
        with pytest.raises(DataError, match=rf"a\.jsonl{ending}:2\n.*every line is at most"):
            texts_of(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert ending or peak < 10 * short_limit  # a few packed bytes may be many


def test_a_line_that_is_too_long_can_be_passed_over(tmp_path: Path, short_limit: int) -> None:
    lines = [b'{"text": "%s"}\n' % (b"x" * size) for size in (30, 2 * short_limit, 90_000, 3 * short_limit, 5)]
    path, bad = write(tmp_path / "a.jsonl", b"".join(lines)), BadLines()
    with small_chunks(1000):
        assert [len(text) for (text,) in texts_of(path, bad=bad)] == [30, 90_000, 5]
    assert [line.partition(": ")[0] for line in bad.lines()] == [f"{path}:2", f"{path}:4"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (DocumentRules(text_rule="file"), "the file is a document at most"),
        (DocumentRules(text_rule="separator", separator="||"), "no separator in"),
        (DocumentRules(text_rule="lines"), "every line is at most"),
        (DocumentRules(), "every line is at most"),
    ],
    ids=lambda value: value.text_rule if isinstance(value, DocumentRules) else "",
)
def test_a_document_of_plain_text_has_a_limit(
    tmp_path: Path, rules: DocumentRules, words: str, ending: str, short_limit: int
) -> None:
    path = write(tmp_path / f"a.txt{ending}", bytes(20 * short_limit))
    with small_chunks(1000, 4000), pytest.raises(DataError, match=words):
        texts_of(path, rules=rules)


@pytest.mark.parametrize("depth", [990, 100_000])
def test_deep_objects_are_refused_where_they_are_written_again(tmp_path: Path, depth: int) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "x", "a": ' + b"[" * depth + b"1" + b"]" * depth + b"}\n")
    with pytest.raises(DataError, match=r"a\.jsonl:1\n.*every line is JSON"):
        objects(path)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "x"}\n')
    (chunk,) = chunks_of(path, rules=DocumentRules())
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        list(read_documents(chunk, DocumentRules()))


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "x"}\n')
    (chunk,) = chunks_of(path, rules=DocumentRules())
    assert isinstance(chunk, LineRange)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl\n.*must be a readable file"):
        list(read_documents(chunk, DocumentRules()))
