"""Reading a DeepSpeed configuration strictly: every key is honoured, accepted with a notice, or refused by name.

`read_file` gives a JSON file's mapping, `read` the *reading* of a mapping: what was said by key, in the key's type,
with everything that is wrong.  "auto" stands for megazero's own default, except on a key that has a value of this
name (partition_activations, cpu_checkpointing).  What becomes of each key is a table (keys.py); what the
values become is decided by those who take a reading: sections.py makes a configuration of the library,
run.py settings of a run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.config.choices import AUTO
from megazero.config.values import Findings, Place, Unfit, conform, unknown, violation
from megazero.dialects.deepspeed.keys import (
    ACCEPTED,
    ALIASES,
    DETAILS,
    HONOURED,
    KNOWN,
    PARAMS,
    REFUSED,
    SECTIONS,
    SWITCHED,
    SWITCHES,
)
from megazero.errors import ConfigError, Problem

# Other names of number formats.
_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in ("fp64", "fp32", "fp16", "bf16", "none", AUTO)},
        **{"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"},
    }
)


@dataclass(frozen=True)
class Heard:
    """A value in its key's type, or AUTO, and where it was said."""

    value: Any
    place: Place

    @property
    def source(self) -> str:
        return self.place.said(self.value)


@dataclass(frozen=True)
class Reading:
    """What a configuration says.

    values: honoured keys by their canonical path.  sections: sections that are there, though they may be empty.
    params: PARAMS that are there, unchecked, since what they may hold depends on the type beside them.
    """

    origin: str
    values: dict[str, Heard] = field(default_factory=dict)
    params: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    sections: set[str] = field(default_factory=set)
    findings: Findings = field(default_factory=Findings)

    def get(self, path: str, own: Any) -> Any:
        """The value of an honoured key; DeepSpeed's default when it is absent, megazero's `own` when it is "auto"."""
        heard = self.values.get(path)
        if heard is None:
            return HONOURED[path].default
        return own if _is_left_to_us(path, heard) else heard.value

    def said(self, path: str) -> Heard | None:
        """What was said at `path`; None when it is absent or left to us."""
        heard = self.values.get(path)
        return None if heard is None or _is_left_to_us(path, heard) else heard

    @property
    def place(self) -> Place:
        return Place(self.origin)


def _is_left_to_us(path: str, heard: Heard) -> bool:
    return bool(heard.value == AUTO) and AUTO not in HONOURED[path].choices


def read_file(path: Path) -> Mapping[str, Any]:
    """The mapping in a JSON file; ConfigError when it can't be read, is no JSON, or names a key twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(Problem(str(path), f"the file can't be read: {reason}", "a JSON file")) from None
    twice: list[str] = []
    try:
        content = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, twice), parse_constant=_no_number)
    except json.JSONDecodeError as error:
        rule = f"this is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise ConfigError(Problem(str(path), rule, '{"zero_optimization": {"stage": 3}}')) from None
    except _NoNumber as error:
        raise ConfigError(Problem(f"{path}: {error}", "JSON has finite numbers only", "a number")) from None
    if twice:
        raise ConfigError(*(Problem(f"{path}: {name}", "the key stands twice in one object", "once") for name in twice))
    if not isinstance(content, dict):
        raise ConfigError(Problem(str(path), "the file is an object of keys", '{"zero_optimization": {"stage": 3}}'))
    return content


def read(content: Mapping[str, Any], origin: str) -> Reading:
    """The reading of a configuration; `origin` names it in messages.  Nothing is raised: see its findings."""
    reading = Reading(origin)
    zero = content.get("zero_optimization")
    if isinstance(zero, bool):  # an old form: true is stage 1
        content = {**content, "zero_optimization": {"stage": int(zero)}}
        reading.findings.notices.append(f"{origin}: zero_optimization: taken as stage {int(zero)}")
    _walk(reading, Place(origin), "", content)
    fp16, bf16 = reading.said("fp16.enabled"), reading.said("bf16.enabled")
    if fp16 and bf16 and fp16.value and bf16.value:
        reading.findings.problems.append(
            Problem(f"{fp16.source} and {bf16.source}", "a model computes in one format", "one of the two")
        )
    return reading


class _NoNumber(ValueError):
    """NaN or an infinity in a JSON text."""


def _no_number(text: str) -> Any:
    raise _NoNumber(text)


def _unique(pairs: list[tuple[str, Any]], twice: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            twice.append(name)
        found[name] = value
    return found


def _walk(reading: Reading, place: Place, section: str, content: Mapping[str, Any]) -> None:
    """Take every key of a section; `place` is how the user wrote it, `section` its canonical path."""
    for name, value in content.items():
        where = place.key(str(name))
        path = f"{section}.{name}" if section else str(name)
        path = ALIASES.get(path, path)
        if path in SECTIONS or path in PARAMS:
            _take_section(reading, where, path, value)
        elif path in HONOURED:
            _take_value(reading, where, path, value)
        elif path in ACCEPTED:
            reading.findings.notices.append(f"{where}: accepted, without effect: {ACCEPTED[path]}")
        elif path in REFUSED:
            _take_refused(reading, where, path, value)
        elif path in SWITCHED:
            _take_switched(reading, where, path, value)
        elif path not in DETAILS:
            reading.findings.problems.append(unknown(where, value, _names_in(section)))


def _names_in(section: str) -> set[str]:
    """Names that may stand in a section, "" being the top."""
    start = f"{section}." if section else ""
    return {path.removeprefix(start).partition(".")[0] for path in KNOWN if path.startswith(start)}


def _take_section(reading: Reading, place: Place, path: str, value: Any) -> None:
    if value is None or value is False or value == AUTO:
        return
    if not isinstance(value, Mapping):
        reading.findings.problems.append(Problem(place.said(value), f"{place.path} is a mapping", "{...}"))
    elif path in PARAMS:
        reading.params[path] = value
    else:
        reading.sections.add(path)
        _walk(reading, place, path, value)


def _take_value(reading: Reading, place: Place, path: str, value: Any) -> None:
    info = HONOURED[path]
    if value is None and info.default is None:
        return
    if path.endswith(("_dtype", "_data_type")) and isinstance(value, str):
        value = _FORMATS.get(value.lower(), value)
        if value == "none":
            return
    if value != AUTO:
        try:
            value = conform(info, value)
        except Unfit:
            reading.findings.problems.append(violation(place, info, value))
            return
    heard = Heard(value, place)
    before = reading.values.setdefault(path, heard)
    if before.value != value:
        rule = f"both set {path}, to different values"
        reading.findings.problems.append(Problem(f"{before.source} and {heard.source}", rule, "one of the two"))


def _take_refused(reading: Reading, place: Place, path: str, value: Any) -> None:
    refused = REFUSED[path]
    # True is no 1 and False no 0 here, as in JSON.
    is_off = any(value == off and isinstance(value, bool) is isinstance(off, bool) for off in refused.off)
    if value is None or value == AUTO or is_off:
        return
    legal = refused.legal or f"leave out {path.rpartition('.')[2]}"
    reading.findings.problems.append(Problem(place.said(value), f"refused: {refused.reason}", legal))


def _take_switched(reading: Reading, place: Place, path: str, value: Any) -> None:
    switched = SWITCHED[path]
    if _is_on(value):
        legal = ", ".join(filter(None, (f"leave out {place.path}", switched.legal)))
        reading.findings.problems.append(Problem(place.said(value), f"refused: {switched.reason}", legal))
        return
    if switched.names and isinstance(value, Mapping):
        foreign = [name for name in value if name not in switched.names]
        reading.findings.problems.extend(unknown(place.key(str(n)), value[n], switched.names) for n in foreign)
    reading.findings.notices.append(f"{place}: accepted, without effect: it is turned off")


def _is_on(section: Any) -> bool:
    """Whether a switch is on anywhere in the section."""
    if not isinstance(section, Mapping):
        return section is True
    return any(
        _is_on(item) if isinstance(item, Mapping) else name in SWITCHES and item is True
        for name, item in section.items()
    )
