"""Corpora as settings name them: prefixes, weights, and the part of a corpus that is read.

A *group* is a named mixture, in BLOOM's form: a weight, a part and a prefix of every corpus, with commas between.

    "NAME: 0.7 0:0.95 first_text_document, 0.3 0:0.95 second_text_document"
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from megazero.config.run import DataConfig
from megazero.errors import Problem

# {split: the setting that names its groups of corpora}
GROUPS: Mapping[str, str] = MappingProxyType(
    {split: f"{split}_weighted_split_paths" for split in ("train", "valid", "test")}
)
FORM = '"NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX", such as "en: 0.7 0:0.95 A, 0.3 0:0.95 B"'


class WeightedPrefix(NamedTuple):
    """A corpus of a mixture.

    weight: None if it is mixed in proportion to its size.  start, stop: the part of its sequences that is read, from 0
    to 1.
    """

    prefix: str
    weight: Fraction | None
    start: float = 0.0
    stop: float = 1.0


class CorpusGroup(NamedTuple):
    """A named mixture of parts of corpora."""

    name: str
    parts: tuple[WeightedPrefix, ...]


def read_group(text: str) -> CorpusGroup | str:
    """Return the group that `text` spells, or what is wrong with it."""
    name, colon, rest = text.partition(":")
    if not colon or not name.strip():
        return "a group begins with its name and a colon"
    parts = []
    for entry in rest.split(","):
        words = entry.split()
        if len(words) != 3:
            return f"a corpus is a weight, a part and a prefix, with a comma behind, not {entry.strip()!r}"
        weight, bounds = _number(words[0]), [_number(word) for word in words[1].split(":")]
        if weight is None or weight <= 0:
            return f"a weight is a number above 0, not {words[0]}"
        start, stop = bounds if len(bounds) == 2 else (None, None)
        if start is None or stop is None or not 0 <= start < stop <= 1:
            return f"a part is START:END with 0 <= START < END <= 1, not {words[1]}"
        parts.append(WeightedPrefix(words[2], weight, float(start), float(stop)))
    return CorpusGroup(name.strip(), tuple(parts))


def read_groups(words: Iterable[str]) -> tuple[CorpusGroup, ...]:
    """Return the groups that the words spell; those that break the form's rules are left out."""
    return tuple(group for group in map(read_group, words) if isinstance(group, CorpusGroup))


def group_problems(flag: str, words: Sequence[str]) -> Iterator[Problem]:
    """Yield the problems of the groups that follow `flag`."""
    names = []
    for word in words:
        group = read_group(word)
        if isinstance(group, str):
            yield Problem(f"{flag} {word!r}", group, f"{flag} {FORM}")
            continue
        if group.name in names:
            yield Problem(f"{flag} {word!r}", "every group has a name of its own", f"another name than {group.name}")
        names.append(group.name)


def corpus_words(data: DataConfig) -> tuple[str, ...]:
    """Return the prefixes of all corpora that the settings name, among the weights between them."""
    paths: Iterable[Sequence[str]] = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    grouped = (
        part.prefix for name in GROUPS.values() for group in read_groups(getattr(data, name)) for part in group.parts
    )
    return (*(word for path in paths for word in path), *grouped)


def train_words(data: DataConfig) -> tuple[str, ...]:
    """Return the flag that names the corpora of training, and its values; () for none."""
    for name in ("data_path", "train_data_path", GROUPS["train"]):
        if words := getattr(data, name):
            return (f"--{name.replace('_', '-')}", *words)
    return ()


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
