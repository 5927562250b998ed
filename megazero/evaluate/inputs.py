"""Reads the files of an evaluation: texts, texts whose last word is asked for, and questions with choices.

    text       a file is one text; one that ends in .jsonl, .ndjson or .json has a text in each line: {"text": ...}
    last word  JSON lines {"text": ...}
    choices    JSON lines {"context": ..., "choices": [..., ...], "label": the number of the right one, from 0}

Other keys are left alone, and so are lines of white space.  A line that is none of these is an error with its number.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megazero.errors import DataError, Problem, raise_problems
from megazero.files import cannot_read, open_regular, parse_json

_LINES = (".jsonl", ".ndjson", ".json")
_MOST_PROBLEMS = 10  # of one file that are printed
T = TypeVar("T")


class Question(NamedTuple):
    """A context, its choices, and the number of the right one."""

    context: str
    choices: tuple[str, ...]
    label: int


class _Unusable(Exception):
    """Raised for a line that cannot be used, with what is wrong, the rule and what would be legal."""


def read_texts(path: Path) -> list[str]:
    """Read the texts of a file, of which at least one is not empty; raise DataError."""
    if path.suffix.lower() in _LINES:
        texts = _read_lines(path, lambda content: _text(content, "text"))
    else:
        try:
            texts = [_content(path).decode()]
        except UnicodeDecodeError as error:
            line = 1 + error.object.count(b"\n", 0, error.start)
            raise DataError(Problem(f"{path}, line {line}: {error.reason}", "text is UTF-8")) from error
    if not any(texts):
        raise DataError(Problem(f"{path}: empty", "there is some text to evaluate"))
    return texts


def read_passages(path: Path) -> list[str]:
    """Read texts whose last word is asked for, without white space at their ends; raise DataError."""

    def passage(content: dict[str, Any]) -> str:
        text = _text(content, "text").rstrip()
        if not text:
            raise _Unusable("no word", "a text has a last word", '{"text": "words and one more"}')
        return text

    return _read_lines(path, passage)


def read_questions(path: Path) -> list[Question]:
    """Read questions with choices; raise DataError."""

    def question(content: dict[str, Any]) -> Question:
        context, choices, label = _text(content, "context"), content.get("choices"), content.get("label")
        legal = '"choices": ["one", "another"]'
        if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
            raise _Unusable(_shown(content, "choices"), "choices is a list of texts", legal)
        if len(choices) < 2 or not all(choices):
            raise _Unusable(_shown(content, "choices"), "there are at least two choices, and none is empty", legal)
        if type(label) is not int or not 0 <= label < len(choices):
            rule = f"label is the number of one of the {len(choices)} choices, from 0"
            raise _Unusable(_shown(content, "label"), rule, f'"label": 0 to {len(choices) - 1}')
        return Question(context, tuple(_encodable(each, "choices") for each in choices), label)

    return _read_lines(path, question)


def _read_lines(path: Path, read: Callable[[dict[str, Any]], T]) -> list[T]:
    """Read every line by `read`; raise DataError with all lines that it cannot use."""
    found: list[T] = []
    problems: list[Problem] = []
    for number, content in _objects(path):
        try:
            if not isinstance(content, dict):
                raise _Unusable(*(content if isinstance(content, tuple) else ("no object", "a line is a JSON object")))
            found.append(read(content))
        except _Unusable as error:
            given, rule, *legal = error.args
            problems.append(Problem(f"{path}, line {number}: {given}", rule, *legal))
            if len(problems) == _MOST_PROBLEMS:
                break
    raise_problems(DataError, problems)
    if not found:
        raise DataError(Problem(f"{path}: empty", "there is at least one line to evaluate"))
    return found


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield every line's number and content; a tuple of what is wrong and the rule if it is no JSON in UTF-8."""
    for number, line in enumerate(_content(path).split(b"\n"), start=1):
        if not line or line.isspace():
            continue
        try:
            yield number, parse_json(line.decode())
        except UnicodeDecodeError as error:
            yield number, (error.reason, "a line is JSON in UTF-8")
        except ValueError as error:
            yield number, (str(error), "a line is a JSON object")


def _content(path: Path) -> bytes:
    try:
        with open_regular(path) as stream:
            return stream.read().removeprefix(b"\xef\xbb\xbf")  # the byte order mark of some editors
    except OSError as error:
        raise cannot_read(path, error) from error


def _text(content: dict[str, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str):
        raise _Unusable(_shown(content, key), f'the key "{key}" holds a text', f'"{key}": "..."')
    return _encodable(value, key)


def _encodable(text: str, key: str) -> str:
    """Return the text; JSON may have halves of a character, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Unusable(f"{key}: {error.reason} ({error.object[error.start]!a})", "text is UTF-8") from error
    return text


def _shown(content: dict[str, Any], key: str) -> str:
    """Return what a line has under a key, or else which keys it has."""
    if key in content:
        return f"{key} {content[key]!r:.60}"
    return f"no {key}, among the keys {', '.join(map(str, content)) or 'none'}"
