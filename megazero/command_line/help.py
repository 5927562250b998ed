"""Writes what `megazero pretrain --help [TOPIC ...]` prints: all flags, a section of them, the presets, or what
becomes of a flag.

A topic is a section's name, a flag with or without its dashes, or a key of a DeepSpeed configuration.  The answers are
made from the settings' descriptions and from the tables of other projects' flags and keys, so every known name has one.
"""

import difflib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megazero.command_line.flags import FOR_DEEPSPEED, GROUPS, build_parser, help_text, metavar_of
from megazero.command_line.names import QUESTIONS, SOURCES, spellings, suggest
from megazero.command_line.processes import FLAG, HELP
from megazero.config import derived
from megazero.config.fields import FieldInfo
from megazero.config.model import ModelConfig
from megazero.config.presets import PRESETS
from megazero.config.run import FIELDS
from megazero.config.values import shown
from megazero.dialects.corpus_files import FILES
from megazero.dialects.deepspeed import keys
from megazero.dialects.deepspeed.run import PARAMS_OF_RUN
from megazero.dialects.megatron import ACCEPTED, FIXED, FOLLOWING, INSTEAD, REFUSED, SHORTHANDS
from megazero.errors import ConfigError, Problem, raise_problems

_WIDTH = 110


def help_of(topics: Sequence[str]) -> str:
    """Return the help of the topics, a blank line between them; of the whole command line if there are none.

    A word after a flag that is no flag itself is taken for its value, so that a whole command line can be asked about.
    Raises ConfigError with a problem for each topic that is not known.
    """
    if not topics:
        return build_parser(whole=False).format_help()
    texts: list[str] = []
    problems: list[Problem] = []
    after_flag = False
    for topic in topics:
        if topic.startswith("-"):
            after_flag = True
        elif after_flag:
            continue
        found = "" if topic.startswith("-") else _section(topic)
        found = found or _paragraph(topic)
        if found:
            texts.append(found)
        else:
            problems.append(_unknown_topic(topic))
    raise_problems(ConfigError, problems)
    return "\n".join(text if text.endswith("\n") else f"{text}\n" for text in dict.fromkeys(texts))


def _section(name: str) -> str:
    """Return the help of a section, of everything for "all", or the presets; "" if there is no such section."""
    if name == "all":
        return build_parser().format_help()
    if name == "presets":
        return "\n".join(_preset(name) for name in PRESETS)
    group = name.replace("-", " ").replace("_", " ").lower()
    return build_parser([group]).format_help() if group in GROUPS else ""


def _preset(name: str) -> str:
    """Return a line with the shape and the size of a preset's model."""
    row: Mapping[str, Any] = PRESETS[name]
    model = ModelConfig(**row)
    shape = f"{model.num_layers:4} layers x {model.hidden_size:5}, {model.num_attention_heads:2} heads"
    count = derived.num_parameters(model, row["vocab_size"])
    return f"--preset {name:16}{shape}, sequences of {model.seq_length}, {count:15,} parameters"


def _paragraph(topic: str) -> str:
    """Return what becomes of a flag or of a key of a DeepSpeed configuration; "" if it is unknown."""
    name = topic.partition("=")[0].lstrip("-").replace("_", "-")
    text = _of_flag(name) if name else ""
    if not text and not topic.startswith("-"):
        text = _of_key(topic)
    return textwrap.fill(text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)


def _of_flag(name: str) -> str:
    flag = f"--{name}"
    info = next((info for info in FIELDS if flag in spellings(info)), None)
    if info is not None:
        return _of_setting(flag, info)
    if name in SHORTHANDS:
        short = SHORTHANDS[name]
        target = f"--{short.field.replace('_', '-')}"
        rest = f"; beside {target} {' or '.join(short.gives_way_to)} it adds nothing" if short.gives_way_to else ""
        return f"{flag}: short for {target} {short.value}{rest}."
    if name in FILES:
        set_by_it = ", ".join(f"--{setting.replace('_', '-')}" for setting in FILES[name].settings)
        return f"{flag} FILE: sets {set_by_it} to what is in a file of {FILES[name].form}."
    if name == FLAG.removeprefix("--"):
        return f"{HELP}."
    for table in (SOURCES, QUESTIONS):
        if name in table:
            metavar, text = table[name]
            return f"{flag} {metavar}".rstrip() + f": {text}."
    instead = f"  Write {INSTEAD[name]} instead." if name in INSTEAD else ""
    if name in ACCEPTED:
        return f"{flag}: accepted, without effect, with a notice: {ACCEPTED[name]}."
    if name in FIXED:
        own = f"{flag}: accepted, without effect, as {flag} {' or '.join(FIXED[name].values)}"
        return f"{own}; refused with other values: {FIXED[name].rule}.{instead}"
    if name in FOLLOWING:
        own = f"{flag}: accepted, without effect, with the value that follows from the settings"
        return f"{own}; refused with other values: {FOLLOWING[name].rule}."
    if name in REFUSED:
        return f"{flag}: refused: {REFUSED[name]}.{instead}"
    return ""


def _of_setting(flag: str, info: FieldInfo) -> str:
    if flag == f"--no-{info.flag.removeprefix('--')}":
        return f"{flag}: the same as {info.flag} false.  {_of_setting(info.flag, info)}"
    if flag != info.flag:
        return f"{flag}: another name of {info.flag}.  {_of_setting(info.flag, info)}"
    others = ", ".join(spelling for spelling in spellings(info) if spelling != flag)
    also = f"  Also: {others}." * bool(others)
    legal = "" if info.choices or info.kind in ("bool", "switch", "str", "path", "list") else f"  Legal: {info.legal}."
    key = "  Only configurations of DeepSpeed need it." * (info.name in FOR_DEEPSPEED)
    return f"{flag} {metavar_of(info)} (section {info.section}): {help_text(info)}.{legal}{also}{key}"


def _of_key(path: str) -> str:
    """Return what becomes of a key of a DeepSpeed configuration, in the spelling that the file has."""
    head, _, rest = path.partition(".")
    head = keys.ALIASES.get(head, head)
    canonical = f"{head}.{rest}" if rest else head
    canonical = keys.ALIASES.get(canonical, canonical)
    also = f", another name of {canonical}" * (canonical != path)
    if "." not in path and not any(_answers(canonical)):
        inside = [known for known in keys.KNOWN | keys.SECTIONS if known.rpartition(".")[2] == path]
        return "  ".join(map(_of_key, sorted(inside)))
    text = next(_answers(canonical), "")
    return f"{path}, a key of --deepspeed-config{also}: {text}." if text else ""


def _answers(path: str) -> Iterator[str]:
    """Yield what becomes of a key; the first answer counts."""
    if path in keys.HONOURED:
        info = keys.HONOURED[path]
        owners = {**_flags_of_keys(), **_flags_of_batch()}
        sets = f"honoured; it sets {owners[path]}" if path in owners else "honoured"
        default = f"; DeepSpeed's default is {shown(info.default)}" if info.default is not None else ""
        yield f"{sets}; {info.legal}{default}"
    if path in keys.ACCEPTED:
        yield f"accepted, without effect, with a notice: {keys.ACCEPTED[path]}"
    if path in keys.REFUSED:
        refused = keys.REFUSED[path]
        off = f"; it may be {' or '.join(map(shown, refused.off))}, which turns it off"
        yield f"refused: {refused.reason}{off}"
    if path in keys.SWITCHED:
        switched = keys.SWITCHED[path]
        yield f"refused where it is enabled: {switched.reason}{f'; {switched.legal}' if switched.legal else ''}"
    if path in PARAMS_OF_RUN:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in PARAMS_OF_RUN[path])
        yield f"honoured; it sets {named}"
    if path in keys.SECTIONS or path in keys.PARAMS:
        inside = sorted(known.removeprefix(f"{path}.") for known in keys.KNOWN if known.startswith(f"{path}."))
        yield (
            f"a section, with {', '.join(inside)}" if inside else "a section, whose keys follow from the type beside it"
        )


def _flags_of_keys() -> dict[str, str]:
    """Return the flag of a run by the DeepSpeed key that sets it."""
    tables = (keys.ZERO_KEYS, keys.ACTIVATION_KEYS, keys.PRECISION_KEYS)
    return {path: f"--{field.replace('_', '-')}" for table in tables for field, path in table.items()}


def _flags_of_batch() -> dict[str, str]:
    return {path: f"--{field.replace('_', '-')}" for field, path in keys.BATCH_KEYS.items()}


def _unknown_topic(topic: str) -> Problem:
    name = topic.partition("=")[0].lstrip("-")
    paths = keys.KNOWN if "." in name else {word for path in keys.KNOWN for word in path.split(".")}
    near = suggest(name) or ", ".join(difflib.get_close_matches(name, sorted(paths), n=1, cutoff=0.75))
    sections = ", ".join(f"--help {group.replace(' ', '-')}" for group in GROUPS)
    rule = "a topic of the help is a section, a flag, or a key of a DeepSpeed configuration"
    return Problem(f"--help {topic}", rule, near or f"--help, --help all, --help presets, {sections}")
