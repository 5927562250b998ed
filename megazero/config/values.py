"""One value of a file against the description of its setting: does it fit, and if not, what would.

JSON and YAML have types, so a value either is what the setting wants or it isn't; only a whole number may be written as
5e8.  `conform` gives the value in the setting's type, `violation` the Problem of one that doesn't fit.
"""

import difflib
import json
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megazero.config.fields import FieldInfo
from megazero.errors import Problem

# Names that a message lists when none of them is near.
_MANY = 20


@dataclass
class Findings:
    """What is found while a file is read: problems, and notices of one line."""

    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


class Unfit(ValueError):
    """The value is not what the setting wants."""


@dataclass(frozen=True)
class Place:
    """Where a key stands: a file (or the name of a mapping) and the dotted path in it."""

    origin: str
    path: str = ""

    def key(self, name: str) -> "Place":
        return Place(self.origin, f"{self.path}.{name}" if self.path else name)

    def said(self, value: Any) -> str:
        """The key and its value as a message shows them: "ds.json: zero_optimization.stage: 5"."""
        return f"{self}: {shown(value)}"

    def __str__(self) -> str:
        return f"{self.origin}: {self.path}" if self.path else self.origin


def shown(value: Any) -> str:
    """A value as JSON writes it, cut when it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def conform(info: FieldInfo, value: Any) -> Any:
    """`value` in the setting's type; raises Unfit."""
    if info.kind == "bool":
        if not isinstance(value, bool):
            raise Unfit
        return value
    if info.kind == "switch":
        if not isinstance(value, bool) and value != "auto":
            raise Unfit
        return value
    if info.kind == "str":
        if not isinstance(value, str) or not value or (info.choices and value not in info.choices):
            raise Unfit
        return value
    if info.kind == "pair":
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise Unfit
        return tuple(_number(info, item) for item in value)
    assert info.kind in ("int", "float"), f"{info.name}: no rule for values of kind {info.kind}"
    return _number(info, value)


def _number(info: FieldInfo, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Unfit
    if info.kind == "int" and value != int(value):
        raise Unfit
    if not all(getattr(operator, name)(value, bound) for name, bound in info.bounds):
        raise Unfit
    return int(value) if info.kind == "int" else float(value)


def violation(place: Place, info: FieldInfo, value: Any) -> Problem:
    """The problem of a value that doesn't fit at `place`."""
    name = place.path.rpartition(".")[2]
    rule = f"{place.path} is {info.legal}"
    if info.beyond and is_number(value):
        rule += f" ({info.beyond})"
    prefix = f"{name}: " if info.kind in ("int", "float") else ""
    return Problem(place.said(value), rule, ", ".join(prefix + item for item in nearest(info, value)) or info.legal)


def unknown(place: Place, value: Any, known: Iterable[str]) -> Problem:
    """The problem of a key that nobody knows; `known` are the names that may stand beside it."""
    names = sorted(known)
    name = place.path.rpartition(".")[2]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return Problem(place.said(value), "there is no key of this name", ", ".join(near or names[:_MANY]))


def nearest(info: FieldInfo, value: Any) -> tuple[str, ...]:
    """The legal values next to `value`; none where none is nearer than another (an open range, a text)."""
    if info.choices:
        near = difflib.get_close_matches(str(value), info.choices, n=1, cutoff=0.3)
        return (*near, *(choice for choice in info.choices if choice not in near))
    if info.kind == "bool":
        return ("true", "false")
    if info.kind not in ("int", "float") or not is_number(value):
        return ()
    number = float(value)
    # The integers next to an open bound are legal; no real number is the one next to it.
    beside = {"ge": 0, "le": 0} | ({"gt": 1, "lt": -1} if info.kind == "int" else {})
    closed = [(name, bound + beside[name]) for name, bound in info.bounds if name in beside]
    low = max((bound for name, bound in closed if name in ("ge", "gt")), default=-math.inf)
    high = min((bound for name, bound in closed if name in ("le", "lt")), default=math.inf)
    if info.kind == "float":
        candidates = {bound for bound in (low, high) if math.isfinite(bound)}
    else:
        candidates = {float(min(max(near, low), high)) for near in (math.floor(number), math.ceil(number))}
    legal = sorted(candidates, key=lambda candidate: abs(candidate - number))
    return tuple(f"{candidate:.12g}" for candidate in legal)


def is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
