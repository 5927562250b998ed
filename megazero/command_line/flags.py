"""Defines the flags for argparse from the descriptions of the settings, and splits a command line into raw values.

argparse splits the words and prints the help, but checks no values, because it would stop at the first error.
"""

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any

from megazero.command_line.processes import FLAG, HELP
from megazero.config.fields import FieldInfo
from megazero.config.origin import Origin
from megazero.config.presets import PRESETS, ZERO_CONFIGS
from megazero.config.run import FIELDS, SECTIONS
from megazero.config.values import RawValue
from megazero.dialects.megatron import ACCEPTED, FIXED, PUBLISHED, REFUSED, SHORTHANDS


class _Record(argparse.Action):
    """An action that records every flag in the order and spelling of the command line, with its words unchanged."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        assert option_string is not None, "there are no positional arguments"
        source = " ".join([option_string, *values])
        name = option_string.removeprefix("--")
        origin = Origin.FOREIGN if name in PUBLISHED or name in SHORTHANDS else Origin.USER
        namespace.given.append(RawValue(name, tuple(values), source, origin))


class _Help(argparse.HelpFormatter):
    """A formatter of the help that shows `--lr NUMBER`, although argparse accepts any number of words after a flag.

    The number of words is checked in `validate.parse_value`, so that it is reported together with all other problems.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=110)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Break lines at blanks only, so that a flag or "all-reduce" stays whole."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every flag: settings in groups, and flags of other projects, which the help hides."""
    parser = argparse.ArgumentParser(
        prog="megazero pretrain",
        usage=f"%(prog)s [{FLAG} N] [--config RUN.yaml] [--preset NAME] [--zero-config NAME]"
        " [--deepspeed-config FILE.json] [flags]",
        description="Flags have Megatron-LM's names.  A flag wins over the file, the file over --zero-config, that over"
        f" the preset.  {HELP}.",
        epilog="Further flags of Megatron-LM's and Megatron-DeepSpeed's launch scripts are accepted with a notice when "
        "they change nothing here, and refused with the reason when they would.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.set_defaults(given=[])
    sources = parser.add_argument_group("sources")
    _add(sources, ["--config"], "RUN.yaml", "YAML file with the same settings, num_layers: 12; may be given repeatedly")
    _add(sources, ["--preset"], "NAME", f"settings of a known model: {', '.join(PRESETS)}")
    _add(
        sources,
        ["--zero-config"],
        "NAME",
        f"ZeRO stage and activation settings of a configuration of the ZeRO paper (table 3): {', '.join(ZERO_CONFIGS)}",
    )
    _add(
        sources,
        ["--deepspeed-config"],
        "FILE.json",
        "DeepSpeed configuration, whose values count as flags; what its sections leave out has DeepSpeed's defaults",
    )
    _add(
        sources,
        ["--strict"],
        "[true|false]",
        "a setting that has no effect in this configuration is an error also where it comes from a DeepSpeed"
        " configuration or is a flag that published Megatron scripts carry, which earns a notice otherwise (default:"
        " off)",
    )
    groups = {section: parser.add_argument_group(section, _headline(cls)) for section, cls in SECTIONS}
    for info in FIELDS:
        _add(groups[info.section], spellings(info), _metavar(info), _help_text(info))
    foreign = [f"--{name}" for name in (*SHORTHANDS, *ACCEPTED, *FIXED, *REFUSED)]
    parser.add_argument(*foreign, nargs="*", action=_Record, dest="given", help=argparse.SUPPRESS)
    return parser


def _add(group: Any, flags: list[str], metavar: str, text: str) -> None:
    group.add_argument(*flags, nargs="*", action=_Record, dest="given", metavar=metavar, help=text.replace("%", "%%"))


def _headline(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def spellings(info: FieldInfo) -> list[str]:
    flags = [info.flag, *(f"--{alias}" for alias in info.aliases)]
    if info.can_stand_alone and info.default is True:
        flags.append(f"--no-{info.flag.removeprefix('--')}")
    return flags


def _metavar(info: FieldInfo) -> str:
    if info.kind == "switch":
        return "[" + "|".join(info.choices) + "]"
    if info.choices:
        return "{" + ",".join(info.choices) + "}"
    names = {"int": "N", "float": "X", "bool": "[true|false]", "str": "TEXT", "path": "PATH", "list": "TEXT ..."}
    return names[info.kind]


def _help_text(info: FieldInfo) -> str:
    unit = f" [{info.unit}]" if info.unit else ""
    if info.required:
        return f"{info.help}{unit} (required)"
    return f"{info.help}{unit} (default: {_default_text(info)})"


def _default_text(info: FieldInfo) -> str:
    if isinstance(info.default, bool):
        return "on" if info.default else "off"
    if info.default is None or info.default == ():
        return "none"
    return f"{info.default:.12g}" if info.kind == "float" else str(info.default)


def split_words(argv: Sequence[str]) -> tuple[list[RawValue], list[str]]:
    """Return (flags with their words, words that belong to no known flag)."""
    parsed, stray = build_parser().parse_known_args(_normalise(argv))
    return parsed.given, stray


def _normalise(argv: Sequence[str]) -> list[str]:
    """Replace underscores in flags by dashes, and join `--lr -1e-5` by "=", as argparse would take -1e-5 for a flag."""
    words: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            words.append(name.replace("_", "-") + equals + value)
        elif word.startswith("-") and _is_number(word) and _awaits_value(words):
            words[-1] += "=" + word
        else:
            words.append(word)
    return words


def _awaits_value(words: Sequence[str]) -> bool:
    return bool(words) and words[-1].startswith("--") and "=" not in words[-1]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
