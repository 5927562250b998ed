"""From raw words to a RunConfig: every setting is checked by pydantic in one pass, all findings come out together.

`Said` is one thing the user said, on the command line or in a file, before anyone has looked at its type.  `Outcome`
is what came of it: a configuration, or the problems together with a `partial` configuration that knows the valid
settings only, so that rules between settings can still be tried (`Unknown` is raised when one reads an invalid one).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from megazero.config.fields import FieldInfo
from megazero.config.origin import Origin
from megazero.config.run import FIELDS, SECTIONS, RunConfig
from megazero.config.values import is_number, nearest
from megazero.errors import Problem


@dataclass(frozen=True)
class Said:
    """A name, its raw value, and how the user wrote it ("--lr 1e-3", "run.yaml: lr: 1e-3").

    A tuple is the words after a flag, as they stand; anything else is a value as YAML knows it.
    """

    name: str
    value: Any
    source: str
    origin: Origin = Origin.USER


_ADAPTER = TypeAdapter(RunConfig)
_INFO = {info.name: info for info in FIELDS}


class Unknown(Exception):
    """Raised on reading a setting of a partial configuration that the user gave no valid value for."""


@dataclass(frozen=True)
class Outcome:
    """config is None exactly when there are problems; partial knows the settings that are valid."""

    config: RunConfig | None
    partial: RunConfig
    problems: tuple[Problem, ...]


def validate(said: Mapping[str, Said], *, broken: Mapping[str, Problem] | None = None) -> Outcome:
    """Check settings by name (underscored); unnamed ones get their defaults, `broken` ones are known to be wrong."""
    early = {name: problem for name in said if (problem := _wrong_kind(_INFO[name], said[name]))} | dict(broken or {})
    raw: dict[str, dict[str, Any]] = {section: {} for section, _ in SECTIONS}
    for name, item in said.items():
        if name not in early:
            raw[_INFO[name].section][name] = item.value
    try:
        config = _ADAPTER.validate_python(raw)
    except ValidationError as error:
        return _with_problems(error, raw, early, said)
    if early:
        return Outcome(None, _partial(config, frozenset(early)), tuple(early.values()))
    return Outcome(config, config, ())


class _PartialSection:
    """Reads like a section, but not at the names in `unknown`."""

    def __init__(self, section: object, unknown: frozenset[str]) -> None:
        self._section = section
        self._unknown = unknown

    def __getattr__(self, name: str) -> Any:
        if name in self._unknown:
            raise Unknown(name)
        return getattr(self._section, name)


class _PartialRun:
    """Reads like a RunConfig whose sections are partial."""

    def __init__(self, config: RunConfig, unknown: frozenset[str]) -> None:
        for section, _ in SECTIONS:
            setattr(self, section, _PartialSection(getattr(config, section), unknown))


def _partial(config: RunConfig, unknown: frozenset[str]) -> RunConfig:
    return cast(RunConfig, _PartialRun(config, unknown))


def _with_problems(
    error: ValidationError, raw: dict[str, dict[str, Any]], early: dict[str, Problem], said: Mapping[str, Said]
) -> Outcome:
    found = dict(early)
    for item in error.errors():
        name = str(item["loc"][1])
        if name not in found:
            found[name] = explain(_INFO[name], said.get(name))
        # Defaults stand in for invalid values; 1 is legal for every setting that has no default.
        raw[_INFO[name].section].pop(name, None)
        if _INFO[name].required:
            raw[_INFO[name].section][name] = 1
    stand_in = _ADAPTER.validate_python(raw)
    ordered = tuple(found[name] for name in _INFO if name in found)
    return Outcome(None, _partial(stand_in, frozenset(found)), ordered)


def _wrong_kind(info: FieldInfo, said: Said) -> Problem | None:
    """What pydantic would let pass: true and false are numbers to it, and an empty text is the path '.'."""
    if isinstance(said.value, bool) and not info.can_stand_alone:
        return explain(info, said)
    values = said.value if isinstance(said.value, (list, tuple)) else (said.value,)
    if "" in values:
        return Problem(
            said.source or info.flag, f"{info.flag} has an empty value (an unset shell variable?)", info.legal
        )
    return None


def explain(info: FieldInfo, said: Said | None) -> Problem:
    """The problem of a missing (`said` is None) or invalid setting."""
    if said is None:
        preset = ", or --preset NAME" if info.section == "model" else ""
        return Problem(f"{info.flag} is missing", f"a run needs it: {info.help}", f"{info.flag} N{preset}")
    rule = f"{info.flag} is {info.legal}"
    if info.beyond and is_number(said.value):
        rule += f" ({info.beyond})"
    return Problem(said.source, rule, _nearest(info, said.value) or info.legal)


def _nearest(info: FieldInfo, value: Any) -> str:
    """The legal values next to `value`, numbers with their flag; "" where none is nearer than another."""
    flag = f"{info.flag} " if info.kind in ("int", "float") else ""
    return ", ".join(flag + item for item in nearest(info, value))
