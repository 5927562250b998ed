"""Param groups by pattern: what a user sets for the parameters whose names a pattern matches.

A pattern is the shell's (`*.bias`, `layers.[01].*`) and covers a whole name; a parameter belongs to the first group
whose pattern matches its name.  What a group leaves out is as without it, so that biases and norms stay without weight
decay.
"""

import difflib
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT
from megazero.errors import Problem


@dataclass(frozen=True, config=STRICT)
class ParamGroup:
    """A pattern of parameters' names, and what these have of their own; None: what they have without the group.

    lr: the learning rate after warm-up; at every step it is the same multiple of the others' rate.
    """

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None


def place_of(groups: Sequence[ParamGroup], name: str) -> int | None:
    """Return the place of the first group whose pattern matches a parameter's name; None if there is none."""
    return next((place for place, group in enumerate(groups) if fnmatchcase(name, group.pattern)), None)


def unmatched(groups: Sequence[ParamGroup], names: Collection[str], setting: str) -> Iterator[Problem]:
    """Yield a problem for each group to which no parameter belongs.

    names: those of the trained parameters of the whole model.  setting: as messages name it.
    """
    used = {place_of(groups, name) for name in names}
    for place, group in enumerate(groups):
        if place in used:
            continue
        taken = [name for name in names if fnmatchcase(name, group.pattern)]
        given = f"{setting}: {group.pattern}"
        if taken:
            first = groups[place_of(groups, taken[0]) or 0].pattern
            rule = f"the first pattern that matches wins, and {first} stands before it"
            yield Problem(given, rule, f"{group.pattern} before {first}")
        else:
            near = sorted(names, key=lambda name: -_likeness(group.pattern, name))[:3]  # stable: in their order
            legal = ", ".join(near) + (", ..." if len(names) > 3 else "")
            yield Problem(given, "a pattern matches the whole name of some parameter that is trained", legal)


def _likeness(pattern: str, name: str) -> float:
    """Return how much of what a pattern spells out is like some part of a name, 1 for all of it."""
    literal, parts = pattern.strip("*.?"), name.split(".")
    width = min(literal.count(".") + 1, len(parts))
    windows = (".".join(parts[start : start + width]) for start in range(len(parts) - width + 1))
    return max(difflib.SequenceMatcher(None, literal, window).ratio() for window in windows)
