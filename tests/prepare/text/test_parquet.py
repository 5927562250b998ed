"""Every kind of text column in a Parquet file gives all rows in order; a damaged file is refused, not read in part."""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.each import each
from support.input_files import chunks_of, objects_of, small_chunks, texts_of

from megazero.errors import DataError
from megazero.prepare.text.bad_lines import BadLines
from megazero.prepare.text.chunks import DocumentRules, Records
from megazero.prepare.text.inputs import PARQUET, InputFile, find_inputs
from megazero.prepare.text.parquet import Rows, read_rows

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"row {number} é" for number in range(23)]


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def broken_texts(*texts: bytes, kind: Any = None) -> Any:
    """Return a column that is declared as text and holds bytes that are not, such as other writers make."""
    return pyarrow.array(list(texts), pyarrow.binary()).view(kind or pyarrow.string())


def rows(path: Path, columns: tuple[str, ...] | None = None, num_bytes: int = 1 << 20) -> list[Rows]:
    (file,) = find_inputs([str(path)])
    return list(read_rows(file, columns, num_bytes))


def refusal(path: Path, rules: DocumentRules | None = None) -> str:
    with pytest.raises(DataError) as caught:
        texts_of(path, rules=rules)
    assert all(str(path) in problem.given for problem in caught.value.problems)
    return str(caught.value)


@pytest.mark.parametrize("row_group_size", [1, 7, 100])
@pytest.mark.parametrize("chunk_bytes", [1, 300, 1 << 20])
def test_rows_come_in_order_whatever_the_row_groups(tmp_path: Path, row_group_size: int, chunk_bytes: int) -> None:
    path = write(tmp_path / "a.parquet", {"id": list(range(23)), "text": TEXTS}, row_group_size=row_group_size)
    with small_chunks(chunk_bytes):
        assert texts_of(path) == [(text,) for text in TEXTS]
        chunks = [chunk for chunk in chunks_of(path, rules=DocumentRules()) if isinstance(chunk, Records)]
    assert [chunk.first for chunk in chunks] == [1 + sum(len(c.rows) for c in chunks[:n]) for n in range(len(chunks))]
    assert sum(chunk.input_bytes for chunk in chunks) == path.stat().st_size
    assert len(chunks) in {1: (23,), 300: range(4, 10), 1 << 20: (1,)}[chunk_bytes]


@each(
    "column",
    [
        pyarrow.array(TEXTS, pyarrow.string()),
        pyarrow.array(TEXTS, pyarrow.large_string()),
        pyarrow.array([text.encode() for text in TEXTS], pyarrow.binary()),
        pyarrow.array([text.encode() for text in TEXTS], pyarrow.large_binary()),
        pyarrow.array(TEXTS).dictionary_encode(),
    ],
    ids=lambda column: str(column.type).split("<")[0],
)
@each("compression", ["snappy", "zstd", "none"])
def test_every_kind_of_text(tmp_path: Path, column: Any, compression: str) -> None:
    path = write(tmp_path / "a.parquet", {"text": column}, compression=compression)
    assert texts_of(path) == [(text,) for text in TEXTS]


def test_several_columns_in_the_order_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"b": ["1", "2"], "c": ["x", "x"], "a": ["é", ""]})
    assert texts_of(path, rules=DocumentRules(("a", "b"))) == [("é", "1"), ("", "2")]
    assert [sorted(row) for group in rows(path, ("a", "b")) for row in group.rows] == [["a", "b"]] * 2
    assert next(objects_of(path, rules=DocumentRules(("a",)))) == {"b": "1", "c": "x", "a": "é"}


def test_an_empty_text_is_a_document_and_a_null_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["a", "", " ", None, "b", None]})
    assert "a.parquet: row 4\n    rule:  every line has a string under 'text', not NoneType" in refusal(path)
    bad = BadLines()
    with small_chunks(1):
        assert texts_of(path, bad=bad) == [("a",), ("",), (" ",), ("b",)]
    assert bad.lines() == [
        f"{path}: row {number}: has a string under 'text', not NoneType" for number in (4, 6)
    ]  # fmt: skip
    numbers = write(tmp_path / "b.parquet", {"text": [1, 2]})
    assert "row 1\n" in refusal(numbers) and "not int" in refusal(numbers)


@pytest.mark.parametrize("make", [broken_texts, lambda *texts: pyarrow.array(list(texts), pyarrow.binary())])
def test_bytes_that_are_no_text(tmp_path: Path, make: Any) -> None:
    """The error names the row that holds the bad byte, wherever in the row the byte is."""
    texts = [b"abc", b"abcdefgh\xff", "é".encode(), b"\xed\xa0\x80"]
    path = write(tmp_path / "a.parquet", {"text": make(*texts), "id": [1, 2, 3, 4]})
    assert "row 2\n    rule:  every line is UTF-8: invalid start byte (0xff)" in refusal(path)
    assert texts_of(path, rules=DocumentRules(invalid_utf8="replace"))[:3] == [("abc",), ("abcdefgh\ufffd",), ("é",)]
    bad = BadLines()
    assert texts_of(path, bad=bad) == [("abc",), ("é",)]
    assert [line.split(": ")[1] for line in bad.lines()] == ["row 2", "row 4"]


def test_columns_that_are_no_text_in_other_places(tmp_path: Path) -> None:
    """Bad bytes in a column that is not requested stay bytes beside the valid texts; in a list they are an error."""
    other = broken_texts(b"a", b"\xff", kind=pyarrow.string())
    path = write(tmp_path / "a.parquet", {"text": ["x", "y"], "n": [1, None], "other": other})
    assert list(objects_of(path)) == [
        {"text": "x", "n": 1, "other": "a"},
        {"text": "y", "n": None, "other": b"\xff"},
    ]
    assert texts_of(path) == [("x",), ("y",)]
    nested = pyarrow.ListArray.from_arrays([0, 1, 2], other)
    path = write(tmp_path / "b.parquet", {"text": nested})
    assert "row 1 or one of the 2 from there" in refusal(path)


def test_missing_columns_are_told_together(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"body": ["x"], "id": [1]})
    with pytest.raises(DataError) as caught:
        rows(path, ("text", "body", "title"))
    assert [problem.rule for problem in caught.value.problems] == ["has the column 'text'", "has the column 'title'"]
    assert caught.value.problems[0].legal == "--json-keys body id"


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", {"text": TEXTS}, row_group_size=5).read_bytes()
    path = tmp_path / "a.parquet"
    for size in range(0, len(whole), 13):
        path.write_bytes(whole[:size])
        assert "Parquet file" in refusal(path)
    path.write_bytes(b'{"text": "x"}\n')
    assert "Parquet file" in refusal(path)
    path.unlink()
    with pytest.raises(DataError, match="must be a readable Parquet file"):
        list(read_rows(InputFile(str(path), PARQUET), None, 1))


def test_a_changed_byte_of_a_page_is_found_where_pages_have_checksums(tmp_path: Path) -> None:
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    path = write(tmp_path / "a.parquet", {"text": TEXTS}, **options)
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"row 7")] ^= 1
    path.write_bytes(whole)
    assert "undamaged Parquet file" in refusal(path) or "readable Parquet file" in refusal(path)


@pytest.mark.parametrize("texts", [[None] * 3000, [""] * 3000])
def test_rows_without_text_take_their_share(tmp_path: Path, texts: list[str | None]) -> None:
    """Rows without text count towards a chunk's size: otherwise all rows of a sparse column would be one chunk."""
    path = write(tmp_path / "a.parquet", {"text": pyarrow.array(texts, pyarrow.string())})
    groups = rows(path, num_bytes=10_000)
    assert sum(len(group.rows) for group in groups) == 3000
    assert max(len(group.rows) for group in groups) < 200


def test_what_is_no_text_counts_too(tmp_path: Path) -> None:
    vectors = pyarrow.array([[float(n)] * 1000 for n in range(500)], pyarrow.list_(pyarrow.float64()))
    path = write(tmp_path / "a.parquet", {"text": ["x"] * 500, "vector": vectors})
    assert max(len(group.rows) for group in rows(path, num_bytes=80_000)) <= 10
    assert len(rows(path, ("text",), num_bytes=80_000)) == 1


def test_an_empty_table_has_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": pyarrow.array([], pyarrow.string())})
    assert rows(path) == []


def test_without_pyarrow_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", {"text": TEXTS})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert 'pip install "megazero[corpora]"' in refusal(path)
