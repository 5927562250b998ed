"""Finds the corpora that a command line names, in order.

*Shards* are the corpora that one preprocessing made in several jobs, `NAME_shard_00003_of_00008_KEY_document`.  They
are sorted by their numbers, however they are given, and must be complete.  Other corpora stay in the order in which
they are given; those of a folder or a pattern are in the order of their names.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from glob import escape, glob, has_magic
from pathlib import Path
from typing import NamedTuple

from megazero.data.indexed_dataset import bin_path, idx_path
from megazero.data.sidecar import loss_mask_prefix
from megazero.data.storage import is_remote
from megazero.errors import DataError, Problem, raise_problems

_NAME = re.compile(r"(.*)_shard_(\d+)_of_(\d+)(_[^/]*)")
_ENDING = re.compile(r"\.(idx|bin|json)$")
# The number of names that a message lists before it counts the remaining ones.
_NAMED = 10


class ShardNames(NamedTuple):
    """The parts, before and after the numbers, that the names of all shards of one preprocessing and one key share."""

    head: str
    rest: str


class ShardName(NamedTuple):
    """The parts of a shard's name; width: the number of digits of its numbers."""

    family: ShardNames
    number: int
    num_shards: int
    width: int

    def sibling(self, number: int) -> str:
        """Return the prefix of another shard of the family."""
        number_text, count_text = (f"{each:0{self.width}d}" for each in (number, self.num_shards))
        return f"{self.family.head}_shard_{number_text}_of_{count_text}{self.family.rest}"


class _NamedCorpus(NamedTuple):
    prefix: str
    ending: str  # the ending of the file that was named; empty if a corpus was named


def parse_shard(prefix: str) -> ShardName | None:
    """Return the parts of a shard's prefix; None for a name that is no shard's."""
    found = _NAME.fullmatch(os.path.normpath(prefix))
    if found is None:
        return None
    head, number, count, rest = found.groups()
    return ShardName(ShardNames(head, rest), int(number), int(count), len(number))


def find_prefixes(words: Sequence[str]) -> tuple[str, ...]:
    """Return the corpora that the words of --input name, shards in order.

    A word is a prefix, a folder (for all corpora in it), a file of a corpus, or a pattern with * ? [] of prefixes or
    of files.  Raises DataError with every word that names none, every corpus that is given twice, and all problems of
    the shards.
    """
    meant: list[_NamedCorpus] = []
    problems: list[Problem] = []
    for word in words:
        here = list(_corpora(word))
        meant += here
        if not here:
            legal = "a prefix PREFIX of PREFIX.bin and PREFIX.idx, a folder of corpora, or a pattern such as 'out_*'"
            problems.append(Problem(f"--input {word}", "must name a corpus, or a folder of corpora", legal))
    problems += _repetitions(meant)
    prefixes = _ordered(dict.fromkeys(each.prefix for each in meant))
    raise_problems(DataError, [*problems, *_shard_problems(prefixes)])
    return prefixes


def names(prefixes: Sequence[str]) -> str:
    """Return a text of some of the prefixes, and of the number of the others."""
    more = f" and {len(prefixes) - _NAMED} more" if len(prefixes) > _NAMED else ""
    return ", ".join(prefixes[:_NAMED]) + more


def _corpora(word: str) -> Iterator[_NamedCorpus]:
    ending = Path(word).suffix if _ENDING.search(word) else ""
    if _is_corpus(word) or is_remote(word):
        yield _NamedCorpus(word, "")
    elif os.path.isdir(word):
        found = sorted(_without_masks(path.removesuffix(".idx") for path in glob(f"{escape(word)}/*.idx")))
        yield from (_NamedCorpus(prefix, "") for prefix in found)
    elif ending and _is_corpus(word.removesuffix(ending)) and os.path.exists(word):
        yield _NamedCorpus(word.removesuffix(ending), ending)
    elif has_magic(word):
        stems = _without_masks(_ENDING.sub("", path) for path in (*glob(word), *glob(f"{word}.idx")))
        yield from (_NamedCorpus(stem, "") for stem in sorted(stems) if _is_corpus(stem))


def _without_masks(prefixes: Iterable[str]) -> set[str]:
    """Return the prefixes without those of the others' masks, which go with their corpora."""
    found = set(prefixes)
    return found - {loss_mask_prefix(prefix) for prefix in found}


def _is_corpus(prefix: str) -> bool:
    """Return True if there is a corpus, or half of one, which is an error when it is opened."""
    return idx_path(prefix).is_file() or bin_path(prefix).is_file()


def _repetitions(meant: Sequence[_NamedCorpus]) -> list[Problem]:
    """Return the problem of repeated corpora; the three files of one corpus, which `out_*` matches, count as one."""
    times = Counter((os.path.realpath(idx_path(each.prefix)), each.ending) for each in meant)
    as_files = {path for path, ending in times if ending}
    twice = {path for (path, ending), count in times.items() if count > 1 or (not ending and path in as_files)}
    found = dict.fromkeys(each.prefix for each in meant if os.path.realpath(idx_path(each.prefix)) in twice)
    if not found:
        return []
    rule = "a corpus is given once; a larger part of it in training is a matter of --data-path's weights"
    return [Problem(f"--input {names(list(found))}", rule, "every corpus once")]


def _ordered(prefixes: Sequence[str] | dict[str, None]) -> tuple[str, ...]:
    """Order the prefixes, every family at the position of its first shard."""
    keyed = {prefix: parse_shard(prefix) for prefix in prefixes}
    order: dict[ShardNames | str, int] = {}
    for prefix, shard in keyed.items():
        order.setdefault(shard.family if shard else prefix, len(order))

    def sort_key(prefix: str) -> tuple[int, int]:
        shard = keyed[prefix]
        return order[shard.family if shard else prefix], shard.number if shard else 0

    return tuple(sorted(keyed, key=sort_key))


def _shard_problems(prefixes: Sequence[str]) -> list[Problem]:
    families: dict[ShardNames, list[ShardName]] = {}
    for shard in filter(None, map(parse_shard, prefixes)):
        families.setdefault(shard.family, []).append(shard)
    return [problem for shards in families.values() for problem in _family_problems(shards)]


def _family_problems(shards: Sequence[ShardName]) -> list[Problem]:
    """Return the problems of the shards of one family."""
    counts = sorted({shard.num_shards for shard in shards})
    name = f"--input {shards[0].family.head}_shard_*{shards[0].family.rest}"
    if len(counts) > 1:
        listed = " and ".join(map(str, counts))
        return [Problem(f"{name}: shards of {listed}", "the shards come from one preprocessing", "the shards of one")]
    numbers = Counter(shard.number for shard in shards)
    first, count = shards[0], counts[0]
    missing = [first.sibling(number) for number in range(count) if number not in numbers]
    twice = [first.sibling(number) for number, times in numbers.items() if times > 1]
    beyond = [first.sibling(number) for number in numbers if number >= count]
    rule = f"shards 0 to {count - 1} are given, each once"
    findings = (("missing", missing), ("twice", twice), ("beyond the last", beyond))
    return [
        Problem(f"{name}: {len(found)} of {count} {what}", rule, names(found) if found is missing else "")
        for what, found in findings
        if found
    ]
