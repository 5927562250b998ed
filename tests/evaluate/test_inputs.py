"""Tests the files of an evaluation: what is read, and the message, with its line, for everything else."""

import json
from pathlib import Path

import pytest
from support.each import each

from megazero.errors import DataError
from megazero.evaluate.inputs import Question, read_passages, read_questions, read_texts

SOUND = '{"context": "c", "choices": ["a", "b"], "label": 1, "id": 4}'


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_is_a_text_or_has_one_in_each_line(tmp_path: Path) -> None:
    assert read_texts(written(tmp_path / "a.txt", "\ufeffone\n\ntwo \n")) == ["one\n\ntwo \n"]
    assert read_texts(written(tmp_path / "wiki.test.raw", " = naïve = \n")) == [" = naïve = \n"]
    lines = '{"text": "one "}\n\n  \n{"text": "", "more": [1]}\r\n{"text": "l\\n"}'
    assert read_texts(written(tmp_path / "a.JSONL", lines)) == ["one ", "", "l\n"]


def test_passages_end_with_a_word(tmp_path: Path) -> None:
    lines = '{"text": " a  b\\n"}\n{"text": "c"}\n'
    assert read_passages(written(tmp_path / "l.txt", lines)) == [" a  b", "c"]


def test_questions(tmp_path: Path) -> None:
    lines = f'{SOUND}\n{{"context": "", "choices": ["é", " x "], "label": 0}}\n'
    found = read_questions(written(tmp_path / "q.jsonl", lines))
    assert found == [Question("c", ("a", "b"), 1), Question("", ("é", " x "), 0)]


@each(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("3", "no object\n    rule:  a line is a JSON object"),
        ('{"question": "c"}', 'no context, among the keys question\n    rule:  the key "context" holds a text'),
        ("{}", "no context, among the keys none"),
        ('{"context": 3}', "context 3\n"),
        ('{"context": "c", "choices": "ab", "label": 0}', "choices 'ab'\n    rule:  choices is a list of texts"),
        ('{"context": "c", "choices": ["a", 1], "label": 0}', r"choices \['a', 1\]\n"),
        ('{"context": "c", "choices": ["a"], "label": 0}', ".*\n.*at least two choices"),
        ('{"context": "c", "choices": ["a", ""], "label": 0}', ".*\n.*none is empty"),
        (
            '{"context": "c", "choices": ["a", "b"], "label": 2}',
            'label 2\n.*of the 2 choices, from 0\n.*"label": 0 to 1',
        ),
        ('{"context": "c", "choices": ["a", "b"], "label": -1}', "label -1\n"),
        ('{"context": "c", "choices": ["a", "b"], "label": true}', "label True\n"),
        ('{"context": "c", "choices": ["a", "b"], "label": "0"}', "label '0'\n"),
        ('{"context": "c", "choices": ["a", "b"]}', "no label, among the keys context, choices"),
        ('{"context": "\\ud800", "choices": ["a", "b"], "label": 0}', "context: surrogates not allowed"),
        ('{"context": "c", "choices": ["a", "\\udcff"], "label": 0}', "choices: surrogates not allowed"),
        ("[" * 100 + "]" * 100, "nested deeper than"),
        (b"\xff", "invalid start byte\n    rule:  a line is JSON in UTF-8"),
    ],
    ids=repr,
)
def test_wrong_lines_are_told_with_their_numbers(line: str | bytes, message: str, tmp_path: Path) -> None:
    content = line if isinstance(line, bytes) else line.encode()
    path = written(tmp_path / "q.jsonl", SOUND.encode() + b"\n\n" + content + b"\n")
    with pytest.raises(DataError, match=f"^data error: {path}, line 3: {message}"):
        read_questions(path)


def test_all_wrong_lines_are_told_at_once_but_no_more_than_ten(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("a", "", "b", " ", *[3] * 30))
    with pytest.raises(DataError) as caught:
        read_passages(written(tmp_path / "l.jsonl", lines))
    given = [problem.given for problem in caught.value.problems]
    assert given[:3] == [
        f"{tmp_path}/l.jsonl, line {n}: {what}" for n, what in ((2, "no word"), (4, "no word"), (5, "text 3"))
    ]
    assert len(given) == 10


@each(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt: empty"),
        ("a.jsonl", b"\n \n", "a.jsonl: empty"),
        ("a.jsonl", b'{"text": ""}\n{"text": ""}', "there is some text to evaluate"),
        ("a.txt", b"one\ntwo\nthr\xe9\n", "a.txt, line 3: invalid continuation byte\n    rule:  text is UTF-8"),
        ("a.jsonl", None, "a.jsonl\n    rule:  must be a readable file: No such file or directory"),
    ],
)
def test_files_that_have_no_text(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").unlink(missing_ok=True)
    if content is not None:
        written(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        read_texts(tmp_path / name)


def test_a_folder_and_a_fifo_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Is a directory"):
        read_texts(tmp_path)
