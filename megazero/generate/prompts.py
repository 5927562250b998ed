"""The prompts of a file: lines of text, or JSON lines, each an object with a `prompt` (by the ending .jsonl)."""

from collections.abc import Iterator
from pathlib import Path

from megazero.errors import DataError, Problem, raise_problems
from megazero.files import cannot_read, parse_json, read_bounded

JSON_ENDING = ".jsonl"
KEY = "prompt"

_MAX_FILE_BYTES = 1 << 28
_MOST_PROBLEMS = 5


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file in order; lines of white space alone are passed over.

    Raises DataError for a file that cannot be read, has no prompts or lines that are none.
    """
    try:
        content = read_bounded(path, _MAX_FILE_BYTES)
        lines = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise cannot_read(path, error) from error
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(Problem(f"--prompts-file {path}:{line}", "must be UTF-8 text")) from error
    numbered = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise DataError(Problem(f"--prompts-file {path}", "has a prompt or more, one a line"))
    if not path.name.lower().endswith(JSON_ENDING):
        return [line for _, line in numbered]
    read = [(number, _prompt_of(line)) for number, line in numbered]
    raise_problems(DataError, list(_problems(path, [number for number, prompt in read if prompt is None])))
    return [prompt for _, prompt in read if prompt is not None]


def _prompt_of(line: str) -> str | None:
    """Return the prompt of a JSON line, None where there is none."""
    try:
        content = parse_json(line)
    except ValueError:
        return None
    prompt = content.get(KEY) if isinstance(content, dict) else None
    return prompt if isinstance(prompt, str) and not has_surrogates(prompt) else None


def _problems(path: Path, numbers: list[int]) -> Iterator[Problem]:
    more = len(numbers) - _MOST_PROBLEMS
    for place, number in enumerate(numbers[:_MOST_PROBLEMS], start=1):
        others = f" (and {more} more lines)" if place == _MOST_PROBLEMS and more > 0 else ""
        rule = f"a line of JSON is an object whose {KEY} is text"
        yield Problem(f"--prompts-file {path}:{number}{others}", rule, f'{{"{KEY}": "..."}}')


def has_surrogates(text: str) -> bool:
    """Return True for text that is not UTF-8: bytes of a command line that are none come as lone surrogates."""
    return any("\ud800" <= character <= "\udfff" for character in text)
