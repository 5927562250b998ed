"""Defines the flags for argparse from the descriptions of the settings, and splits a command line into raw values.

argparse splits the words and prints the help, but checks no values, because it would stop at the first error.
"""

import argparse
import textwrap
from collections.abc import Collection, Sequence
from typing import Any

from megazero.command_line.names import QUESTIONS, SOURCES, spellings
from megazero.command_line.processes import FLAG, HELP
from megazero.config.engine_sections import UNLIMITED
from megazero.config.fields import FieldInfo
from megazero.config.origin import Origin
from megazero.config.presets import PRESETS, ZERO_CONFIGS
from megazero.config.run import FIELDS, SECTIONS
from megazero.config.values import RawValue
from megazero.dialects.corpus_files import FILES
from megazero.dialects.megatron import ACCEPTED, FIXED, FOLLOWING, PUBLISHED, REFUSED, SHORTHANDS


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


# The groups of the help, in its order.
GROUPS = ("finding out", "sources", *(section for section, _ in SECTIONS))

# Settings that runs have because DeepSpeed's configurations have them; no other run needs a value of theirs.
FOR_DEEPSPEED = frozenset(
    (
        "allgather_partitions",
        "load_from_fp32_weights",
        "ignore_unused_parameters",
        "override_module_apply",
        "memory_efficient_linear",
        "enable_sanity_checks",
        "leaf_module_classes",
        "leaf_module_names",
        "leaf_module_name_suffixes",
        "consecutive_hysteresis",
    )
)


def build_parser(groups: Collection[str] = GROUPS, *, whole: bool = True) -> argparse.ArgumentParser:
    """Return the parser with every flag: settings in groups, and flags of other projects, which the help hides.

    groups: the groups that the help shows; the usage and what surrounds it is shown with all of them only.
    whole: False leaves the settings FOR_DEEPSPEED out of the help.
    """
    has_all = len(groups) == len(GROUPS)
    parser = argparse.ArgumentParser(
        prog="megazero pretrain",
        usage=f"%(prog)s [{FLAG} N] [--config RUN.yaml] [--preset NAME] [--zero-config NAME]"
        " [--deepspeed-config FILE.json] [flags]"
        if has_all
        else argparse.SUPPRESS,
        description="Flags have Megatron-LM's names.  A flag wins over the file, the file over --zero-config, that over"
        f" the preset.  {HELP}."
        if has_all
        else None,
        epilog="Further flags of Megatron-LM's and Megatron-DeepSpeed's launch scripts are accepted with a notice when "
        "they change nothing here, and refused with the reason when they would; --help FLAG has the fate of one."
        + "  --help all shows settings as well that only DeepSpeed's configurations need."
        * (not whole)
        if has_all
        else None,
        formatter_class=_Help,
        allow_abbrev=False,
        add_help=False,
    )
    parser.set_defaults(given=[])
    headlines = {section: _headline(cls) for section, cls in SECTIONS}
    targets: dict[str, Any] = {
        name: parser.add_argument_group(name, headlines.get(name)) for name in GROUPS if name in groups
    }
    for name, (metavar, text) in QUESTIONS.items():
        _add(targets.get("finding out"), parser, [f"--{name}"], metavar, text)
    rows = {"preset": PRESETS, "zero-config": ZERO_CONFIGS}
    for name, (metavar, text) in SOURCES.items():
        listed = f"{text}: {', '.join(rows[name])}" if name in rows else text
        _add(targets.get("sources"), parser, [f"--{name}"], metavar, listed)
    for info in FIELDS:
        group = targets.get(info.section) if whole or info.name not in FOR_DEEPSPEED else None
        _add(group, parser, spellings(info), metavar_of(info), help_text(info))
    foreign = [f"--{name}" for name in (*SHORTHANDS, *FILES, *ACCEPTED, *FIXED, *FOLLOWING, *REFUSED)]
    _add(None, parser, foreign, "", "")
    return parser


def _add(group: Any, parser: argparse.ArgumentParser, flags: list[str], metavar: str, text: str) -> None:
    """Add a flag to its group; without one, to the parser, where the help does not show it."""
    shown = argparse.SUPPRESS if group is None else text.replace("%", "%%")
    target = parser if group is None else group
    target.add_argument(*flags, nargs="*", action=_Record, dest="given", metavar=metavar, help=shown)


def _headline(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def metavar_of(info: FieldInfo) -> str:
    """Return the form of a setting's value, as the help shows it after the flag."""
    if info.kind == "switch":
        return "[" + "|".join(info.choices) + "]"
    if info.choices:
        return "{" + ",".join(info.choices) + "}"
    names = {"int": "N", "float": "X", "bool": "[true|false]", "str": "TEXT", "path": "PATH", "list": "TEXT ..."}
    return names[info.kind]


def help_text(info: FieldInfo) -> str:
    """Return the help of a setting, with its unit and its default."""
    unit = f" [{info.unit}]" if info.unit else ""
    if info.required:
        return f"{info.help}{unit} (required)"
    if info.default is None and "without it" in info.help:  # which names what holds then
        return f"{info.help}{unit}"
    return f"{info.help}{unit} (default: {_default_text(info)})"


def _default_text(info: FieldInfo) -> str:
    if isinstance(info.default, bool):
        return "on" if info.default else "off"
    if info.default is None or info.default == ():
        return "none"
    if info.default == UNLIMITED:
        return "no limit"
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
