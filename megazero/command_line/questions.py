"""Separates the flags after which a run only prints something, such as `--help` and `--check`, from all others."""

from collections.abc import Sequence
from typing import NamedTuple

from megazero.command_line.names import QUESTIONS


class Questions(NamedTuple):
    """The questions in a command line, and the rest of it.

    topics: those of --help, None without the flag.  asked: names of the other questions.  rest: all other words.
    """

    topics: tuple[str, ...] | None
    asked: frozenset[str]
    rest: list[str]


def split_questions(words: Sequence[str]) -> Questions:
    """Separate the questions from a command line; every word after --help, or -h, is one of its topics."""
    asked: set[str] = set()
    rest: list[str] = []
    for place, word in enumerate(words):
        name = word.removeprefix("--").replace("_", "-") if word.startswith("--") else ""
        if name == "help" or word == "-h":
            return Questions(tuple(words[place + 1 :]), frozenset(asked), rest)
        if name in QUESTIONS:
            asked.add(name)
        else:
            rest.append(word)
    return Questions(None, frozenset(asked), rest)
