"""Reads and writes YAML files of settings (`--config run.yaml`): a flat mapping such as `num_layers: 12`.

Keys are the flags' names with underscores (or dashes), without sections, so that a file and a command line have the
same names.  An unknown key is an error, and so is one that stands twice.  `to_yaml` writes a configuration in full, and
`from_yaml` (command_line/parse.py) reads it back to an equal one; a run saves its resolved configuration in this form.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from megazero.config.origin import Origin
from megazero.config.run import SECTIONS, RunConfig
from megazero.config.validate import Unknown
from megazero.config.values import RawValue
from megazero.errors import ConfigError, Problem
from megazero.files import read_bounded

MAX_BYTES = 1 << 20
# libyaml's writer and reader, where PyYAML has them, are ten times as fast.
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_READER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Deep nesting crashes libyaml's reader, so it gets texts with no more characters that may nest than this.
_MOST_NESTING = 600
# The first line of the file that a run saves; it marks settings that the user did not give, so that those without
# effect are reported as notices.
SAVED = "# The resolved configuration of a run, saved by megazero: all settings, also those without effect"


class _UniqueKeys(yaml.constructor.SafeConstructor):
    """A constructor that refuses a mapping with the same key twice, instead of dropping the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            name = key.replace("_", "-") if isinstance(key, str) else key
            if not isinstance(key, Hashable) or name in seen:
                finding = f"the key {key} stands twice" if isinstance(key, Hashable) else "a key is a name"
                raise yaml.constructor.ConstructorError(None, None, finding, key_node.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


class _FastLoader(_UniqueKeys, _READER):  # type: ignore[misc]  # the class is one of two
    """A loader of YAML's safe subset, for texts without aliases that nest a little."""


class _Loader(_UniqueKeys, yaml.SafeLoader):
    """A loader of YAML's safe subset, for all texts."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """Refuse deep nesting at once: the scanner looks at all open brackets for each of them, which takes hours."""
        if self.flow_level > _MOST_NESTING:
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse aliases of lists and mappings: nine lines of them can stand for a billion values."""
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias and isinstance(node, yaml.CollectionNode):
            raise yaml.composer.ComposerError(None, None, "an alias stands for one value", node.start_mark)
        return node


def read_file(path: Path) -> tuple[RawValue, ...]:
    """Return the unchecked settings in the file; raise ConfigError if it can't be read or is not a flat mapping."""
    return read_text(_text_of(path, f"--config {path}"), origin=str(path))


def read_text(text: str, *, origin: str) -> tuple[RawValue, ...]:
    """Return the unchecked settings in `text`, with values of the types that YAML gives them; raise as `read_file`."""
    content = _load(text, origin, "num_layers: 12")
    if content is None:
        return ()
    if not isinstance(content, dict):
        raise ConfigError(Problem(origin, "the file is a mapping from settings to values", "num_layers: 12"))
    problems = [problem for key, value in content.items() if (problem := _not_flat(origin, key, value))]
    if problems:
        raise ConfigError(*problems)
    kind = Origin.PROGRAM if text.startswith(SAVED) else Origin.USER
    return tuple(_raw_value(origin, str(key), value, kind) for key, value in content.items())


def read_nested(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a YAML file, which may have sections; raise ConfigError if it has none or can't be read."""
    content = _load(_text_of(path, str(path)), str(path), "zero: {...}")
    if not isinstance(content, dict):
        raise ConfigError(Problem(str(path), "the file is a mapping from names to values", "zero: {...}"))
    return {str(name): value for name, value in content.items()}


def _text_of(path: Path, given: str) -> str:
    try:
        return read_bounded(path, MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(Problem(given, f"the file can't be read: {reason}", "a YAML file")) from None


def _load(text: str, origin: str, example: str) -> Any:
    if "*" not in text and sum(map(text.count, "[{-?:")) < _MOST_NESTING:
        # Errors are those of the other reader.
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            return yaml.load(text, Loader=_FastLoader)
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(Problem(origin, f"this is not valid YAML: {_one_line(error)}", example)) from None
    except ValueError as error:  # a date with a 13th month, a whole number of thousands of digits
        raise ConfigError(Problem(origin, f"this is not valid YAML: {error}", example)) from None
    except RecursionError:
        raise ConfigError(Problem(origin, "this is not valid YAML: nested too deeply", example)) from None


def to_yaml(config: RunConfig) -> str:
    """Return a YAML text of every setting and its value, by section, below the line `SAVED`."""
    parts = [SAVED]
    for section, _ in SECTIONS:
        values = getattr(config, section)
        settings = {field.name: _plain(getattr(values, field.name)) for field in fields(values)}
        dumped = yaml.dump(settings, Dumper=_DUMPER, sort_keys=False, width=1000, allow_unicode=True)
        parts.append(f"# {section}\n{dumped}")
    return "\n".join(parts)


def to_annotated_yaml(config: RunConfig, sources: Mapping[str, str], head: Sequence[str]) -> str:
    """Return a YAML text as `to_yaml` does, with the source of each value that is no default beside it.

    config: may have settings without a valid value, which the text marks.  head: lines above the settings.
    """
    parts = [SAVED, *(f"# {line}" for line in head)]
    for section, cls in SECTIONS:
        parts.append(f"\n# {section}")
        for field in fields(cls):
            try:
                value = _plain(getattr(getattr(config, section), field.name))
            except Unknown:
                parts.append(f"# {field.name}: has no valid value")
                continue
            source = " ".join(sources.get(field.name, "").split())
            parts.append(f"{field.name}: {_in_line(value)}" + (f"  # {source}" if source else ""))
    return "\n".join(parts)


def _raw_value(origin: str, key: str, value: Any, kind: Origin) -> RawValue:
    return RawValue(key, value, f"{origin}: {key}: {_in_line(value)}", kind)


def _in_line(value: Any) -> str:
    """Return the value as YAML on one line."""
    # Most values are one of these; a file has hundreds.
    if type(value) is int:
        return str(value)
    if value is None or value is True or value is False:
        return "null" if value is None else "true" if value else "false"
    dumped = yaml.dump(value, Dumper=_DUMPER, default_flow_style=True, width=1 << 20, allow_unicode=True)
    return dumped.removesuffix("\n").removesuffix("\n...")


def _not_flat(origin: str, key: object, value: object) -> Problem | None:
    if isinstance(value, dict):
        inside = ", ".join(str(name) for name in value) or "nothing"
        return Problem(
            f"{origin}: {key}: holds {inside}", "the file is flat: settings stand at the left margin", "num_layers: 12"
        )
    return None


def _plain(value: Any) -> Any:
    """Return the value in a type of YAML's safe subset."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} (line {error.problem_mark.line + 1})"
    return " ".join(str(error).split())
