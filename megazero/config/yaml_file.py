"""`--config run.yaml`: the settings as a flat YAML mapping, `num_layers: 12`, one key a setting.

Keys are the flags' names with underscores (or dashes), without sections, so that a file and a command line say the
same things in the same words.  A key that nobody knows, or that stands twice, is an error.  `to_yaml` writes a
configuration in full, and `from_yaml` reads it back to an equal one; this is how the resolved configuration is kept
with a run.
"""

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megazero.config.origin import Origin
from megazero.config.run import SECTIONS, RunConfig
from megazero.config.validate import Said
from megazero.errors import ConfigError, Problem

# How the file begins that a run saves: settings that have no effect in it were not given for it by the user.
SAVED = "# The resolved configuration of a run, saved by megazero: all settings, also those without effect"


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe subset; a mapping that names a key twice is refused instead of losing the first."""

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


def read_file(path: Path) -> tuple[Said, ...]:
    """The settings in the file, unchecked; ConfigError when it can't be read or is not a flat mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(Problem(f"--config {path}", f"the file can't be read: {reason}", "a YAML file")) from None
    return read_text(text, origin=str(path))


def read_text(text: str, *, origin: str) -> tuple[Said, ...]:
    """The settings in `text`; names are in flag form (dashes), values as YAML gives them."""
    try:
        content = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(Problem(origin, f"this is not valid YAML: {_one_line(error)}", "num_layers: 12")) from None
    if content is None:
        return ()
    if not isinstance(content, dict):
        raise ConfigError(Problem(origin, "the file is a mapping from settings to values", "num_layers: 12"))
    problems = [problem for key, value in content.items() if (problem := _not_flat(origin, key, value))]
    if problems:
        raise ConfigError(*problems)
    kind = Origin.PROGRAM if text.startswith(SAVED) else Origin.USER
    return tuple(_said(origin, str(key), value, kind) for key, value in content.items())


def read_nested(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML file that may have sections; ConfigError when it can't be read or is no mapping.

    Numbers such as 1e-3, which YAML 1.1 takes for text, are numbers.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(Problem(str(path), f"the file can't be read: {reason}", "a YAML file")) from None
    try:
        content = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(Problem(str(path), f"this is not valid YAML: {_one_line(error)}", "zero: {...}")) from None
    if not isinstance(content, dict):
        raise ConfigError(Problem(str(path), "the file is a mapping from names to values", "zero: {...}"))
    return {str(name): _with_numbers(value) for name, value in content.items()}


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _with_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", value)
    return float(value) if is_number else value


def to_yaml(config: RunConfig) -> str:
    """Every setting with its value, section by section, below the line that marks what a run has saved."""
    parts = [SAVED]
    for section, cls in SECTIONS:
        values = getattr(config, section)
        settings = {name: _plain(getattr(values, name)) for name in cls.__dataclass_fields__}  # type: ignore[attr-defined]
        dumped = yaml.safe_dump(settings, sort_keys=False, default_flow_style=False, width=1000, allow_unicode=True)
        parts.append(f"# {section}\n{dumped}")
    return "\n".join(parts)


def _said(origin: str, key: str, value: Any, kind: Origin) -> Said:
    shown = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
    return Said(key.replace("_", "-"), value, f"{origin}: {key}: {shown}", kind)


def _not_flat(origin: str, key: object, value: object) -> Problem | None:
    if isinstance(value, dict):
        inside = ", ".join(str(name) for name in value) or "nothing"
        return Problem(
            f"{origin}: {key}: holds {inside}", "the file is flat: settings stand at the left margin", "num_layers: 12"
        )
    return None


def _plain(value: Any) -> Any:
    """A value as YAML's safe subset knows it."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} (line {error.problem_mark.line + 1})"
    return " ".join(str(error).split())
