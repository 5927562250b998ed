"""Splits a command line into flags and raw values, and writes the help of all flags.

argparse writes the help.  Words are split here, without its parser: half a thousand flags take it longer to define than
all else takes that is done to a command line.  Values are not checked, so that all problems are reported at once.
"""

import argparse
import textwrap
from collections.abc import Collection, Sequence
from typing import Any

from megazero.command_line.names import ALL_NAMES, QUESTIONS, SOURCES, spellings
from megazero.command_line.processes import FLAG, HELP
from megazero.config.engine_sections import UNLIMITED
from megazero.config.fields import FieldInfo
from megazero.config.origin import Origin
from megazero.config.presets import PRESETS, ZERO_CONFIGS
from megazero.config.run import FIELDS, SECTIONS
from megazero.config.values import RawValue
from megazero.dialects.megatron import PUBLISHED, SHORTHANDS


class _Help(argparse.HelpFormatter):
    """A formatter of the help that shows every flag with its metavar, `--lr X`, and breaks no word."""

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
    """Return the parser that writes the help, with the settings in groups; other projects' flags are not in it.

    groups: those that it has; the usage and what surrounds it is shown with all of them only.
    whole: False leaves the settings FOR_DEEPSPEED out.
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
    headlines = {section: _headline(cls) for section, cls in SECTIONS}
    targets: dict[str, Any] = {
        name: parser.add_argument_group(name, headlines.get(name)) for name in GROUPS if name in groups
    }
    for name, (metavar, text) in QUESTIONS.items():
        _add(targets.get("finding out"), [f"--{name}"], metavar, text)
    rows = {"preset": PRESETS, "zero-config": ZERO_CONFIGS}
    for name, (metavar, text) in SOURCES.items():
        listed = f"{text}: {', '.join(rows[name])}" if name in rows else text
        _add(targets.get("sources"), [f"--{name}"], metavar, listed)
    for info in FIELDS:
        if whole or info.name not in FOR_DEEPSPEED:
            _add(targets.get(info.section), spellings(info), metavar_of(info), help_text(info))
    return parser


def _add(group: Any, flags: list[str], metavar: str, text: str) -> None:
    """Add a flag to its group, unless the help leaves that out."""
    if group is not None:
        group.add_argument(*flags, nargs="*", metavar=metavar, help=text.replace("%", "%%"))


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


_KNOWN = frozenset(f"--{name}" for name in ALL_NAMES) - {FLAG}  # which a start has taken out


def split_words(argv: Sequence[str]) -> tuple[list[RawValue], list[str]]:
    """Return (flags in their order with their words unchanged, words that belong to no known flag).

    A flag has the words up to the next one, `--flag=word` that word alone; `--a_flag` is `--a-flag`.
    """
    given: list[tuple[str, list[str]]] = []
    stray: list[str] = []
    words = stray  # those that the next value joins
    for word in argv:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if word.startswith("--") and flag in _KNOWN:
            given.append((flag, [value] if equals else []))
            words = stray if equals else given[-1][1]
        elif word.startswith("-") and word != "-" and " " not in word and not _is_number(word):
            words = stray
            words.append(flag + equals + value if word.startswith("--") else word)
        else:
            words.append(word)
    return [_raw(flag, tuple(values)) for flag, values in given], stray


def _raw(flag: str, words: tuple[str, ...]) -> RawValue:
    name = flag.removeprefix("--")
    origin = Origin.FOREIGN if name in PUBLISHED or name in SHORTHANDS else Origin.USER
    return RawValue(name, words, " ".join([flag, *words]), origin)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
