"""The one grammar of values, by which a value that a user wrote becomes a value of its setting's type.

Flags, `--config` files, the library's mappings, JSON and YAML files and DeepSpeed configurations all pass their values
through `coerce`.  A flag's value is text, a file's has a type; the result doesn't depend on which of the two it is:

    a whole number     3, 5e8, 5.0e8 and 500_000_000, bare or quoted; not 2.5, true, "" or a number out of range
    samples, tokens    the same, and 40K, 2.5M, 300B and 1T, which are thousands, millions and so on
    a number           the same and 0.5, bare or quoted; not NaN or infinity
    true or false      true, yes, on, 1; false, no, off, 0; bare or quoted, in any case
    true, false, auto  the same and "auto"
    a text, a path     anything but ""; a bare number is its own text (split: 100); one of the choices if there are any
    texts              one text, or a list of them
    two numbers        a list of two numbers
    null               an optional setting stays unset; any other one is refused

`InvalidValue` is raised for anything else; `violation` makes the Problem that the user reads.
"""

import difflib
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.config.fields import FieldInfo
from megazero.config.origin import Origin
from megazero.errors import Problem

# The most names that a message lists when none of them resembles the given one.
_MANY = 20

# Units of whole numbers that may have a suffix.
COUNTED = ("samples", "tokens")
_FACTORS: Mapping[str, int] = MappingProxyType({"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12})

_BOOLEANS: Mapping[str, bool] = MappingProxyType(
    {word: value for value, words in ((True, "true yes on 1"), (False, "false no off 0")) for word in words.split()}
)


@dataclass(frozen=True)
class RawValue:
    """A name and its value as a user wrote them, before the value is converted to the setting's type.

    name: the setting's name with underscores, however it was spelled ("num_layers" for num-layers).  value: a tuple of
    the words after a flag, or a value of the type that YAML, JSON or Python gives it.  source: the text that the user
    wrote, "--lr 1e-3".  origin: the kind of source.
    """

    name: str
    value: Any
    source: str
    origin: Origin = Origin.USER

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name.replace("-", "_"))

    @property
    def flag_name(self) -> str:
        """The name of the flag, without the two dashes in front."""
        return self.name.replace("_", "-")


@dataclass(frozen=True)
class ParsedValue:
    """The value of the setting `name`, in its type; `source` is the text that the user wrote, `origin` its kind."""

    name: str
    value: Any
    source: str
    origin: Origin = Origin.USER


@dataclass
class Diagnostics:
    """The problems and the one-line notices that are found while settings are read or checked."""

    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


class InvalidValue(ValueError):
    """Raised for a value that is not legal for its setting."""


@dataclass(frozen=True)
class Location:
    """The place of a key: a file (or the name of a mapping) and the dotted path in it."""

    origin: str
    path: str = ""

    def key(self, name: str) -> "Location":
        """Return the location of a key below this one."""
        return Location(self.origin, f"{self.path}.{name}" if self.path else name)

    def quote(self, value: Any) -> str:
        """Return the key and its value as a message shows them: "ds.json: zero_optimization.stage: 5"."""
        return f"{self}: {shown(value)}"

    def __str__(self) -> str:
        return f"{self.origin}: {self.path}" if self.path else self.origin


def shown(value: Any) -> str:
    """Return the value as JSON writes it, cut to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def coerce(info: FieldInfo, value: Any) -> Any:
    """Return the value in the setting's type, by the grammar above; a value of that type is returned unchanged.

    Raises InvalidValue if the value is not legal.
    """
    if value is None:
        if not info.optional:
            raise InvalidValue
        return None
    if info.kind in ("bool", "switch"):
        switch = as_boolean(value)
        if switch is not None:
            return switch
        if info.kind == "switch" and value == "auto":
            return value
        raise InvalidValue
    if info.kind == "list":
        items = value if isinstance(value, (list, tuple)) else (value,)
        return tuple(_text(info, item) for item in items)
    if info.kind == "pair":
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise InvalidValue
        pairs = zip(value, info.default or (0, 0), strict=True)
        return tuple(None if item is default is None else _number(info, item) for item, default in pairs)
    if info.kind in ("int", "float"):
        return _number(info, value)
    assert info.kind in ("str", "path"), f"{info.name}: no rule for values of kind {info.kind}"
    text = _text(info, value)
    return Path(text) if info.kind == "path" else text


def as_boolean(value: Any) -> bool | None:
    """Return the truth value that `value` spells, or None if it spells none."""
    if isinstance(value, bool):
        return value
    # 1 and 0 count because DeepSpeed and launch scripts use them; 1.0 is a number and no truth value.
    is_word = isinstance(value, str) or type(value) is int
    return _BOOLEANS.get(str(value).strip().lower()) if is_word else None


def as_number(value: Any) -> int | float | None:
    """Return the finite number that `value` is or spells, or None if it is none.

    A whole number without a point or an exponent stays exact, however large it is.
    """
    if isinstance(value, str) and value.isascii():
        for convert in (int, float):
            try:
                value = convert(value)
                break
            except ValueError:
                continue
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def as_quantity(value: Any) -> int | None:
    """Return the whole number that `value` is or spells, with or without a suffix such as that of 300B; else None."""
    text = value.strip() if isinstance(value, str) else ""
    factor = _FACTORS.get(text[-1:].upper())
    number = as_number(value if factor is None else text[:-1])
    if number is None or factor is None:
        return int(number) if number is not None and number == int(number) else None
    exact = Fraction(str(number)) * factor
    return int(exact) if exact.denominator == 1 else None


def as_span(word: str, *, alone: bool = False) -> range | None:
    """Return the whole numbers from A to B of "A-B", both included; None if `word` is no such span.

    alone: True lets a number alone be the span of this number.
    """
    found = re.fullmatch(r"([0-9]+)-([0-9]+)", f"{word}-{word}" if alone and word.isdecimal() else word)
    span = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    return span if span else None


def _number(info: FieldInfo, value: Any) -> int | float:
    number = as_quantity(value) if info.kind == "int" and info.unit in COUNTED else as_number(value)
    if number is None or (info.kind == "int" and number != int(number)):
        raise InvalidValue
    if not all(getattr(operator, name)(number, bound) for name, bound in info.bounds):
        raise InvalidValue
    try:
        return int(number) if info.kind == "int" else float(number)
    except OverflowError:  # a whole number beyond the largest float
        raise InvalidValue from None


def _text(info: FieldInfo, value: Any) -> str:
    if (isinstance(value, (int, float)) and as_number(value) is not None) or isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value or "\0" in value or (info.choices and value not in info.choices):
        raise InvalidValue
    return value


def violation(given: str, name: str, info: FieldInfo, value: Any) -> Problem:
    """Return the problem of a value that is not legal.

    given: the text that the user wrote.  name: the user's name of the setting, "--num-layers" or "zero.zero_stage".
    """
    if value == "" or (isinstance(value, (list, tuple)) and "" in value):
        return Problem(given, f"{name} has an empty value (an unset shell variable?)", info.legal)
    if any("\0" in str(each) for each in (value if isinstance(value, (list, tuple)) else (value,))):
        return Problem(given, f"{name} has a NUL character, which no name of a file has", info.legal)
    rule = f"{name} is {info.legal}"
    if str(value).strip().lower().lstrip("+-") in ("nan", "inf", "infinity"):
        rule += ", and finite"
    if info.beyond and as_number(value) is not None:
        rule += f" ({info.beyond})"
    prefix = f"{name} " if name.startswith("--") else f"{name.rpartition('.')[2]}: "
    prefix = prefix if info.kind in ("int", "float") else ""
    return Problem(given, rule, ", ".join(prefix + item for item in nearest(info, value)) or info.legal)


def unknown(location: Location, value: Any, known: Iterable[str]) -> Problem:
    """Return the problem of an unknown key; `known` are the names that may stand in its place."""
    names = sorted(known)
    name = location.path.rpartition(".")[2]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    legal = near or (names if len(names) <= _MANY else ["leave it out"])
    return Problem(location.quote(value), "there is no key of this name", ", ".join(legal))


def nearest(info: FieldInfo, value: Any) -> tuple[str, ...]:
    """Return the legal values next to `value`; none if the legal values have no nearest one (an open range, a text)."""
    if info.choices:
        near = difflib.get_close_matches(str(value), info.choices, n=1, cutoff=0.3)
        return (*near, *(choice for choice in info.choices if choice not in near))
    if info.kind == "bool":
        return ("true", "false")
    number = as_number(value)
    if info.kind not in ("int", "float") or number is None:
        return ()
    # The integers next to an open bound are legal; no real number is the one next to it.
    beside = {"ge": 0, "le": 0} | ({"gt": 1, "lt": -1} if info.kind == "int" else {})
    closed = [(name, bound + beside[name]) for name, bound in info.bounds if name in beside]
    low = max((bound for name, bound in closed if name in ("ge", "gt")), default=-math.inf)
    high = min((bound for name, bound in closed if name in ("le", "lt")), default=math.inf)
    if info.kind == "float":
        candidates = {bound for bound in (low, high) if math.isfinite(bound)}
    else:
        candidates = {min(max(near, low), high) for near in (math.floor(number), math.ceil(number))}
    legal = sorted(candidates, key=lambda candidate: abs(candidate - number))
    return tuple(f"{candidate:.12g}" for candidate in legal)
