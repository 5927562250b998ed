"""Builds a RunConfig from the settings that a user gave, and reports all of their problems at once.

`parse_value` turns one raw value into its setting's type, `build` makes sections of all of them.  `Outcome` is the
result: a configuration, or the problems together with a `partial` configuration that has the valid settings only, on
which rules between settings can still be checked (`Unknown` is raised when a rule reads an invalid setting).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from megazero.config.fields import FieldInfo
from megazero.config.run import FIELDS, SECTIONS, RunConfig
from megazero.config.values import InvalidValue, ParsedValue, RawValue, coerce, violation
from megazero.errors import Problem

INFO: Mapping[str, FieldInfo] = MappingProxyType({info.name: info for info in FIELDS})


class Unknown(Exception):
    """Raised when a setting without a valid value is read from a partial configuration."""


@dataclass(frozen=True)
class Outcome:
    """The result of a build; `config` is None if and only if there are problems, `partial` has the valid settings."""

    config: RunConfig | None
    partial: RunConfig
    problems: tuple[Problem, ...]


def parse_value(info: FieldInfo, raw: RawValue) -> ParsedValue | Problem:
    """Return the parsed value of the setting, or its problem; under the name `no_...` a switch's value is negated."""
    value = raw.value
    if isinstance(value, tuple) and not (info.kind == "list" and value):  # the words after a flag
        if info.can_stand_alone and not value:
            value = (True,)
        if len(value) != 1:
            count = "a value" if not value else f"one value, not {len(value)}"
            return Problem(raw.source, f"--{raw.flag_name} needs {count}", info.legal)
        value = value[0]
    try:
        value = coerce(info, value)
    except InvalidValue:
        return violation(raw.source or info.flag, info.flag, info, value)
    value = not value if raw.name == f"no_{info.name}" else value
    return ParsedValue(info.name, value, raw.source, raw.origin)


def validate(raw: Mapping[str, RawValue]) -> Outcome:
    """Return the outcome of raw values, which are given by the names of their settings."""
    parsed = {name: parse_value(INFO[name], item) for name, item in raw.items()}
    settings = {name: item for name, item in parsed.items() if isinstance(item, ParsedValue)}
    return build(settings, broken={name: item for name, item in parsed.items() if isinstance(item, Problem)})


def build(
    settings: Mapping[str, ParsedValue],
    *,
    broken: Mapping[str, Problem],
    unknown: Collection[str] = (),
) -> Outcome:
    """Return the outcome of parsed settings; every setting that is not among them has its default.

    broken: settings that are wrong.  unknown: settings that have no value because of a problem reported elsewhere.
    """
    required = [name for name, info in INFO.items() if info.required]
    absent = [name for name in required if name not in settings and name not in unknown]
    found = {name: _missing(INFO[name]) for name in absent} | dict(broken)
    invalid = frozenset((*found, *unknown))
    # Defaults stand in for invalid values; 1 is legal for every setting that has no default.
    values = {name: coerce(INFO[name], 1) for name in required}
    values |= {name: item.value for name, item in settings.items() if name not in invalid}
    sections: dict[str, Any] = {
        section: cls(
            **{info.name: values[info.name] for info in FIELDS if info.section == section and info.name in values}
        )
        for section, cls in SECTIONS
    }
    config = RunConfig(**sections)
    if not invalid:
        return Outcome(config, config, ())
    partial = cast(RunConfig, _PartialRun(config, invalid))
    return Outcome(None, partial, tuple(found[name] for name in INFO if name in found))


def _missing(info: FieldInfo) -> Problem:
    preset = ", or --preset NAME" if info.section == "model" else ""
    return Problem(f"{info.flag} is missing", f"a run needs it: {info.help}", f"{info.flag} N{preset}")


class _PartialSection:
    """A section whose settings can be read, except those in `unknown`: reading these raises Unknown."""

    def __init__(self, section: object, unknown: frozenset[str]) -> None:
        self._section = section
        self._unknown = unknown

    def __getattr__(self, name: str) -> Any:
        if name in self._unknown:
            raise Unknown(name)
        return getattr(self._section, name)


class _PartialRun:
    """A stand-in for a RunConfig, with partial sections."""

    def __init__(self, config: RunConfig, unknown: frozenset[str]) -> None:
        for section, _ in SECTIONS:
            setattr(self, section, _PartialSection(getattr(config, section), unknown))
