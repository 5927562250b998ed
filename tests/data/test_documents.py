"""Documents of jsonl and plain text, whole and in chunks."""

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data import documents
from megazero.data.documents import Chunk, DocumentRules, find_chunks, read_documents
from megazero.errors import DataError


def read(path: Path, rules: DocumentRules) -> list[tuple[str, ...]]:
    return [document.texts for chunk in find_chunks([path], rules) for document in read_documents(chunk, rules)]


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=12),
    chunk_bytes=st.integers(1, 100),
    ascii_only=st.booleans(),
)
def test_jsonl_documents_do_not_depend_on_chunks(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], chunk_bytes: int, ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("j") / "a.jsonl"
    lines = [json.dumps({"text": text, "n": 1}, ensure_ascii=ascii_only) for text in texts]
    path.write_text("\n".join(lines), encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "CHUNK_BYTES", chunk_bytes)
        chunks = find_chunks([path], DocumentRules())
        assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
        assert chunks[-1].stop == path.stat().st_size
        assert read(path, DocumentRules()) == [(text,) for text in texts]


def test_several_keys_and_sizes_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"b": "é", "a": "xyz"}\n\n  \n{"a": "", "b": "q"}\n', encoding="utf-8")
    rules = DocumentRules(("a", "b"))
    (chunk,) = find_chunks([path], rules)
    assert [tuple(document) for document in read_documents(chunk, rules)] == [
        (("xyz", "é"), (3, 2)),
        (("", "q"), (0, 1)),
    ]


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "x"}\r\n{"text": "y"}\r\n')
    assert read(path, DocumentRules()) == [("x",), ("y",)]


def test_text_blocks_lose_nothing_and_end_at_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    paragraphs = [f"paragraph {number}\n" * 20 + "\n" for number in range(200)]
    path.write_text("".join(paragraphs))
    blocks = [text for (text,) in read(path, DocumentRules())]
    assert "".join(blocks) == path.read_text()
    assert len(blocks) > 10
    assert all(block.endswith("\n\n") and 4096 <= len(block) <= 4096 + 400 for block in blocks[:-1])


def test_text_without_blank_lines_is_cut_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a line of text\n" * 4000)
    blocks = [text for (text,) in read(path, DocumentRules())]
    assert "".join(blocks) == path.read_text()
    assert all(block.endswith("\n") and 16384 <= len(block) < 16384 + 15 for block in blocks[:-1])


def test_text_lines_and_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.TXT"
    path.write_bytes(b"one\n\n  \n two\r\nthree")
    assert read(path, DocumentRules(text_rule="lines")) == [("one",), (" two",), ("three",)]
    assert read(path, DocumentRules(text_rule="file")) == [("one\n\n  \n two\r\nthree",)]


def test_the_file_rule_keeps_a_long_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", 8)
    path = tmp_path / "a.txt"
    path.write_text("0123456\n" * 10)
    assert find_chunks([path], DocumentRules(text_rule="file")) == [Chunk(path, 0, 80)]
    assert len(find_chunks([path], DocumentRules(text_rule="lines"))) == 5


def test_an_empty_file_has_no_chunk(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    assert find_chunks([tmp_path / "a.txt"], DocumentRules()) == []


def test_all_unusable_paths_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "a.txt").write_text("x")
    paths = [tmp_path / "a.csv", tmp_path, tmp_path / "none.jsonl", tmp_path / "a.txt"]
    with pytest.raises(DataError) as caught:
        find_chunks(paths, DocumentRules(("a", "b")))
    rules = [problem.rule for problem in caught.value.problems]
    assert rules == [
        "the ending tells the format",
        "must be a file",
        "must be a file",
        "plain text has one key only",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', "is JSON"),
        (b"[" * 100_000, "is JSON"),
        (b'["text"]', "is a JSON object, not list"),
        (b'{"body": "x"}', "has the key 'text'"),
        (b'{"text": 3}', "holds a string under 'text', not int"),
        (b'{"text": "\xff"}', "is UTF-8"),
        (b'{"text": "\\ud800"}', "holds Unicode text: surrogates"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [10, 1 << 20])
def test_a_bad_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, message: str, chunk_bytes: int
) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n\n{"text": "y"}\n' + line + b'\n{"text": "z"}\n')
    with pytest.raises(DataError, match=message) as caught:
        read(path, DocumentRules())
    assert caught.value.problems[0].given == f"{path}:4"


def test_a_bad_byte_in_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthr\xffee\n")
    with pytest.raises(DataError, match=r"a\.txt:3"):
        read(path, DocumentRules())


def test_telling_a_line_of_a_long_file_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "%s"}\n' % (b"x" * 1000) * 20_000 + b"{\n")
    chunks = find_chunks([path], DocumentRules())
    tracemalloc.start()
    with pytest.raises(DataError, match=r"a\.jsonl:20001\b"):
        list(read_documents(chunks[-1], DocumentRules()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2
