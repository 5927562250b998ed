"""Adds to problems where their settings come from, when the user did not give them by the flags that rules name."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from megazero.command_line.names import spellings
from megazero.config.fields import FieldInfo
from megazero.config.run import FIELDS
from megazero.errors import Problem

_BY_FLAG: Mapping[str, FieldInfo] = MappingProxyType({flag: info for info in FIELDS for flag in spellings(info)})


def with_sources(problems: Iterable[Problem], sources: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems; what was given names the file, the preset or the other spelling of each setting in it.

    sources: the text that gave each setting its value, by name; a setting without one has its default.
    """
    for problem in problems:
        notes = [note for flag in _flags(problem.given) if (note := _note(flag, problem.given, sources))]
        yield replace(problem, given="; ".join((problem.given, *notes)))


def _flags(text: str) -> Iterable[str]:
    """Return the flags of settings in a text, each once."""
    return dict.fromkeys(word for word in re.findall(r"--[a-z][a-z0-9-]*", text) if word in _BY_FLAG)


def _note(flag: str, given: str, sources: Mapping[str, str]) -> str:
    """Return where the setting of `flag` comes from; "" if the text has it, or the user gave it by that flag."""
    info = _BY_FLAG[flag]
    source = sources.get(info.name)
    if source is None:
        is_default = info.default is not None and re.search(rf"{flag} {re.escape(str(info.default))}\b", given)
        return f"{flag} has its default" if is_default else ""
    if source in given or source.replace("_", "-").startswith((f"{flag} ", f"{flag}=")) or source == flag:
        return ""
    return f"{flag} comes from {source}"
