"""Reads a DeepSpeed configuration strictly: every key is honoured, accepted with a notice, or refused by name.

`read_file` returns a JSON file's mapping, `read` a mapping's `ParsedFile`: the values by key, in the key's type, with
all problems.  "auto" stands for megazero's own default, except on a key that has a value of this name
(partition_activations, cpu_checkpointing, the device of what is offloaded).  The tables in keys.py decide the outcome
for each key; sections.py translates the values into settings, for the library and for a run.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.config.choices import AUTO
from megazero.config.engine_sections import UNLIMITED
from megazero.config.optimizers import OPTIMIZERS
from megazero.config.values import (
    Diagnostics,
    InvalidValue,
    Location,
    as_boolean,
    coerce,
    shown,
    unknown,
    violation,
)
from megazero.dialects.deepspeed.keys import (
    ACCEPTED,
    ALIASES,
    CURRICULA,
    HONOURED,
    KNOWN,
    METRICS,
    PARAMS,
    REFUSED,
    SECTIONS,
    SWITCHED,
    SWITCHES,
)
from megazero.errors import ConfigError, Problem
from megazero.files import parse_json, read_bounded

_MAX_BYTES = 1 << 20
# JSON has no comments; keys that begin so stand for them.
_COMMENTS = ("_", "//", "#")
# {DeepSpeed's name of a number format: megazero's name}
_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in ("fp64", "fp32", "fp16", "bf16", "none", AUTO)},
        **{"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"},
    }
)


@dataclass(frozen=True)
class ParsedKey:
    """A key's value, in the key's type or AUTO, and the key's location."""

    value: Any
    location: Location

    @property
    def source(self) -> str:
        """The text of the key and its value in a message."""
        return self.location.quote(self.value)


@dataclass(frozen=True)
class ParsedFile:
    """A DeepSpeed configuration whose keys have been looked up and whose values have been checked.

    values: honoured keys by their canonical path.  sections: sections that the file has, though they may be empty.
    params: those of PARAMS that the file has, unchecked, since their legal keys depend on the type beside them.
    off: refused keys and sections that are "auto", which turns them off.  invalid: honoured keys with an illegal value.
    """

    origin: str
    values: dict[str, ParsedKey] = field(default_factory=dict)
    params: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    sections: set[str] = field(default_factory=set)
    off: list[Location] = field(default_factory=list)
    invalid: set[str] = field(default_factory=set)
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    def get(self, path: str, own: Any) -> Any:
        """Return an honoured key's value: DeepSpeed's default if it is absent, megazero's `own` if it is "auto"."""
        if path not in self.values:
            return HONOURED[path].default
        return own if self.is_automatic(path) else self.values[path].value

    def written(self, path: str) -> ParsedKey | None:
        """Return the key at `path`, or None if it is absent or "auto"."""
        return None if self.is_automatic(path) else self.values.get(path)

    def is_automatic(self, path: str) -> bool:
        """Return True if the file has the key with the value "auto", and that is no value of the key itself."""
        key = self.values.get(path)
        return key is not None and bool(key.value == AUTO) and AUTO not in HONOURED[path].choices

    def location(self, path: str = "") -> Location:
        """Return the location of a key by its canonical path, whichever spelling the file has."""
        return Location(self.origin, path)


def read_file(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a JSON file; raise ConfigError if it can't be read, is no JSON, or has a key twice."""
    try:
        text = read_bounded(path, _MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(Problem(str(path), f"the file can't be read: {reason}", "a JSON file")) from None
    twice: list[str] = []
    try:
        content = parse_json(text, object_pairs_hook=lambda pairs: _unique(pairs, twice), parse_constant=_no_number)
    except json.JSONDecodeError as error:
        rule = f"this is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise ConfigError(Problem(str(path), rule, '{"zero_optimization": {"stage": 3}}')) from None
    except _NoNumber as error:
        raise ConfigError(Problem(f"{path}: {error}", "JSON has finite numbers only", "a number")) from None
    except ValueError as error:  # nested too deeply, a whole number of thousands of digits
        raise ConfigError(Problem(str(path), f"this is not valid JSON: {error}", "a JSON file")) from None
    if twice:
        raise ConfigError(*(Problem(f"{path}: {name}", "the key stands twice in one object", "once") for name in twice))
    if not isinstance(content, dict):
        raise ConfigError(Problem(str(path), "the file is an object of keys", '{"zero_optimization": {"stage": 3}}'))
    return content


def read(content: Mapping[str, Any], origin: str) -> ParsedFile:
    """Return the parsed configuration, with its problems, of which none is raised; `origin` names it in messages."""
    file = ParsedFile(origin)
    zero = content.get("zero_optimization")
    if isinstance(zero, bool):  # an old form: true is stage 1
        content = {**content, "zero_optimization": {"stage": int(zero)}}
        file.diagnostics.notices.append(f"{origin}: zero_optimization: taken as stage {int(zero)}")
    _walk(file, Location(origin), "", content)
    fp16, bf16 = file.written("fp16.enabled"), file.written("bf16.enabled")
    if fp16 and bf16 and fp16.value and bf16.value:
        file.diagnostics.problems.append(
            Problem(f"{fp16.source} and {bf16.source}", "a model computes in one format", "one of the two")
        )
    return file


class _NoNumber(ValueError):
    """Raised for NaN or an infinity in a JSON text."""


def _no_number(text: str) -> Any:
    raise _NoNumber(text)


def _unique(pairs: list[tuple[str, Any]], twice: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            twice.append(name)
        found[name] = value
    return found


def _walk(file: ParsedFile, location: Location, section: str, content: Mapping[str, Any]) -> None:
    """Read every key of a section; `location` is the user's spelling of its path, `section` the canonical one."""
    for name, value in content.items():
        where = location.key(str(name))
        path = f"{section}.{name}" if section else str(name)
        path = ALIASES.get(path, path)
        if path in SWITCHED and not (path in SECTIONS and _is_on(value)):
            _take_switched(file, where, path, value)
        elif path in SECTIONS or path in PARAMS:
            _take_section(file, where, path, value)
        elif path in HONOURED:
            _take_value(file, where, path, value)
        elif path in ACCEPTED:
            file.diagnostics.notices.append(f"{where}: accepted, without effect: {ACCEPTED[path]}")
        elif path in REFUSED:
            _take_refused(file, where, path, value)
        elif path.startswith(f"{METRICS}."):
            rule = "refused: samples keep their order, so the one metric of a curriculum is the length of their rows"
            file.diagnostics.problems.append(Problem(str(where), rule, f"{METRICS}.seqlen_truncate"))
        elif str(name).startswith(_COMMENTS):
            file.diagnostics.notices.append(f"{where}: accepted, without effect: a comment")
        else:
            file.diagnostics.problems.append(_unknown(where, section, str(name), value))


def _unknown(location: Location, section: str, name: str, value: Any) -> Problem:
    """Return the problem of a key that is not there; legal is the path of a key of this name in another place."""
    problem = unknown(location, value, _names_in(section))
    places = {path for path in KNOWN if path.rpartition(".")[2] == name}
    if section == "optimizer":
        places = {f"optimizer.params.{name}"} if name in {"lr", *OPTIMIZERS["AdamW"].params} else set()
    elif name == "max_grad_norm":
        places = {"gradient_clipping"}
    return replace(problem, legal=", ".join(f"{path}: {shown(value)}" for path in sorted(places)) or problem.legal)


def _names_in(section: str) -> set[str]:
    """Return the names of the keys that a section may have; "" is the top level."""
    start = f"{section}." if section else ""
    return {path.removeprefix(start).partition(".")[0] for path in KNOWN if path.startswith(start)}


def _take_section(file: ParsedFile, location: Location, path: str, value: Any) -> None:
    if value == AUTO:
        file.off.append(location)
    elif value is None or value is False:
        return
    elif not isinstance(value, Mapping):
        names = [name for section, _, name in (key.rpartition(".") for key in HONOURED) if section == path]
        legal = f'{{"{names[0]}": ...}}' if names else "{...}"
        file.diagnostics.problems.append(Problem(location.quote(value), f"{location.path} is a mapping", legal))
    elif path in PARAMS:
        file.params[path] = value
    else:
        file.sections.add(path)
        _walk(file, location, path, _without_unread_metrics(path, value))


def _without_unread_metrics(path: str, section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a section without the metrics of other kinds in a curriculum that it turns off, which nothing reads."""
    curriculum, _, name = METRICS.rpartition(".")
    metrics = section.get(name)
    if path != curriculum or not isinstance(metrics, Mapping) or as_boolean(section.get("enabled", False)) is not False:
        return section
    return {**section, name: {key: value for key, value in metrics.items() if f"{METRICS}.{key}" in CURRICULA}}


def _take_value(file: ParsedFile, location: Location, path: str, value: Any) -> None:
    info = HONOURED[path]
    if value is None and info.optional:
        return
    if path.endswith(("dtype", "_data_type")) and isinstance(value, str):
        value = _FORMATS.get(value.lower().removeprefix("torch."), value)
        if value == "none":
            return
    if path == "steps_per_print" and value in (None, math.inf):
        value = UNLIMITED
    if value != AUTO:
        try:
            value = coerce(info, value)
        except InvalidValue:
            file.diagnostics.problems.append(violation(location.quote(value), location.path, info, value))
            file.invalid.add(path)
            return
    key = ParsedKey(value, location)
    before = file.values.setdefault(path, key)
    if before.value != value:
        rule = f"both set {path}, to different values"
        file.diagnostics.problems.append(Problem(f"{before.source} and {key.source}", rule, "one of the two"))


def _take_refused(file: ParsedFile, location: Location, path: str, value: Any) -> None:
    refused = REFUSED[path]
    switch = as_boolean(value)
    is_off = any(
        switch is off if isinstance(off, bool) else value == off and not isinstance(value, bool) for off in refused.off
    )
    if value == AUTO:
        file.off.append(location)
    elif value is not None and not is_off:
        legal = refused.legal or f"leave out {path.rpartition('.')[2]}"
        file.diagnostics.problems.append(Problem(location.quote(value), f"refused: {refused.reason}", legal))


def _take_switched(file: ParsedFile, location: Location, path: str, value: Any) -> None:
    switched = SWITCHED[path]
    if _is_on(value):
        legal = ", ".join(filter(None, (f"leave out {location.path}", switched.legal)))
        file.diagnostics.problems.append(Problem(location.quote(value), f"refused: {switched.reason}", legal))
        return
    if switched.names and isinstance(value, Mapping):
        foreign = [name for name in value if name not in switched.names]
        file.diagnostics.problems.extend(unknown(location.key(str(n)), value[n], switched.names) for n in foreign)
    file.diagnostics.notices.append(f"{location}: accepted, without effect: it is turned off")


def _is_on(section: Any) -> bool:
    """Return True if a switch such as `enabled` is true in the section or in a mapping within it."""
    if not isinstance(section, Mapping):
        return as_boolean(section) is True
    return any(
        _is_on(item) if isinstance(item, Mapping) else name in SWITCHES and as_boolean(item) is not False
        for name, item in section.items()
        if item is not None and item != AUTO
    )
