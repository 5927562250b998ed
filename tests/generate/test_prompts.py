"""Tests of files of prompts, and of the lines that are none."""

from pathlib import Path

import pytest
from support.each import each

from megazero.errors import DataError
from megazero.generate.prompts import read_prompts


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@each(
    ("name", "content", "expected"),
    [
        ("a.txt", "one\ntwo  \n", ["one", "two  "]),
        ("b", "\ufeffone\r\n\r\n \ttwo", ["one", " \ttwo"]),
        ("c.txt", '{"prompt": 1}\n', ['{"prompt": 1}']),
        ("d.jsonl", '{"prompt": "a\\nb", "id": 3}\n\n{"prompt": ""}\n', ["a\nb", ""]),
        ("e.JSONL", '{"prompt": "\u00e4 \u2028"}', ["\u00e4 \u2028"]),
    ],
)
def test_a_line_is_a_prompt(tmp_path: Path, name: str, content: str, expected: list[str]) -> None:
    assert read_prompts(written(tmp_path, name, content)) == expected


@each(
    ("name", "content", "told"),
    [
        ("a.txt", "", "a prompt or more"),
        ("b.txt", " \n\n", "a prompt or more"),
        ("c.txt", b"one\n\xff\n", "c.txt:2"),
        ("d.jsonl", '{"prompt": "x"}\n{"text": "x"}\n', "d.jsonl:2"),
        ("e.jsonl", '"x"\n', "e.jsonl:1"),
        ("f.jsonl", "{\n", "f.jsonl:1"),
        ("g.jsonl", '{"prompt": "\\ud800"}\n', "g.jsonl:1"),
        ("h.jsonl", "1\n" * 9, "h.jsonl:5 (and 4 more lines)"),
    ],
)
def test_lines_that_are_none_are_told(tmp_path: Path, name: str, content: str | bytes, told: str) -> None:
    with pytest.raises(DataError) as caught:
        read_prompts(written(tmp_path, name, content))
    assert told in str(caught.value) and len(caught.value.problems) <= 5


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing"):
        read_prompts(tmp_path / "nothing.txt")
