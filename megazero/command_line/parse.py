"""Reads the command line, which has one flag for each setting, made from the setting's description.

Order of precedence: flags (and `--deepspeed-config ds.json`, whose values count as flags), then `--config run.yaml`,
then `--zero-config C4`, then `--preset gpt2-124m`, then defaults.  `flags.py` splits the words, and
`megazero.config.values` turns words and files' values into the settings' types.  The two libraries that would do both
at once were tried first: tyro and jsonargparse list unknown flags together, but stop at the first value that doesn't
fit its type, and don't report unknown flags beside it.  Neither has a place for flags that are known and refused, or
known and without effect here (dialects/megatron.py), and each has its own grammar of values, which a configuration of
the library would not share.  Here all problems are collected, and reported at once.
"""

import difflib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.command_line.flags import split_words
from megazero.command_line.names import QUESTIONS, SETTINGS, SOURCES, suggest
from megazero.config.fields import FieldInfo
from megazero.config.origin import Origin
from megazero.config.presets import PRESETS, ZERO_CONFIGS
from megazero.config.run import FIELDS, RunConfig
from megazero.config.validate import INFO, Outcome, Unknown, build, parse_value
from megazero.config.values import ParsedValue, RawValue, as_boolean, as_number, coerce
from megazero.config.yaml_file import read_file, read_text
from megazero.dialects.corpus_files import FILES, read_corpora
from megazero.dialects.deepspeed.reading import ParsedFile
from megazero.dialects.deepspeed.reading import read as read_deepspeed
from megazero.dialects.deepspeed.reading import read_file as read_deepspeed_file
from megazero.dialects.deepspeed.run import complete, replaced_loss_scale, translate_for_run
from megazero.dialects.deepspeed.run import notices as deepspeed_notices
from megazero.dialects.megatron import (
    ACCEPTED,
    FIXED,
    FOLLOWING,
    FROM_VOCAB_FILE,
    IMPLIED,
    INSTEAD,
    NAMED,
    NO_TOKENIZER,
    OTHER_VALUES,
    REFUSED,
    SHORTHANDS,
    TOKENIZERS,
)
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.rules import moot
from megazero.rules import run as rules

# The most legal names that a message lists; of more, those near to the one that was given.
_MOST_LISTED = 10
# Flags that name further sources of settings, with the form in which each is written.
_SOURCES: Mapping[str, str] = MappingProxyType(
    {
        **{
            name: f"--{name} {metavar}" for name, (metavar, _) in SOURCES.items() if metavar.isupper() or "." in metavar
        },
        "preset": f"--preset {', '.join(PRESETS)}",
        "zero-config": f"--zero-config {', --zero-config '.join(ZERO_CONFIGS)}",
    }
)

_STRICT = "strict"


@dataclass(frozen=True)
class ParsedRun:
    """A valid configuration, and one-line notices about flags without effect and about automatic keys."""

    config: RunConfig
    notices: tuple[str, ...]


@dataclass
class _Gathered:
    """The settings of all sources, which are added one after the other, the weakest first.

    settings: valid values by name, in the setting's type.  broken: problems of settings whose strongest source has an
    illegal value.  unknown: settings without a value because of one of the problems.  problems: all other problems.
    following: flags that are checked against the settings once these are complete.
    """

    settings: dict[str, ParsedValue] = field(default_factory=dict)
    broken: dict[str, Problem] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    following: list[RawValue] = field(default_factory=list)

    def put(self, name: str, parsed: ParsedValue | Problem) -> None:
        """Replace a weaker source's value of a setting, or its problem, by this one."""
        self.settings.pop(name, None)
        self.broken.pop(name, None)
        if isinstance(parsed, Problem):
            self.broken[name] = parsed
        else:
            self.settings[name] = parsed

    def put_unknown(self, problems: Sequence[Problem]) -> None:
        """Add problems of names that are none; what the nearest flag would have set is not reported as missing too."""
        self.problems.extend(problems)
        nearest = {problem.legal.partition(",")[0] for problem in problems}
        self.unknown |= {info.name for info in FIELDS if info.flag in nearest}

    def outcome(self) -> Outcome:
        """Return the configuration that the settings make, and their problems."""
        return build(self.settings, broken=self.broken, unknown=self.unknown - self.settings.keys())


@dataclass(frozen=True)
class ResolvedRun:
    """The result of all sources of a command line, with or without problems.

    config: its settings; reading one that has no valid value raises Unknown.  sources: the text that gave each setting
    its value, by name; settings that are missing have their defaults.
    """

    config: RunConfig
    sources: Mapping[str, str]
    problems: tuple[Problem, ...]
    notices: tuple[str, ...]


def parse(argv: Sequence[str] | None = None, *, world_size: int | None = None) -> ParsedRun:
    """Read flags (sys.argv's by default) and the files they name.

    Raises ConfigError with all problems.  When settings are invalid and `world_size` is given, the rules between valid
    ones are checked as well; a configuration without problems is left to `rules.check`, which the caller runs together
    with its other checks.  If `world_size` is given, the rules' advice is added to the notices.
    """
    resolved = resolve(argv, world_size=world_size)
    raise_problems(ConfigError, resolved.problems)
    return ParsedRun(resolved.config, resolved.notices)


def resolve(argv: Sequence[str] | None = None, *, world_size: int | None = None) -> ResolvedRun:
    """Read what `parse` reads, and return the problems instead of raising them."""
    words, stray = split_words(sys.argv[1:] if argv is None else argv)
    gathered = _Gathered()
    gathered.put_unknown([*_unexpected(stray)])
    gathered.problems.extend(_nameless_sources(words))
    _take_rows(gathered, words, "preset", PRESETS)
    _take_rows(gathered, words, "zero-config", ZERO_CONFIGS)
    for path in _values(words, "config"):
        _take_file(gathered, Path(path))
    strict = _is_strict(gathered, words)
    flags = [word for word in words if word.flag_name not in (*_SOURCES, _STRICT)]
    deepspeed = _take_flags(gathered, flags, _values(words, "deepspeed-config"), world_size or 1)
    if not any(word.flag_name == "tokenizer-type" for word in flags):
        _imply_tokenizer(gathered)
    outcome = gathered.outcome()
    for item in gathered.following:
        _check_following(gathered, item, outcome.partial)
    idle = moot.of_a_run(outcome.partial, [*gathered.settings.values()], world_size=world_size, strict=strict)
    problems = [*gathered.problems, *outcome.problems, *idle.problems]
    if problems and world_size is not None:
        problems.extend(rules.check(outcome.partial, world_size))
    notices = [*gathered.notices, *idle.notices]
    if not problems:
        config = _valid(outcome)
        became = () if deepspeed is None else deepspeed_notices(deepspeed, config, world_size)
        advice = () if world_size is None else rules.advice(config, world_size)
        notices = [*gathered.notices, *became, *idle.notices, *advice]
    sources = {name: item.source for name, item in gathered.settings.items()}
    return ResolvedRun(outcome.partial, sources, tuple(problems), tuple(notices))


def from_yaml(text: str, *, origin: str = "configuration") -> RunConfig:
    """Return the configuration that `to_yaml` wrote; raise ConfigError with all problems."""
    gathered = _Gathered()
    _take(gathered, read_text(text, origin=origin))
    outcome = gathered.outcome()
    raise_problems(ConfigError, [*gathered.problems, *outcome.problems])
    return _valid(outcome)


def _valid(outcome: Outcome) -> RunConfig:
    assert outcome.config is not None, "an outcome without problems has a configuration"
    return outcome.config


def _unexpected(stray: Sequence[str]) -> Iterable[Problem]:
    """Yield a problem for every unknown flag, and one for all words that follow no flag."""
    loose = []
    in_unknown = False
    for word in stray:
        if word.startswith("--") and len(word) > 2:
            in_unknown = True
            yield _unknown(word.partition("=")[0].removeprefix("--"), word)
        elif word.startswith("-") and len(word) > 1 and word[1].isalpha():
            in_unknown = True
            name = word.partition("=")[0].removeprefix("-")
            yield Problem(word, "a flag begins with two dashes", suggest(name) or f"--{name}")
        elif not in_unknown:
            loose.append(word)
    if loose:
        yield Problem(" ".join(loose), "a word belongs to a flag, and these follow none", "--flag VALUE")


def _nameless_sources(words: Iterable[RawValue]) -> Iterable[Problem]:
    for word in words:
        if word.flag_name in _SOURCES and not word.value:
            yield Problem(word.source, f"--{word.flag_name} needs a value", _SOURCES[word.flag_name])


def _values(words: Iterable[RawValue], name: str) -> list[str]:
    return [value for word in words if word.flag_name == name for value in word.value]


def _is_strict(gathered: _Gathered, words: Iterable[RawValue]) -> bool:
    """Return True if the last --strict is true; a value that is neither true nor false is added as a problem."""
    switches = [_switch(gathered, word) for word in words if word.flag_name == _STRICT]
    return bool(switches and switches[-1])


def _switch(gathered: _Gathered, item: RawValue) -> bool | None:
    """Return a flag's truth value, True if no value follows it; None if it has another value, which is a problem."""
    words = item.value if isinstance(item.value, tuple) else (item.value,)
    switch = True if not words else as_boolean(words[0]) if len(words) == 1 else None
    if switch is None:
        flag = f"--{item.flag_name}"
        gathered.problems.append(Problem(item.source, f"{flag} is true or false", flag))
    return switch


def _take_rows(
    gathered: _Gathered, words: Iterable[RawValue], source: str, rows: Mapping[str, Mapping[str, Any]]
) -> None:
    """Add the settings of the rows that `words` name by the flag `source`."""
    for name in _values(words, source):
        if name not in rows:
            near = difflib.get_close_matches(name, rows, n=3, cutoff=0.3) if len(rows) > _MOST_LISTED else ()
            legal = ", ".join(near or rows)
            gathered.problems.append(Problem(f"--{source} {name}", f"there is no {source} of this name", legal))
            continue
        for key, value in rows[name].items():
            gathered.put(key, ParsedValue(key, value, f"--{source} {name}: {key} {value}", Origin.PROGRAM))


def _take_file(gathered: _Gathered, path: Path) -> None:
    try:
        content = read_file(path)
    except ConfigError as error:
        gathered.problems.extend(error.problems)
        return
    _take(gathered, content)


def _take_flags(
    gathered: _Gathered, flags: Sequence[RawValue], names: Sequence[str], world_size: int
) -> ParsedFile | None:
    """Add the flags and the settings of the DeepSpeed configuration in `names`, which have equal precedence.

    Returns the DeepSpeed configuration, or None if there is none.
    """
    if len(names) > 1:
        given = " ".join(f"--deepspeed-config {name}" for name in names)
        gathered.problems.append(Problem(given, "a run has one DeepSpeed configuration", "one of them"))
    try:
        content = read_deepspeed_file(Path(names[0])) if len(names) == 1 else None
    except ConfigError as error:
        gathered.problems.extend(error.problems)
        content = None
    if content is None:
        _take(gathered, flags)
        return None
    without = _Gathered(dict(gathered.settings))
    _take(without, flags)
    precision = without.settings.get("precision")
    file = read_deepspeed(content, names[0])
    translation = translate_for_run(file, fp16_requested=precision is not None and precision.value == "fp16")
    for name in translation.unknown:  # a weaker source's value must not replace an invalid one
        gathered.settings.pop(name, None)
    scale = without.settings.get("loss_scale")
    if scale is not None and (notice := replaced_loss_scale(translation, scale)):
        gathered.settings.pop("loss_scale", None)
        flags = [word for word in flags if word.name != "loss_scale"]
        gathered.notices.append(notice)
    _take(gathered, [*translation.written, *flags])
    translation.unknown |= gathered.broken.keys()
    data_parallel_size = max(world_size // _model_parallel_size(gathered.settings), 1)
    gathered.problems.extend(complete(translation, gathered.settings, data_parallel_size=data_parallel_size))
    gathered.problems.extend(file.diagnostics.problems)
    gathered.notices.extend(file.diagnostics.notices)
    gathered.unknown |= translation.unknown
    return file


def _model_parallel_size(settings: Mapping[str, ParsedValue]) -> int:
    """Return the number of processes that hold one copy of the model, from those of its settings that are valid."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return math.prod(settings[name].value for name in names if name in settings)


def _take(gathered: _Gathered, raw: Sequence[RawValue]) -> None:
    """Add one source: its settings replace those of weaker sources; foreign names become notices or problems."""
    here: dict[str, RawValue] = {}
    shorthands = []
    for item in map(_with_own_value, _with_own_tokenizer(gathered, _with_listed_corpora(gathered, raw))):
        name = item.flag_name
        if name in SETTINGS:
            _take_setting(gathered, here, SETTINGS[name], item)
        elif name in SHORTHANDS:
            shorthands.append(item)
        else:
            _take_foreign(gathered, item)
    for name, item in here.items():
        gathered.put(name, parse_value(INFO[name], item))
    for item in sorted(shorthands, key=lambda item: bool(SHORTHANDS[item.flag_name].gives_way_to)):
        _take_shorthand(gathered, here, item)
    spelled = {"", *(item.flag_name for item in here.values())}
    for item in here.values():
        implied = IMPLIED.get(item.flag_name)
        if implied is None or implied.beside not in spelled:
            continue
        if implied.field not in gathered.settings.keys() | gathered.broken.keys():
            value = coerce(INFO[implied.field], implied.value)
            gathered.put(implied.field, ParsedValue(implied.field, value, item.source, item.origin))


def _with_listed_corpora(gathered: _Gathered, raw: Iterable[RawValue]) -> list[RawValue]:
    """Return one source with the settings in files that list corpora in place of the flags that name these."""
    items: list[RawValue] = []
    for item in raw:
        if item.flag_name not in FILES:
            items.append(item)
            continue
        try:
            items.extend(read_corpora(item))
        except ConfigError as error:
            gathered.problems.extend(error.problems)
            gathered.unknown.update(FILES[item.flag_name].settings)
    return items


def _with_own_tokenizer(gathered: _Gathered, raw: Sequence[RawValue]) -> list[RawValue]:
    """Return one source with megazero's name of the type of tokenizer; with a notice where that is another."""
    items: list[RawValue] = []
    types = [_only_word(item) for item in raw if item.name == "tokenizer_type"]
    for item in raw:
        own = TOKENIZERS.get(_only_word(item)) if item.name == "tokenizer_type" else None
        if own is not None:
            gathered.notices.append(f"{item.source}: taken as --tokenizer-type {own}")
            item = replace(item, value=own)
        elif item.name == "vocab_file" and FROM_VOCAB_FILE in types:
            item = replace(item, name="tokenizer_model")
        elif item.name == "tokenizer_type" and _only_word(item) == NO_TOKENIZER:
            rule = "without a tokenizer ids have no text, and --vocab-size counts all of them"
            gathered.notices.append(f"{item.source}: accepted, without effect: {rule}")
            continue
        items.append(item)
    return items


def _with_own_value(item: RawValue) -> RawValue:
    """Return a setting's value with megazero's name of it."""
    word = _only_word(item)
    if (item.flag_name, word) in NAMED:
        return replace(item, name=NAMED[item.flag_name, word], value="true")
    own = OTHER_VALUES.get(item.name, {}).get(word)
    if item.name == "split" and len(word) > 2 and word[0] == word[-1] == "'":
        own = word[1:-1]  # scripts that keep flags in an array pass its quotes on
    return item if own is None else replace(item, value=own)


def _imply_tokenizer(gathered: _Gathered) -> None:
    """Add GPT-2's tokenizer where both of its files are given and no type is, as Megatron-LM's examples do."""
    files = [gathered.settings.get(name) for name in ("vocab_file", "merge_file")]
    given = " ".join(item.source for item in files if item is not None)
    if None in files or "tokenizer_type" in gathered.settings.keys() | gathered.broken.keys():
        return
    gathered.put("tokenizer_type", ParsedValue("tokenizer_type", "GPT2BPETokenizer", given, Origin.FOREIGN))
    gathered.notices.append(f"{given}: taken as --tokenizer-type GPT2BPETokenizer")


def _only_word(item: RawValue) -> str:
    """Return the one word that follows a flag, or a file's value, as text; "" for several words or none."""
    words = item.value if isinstance(item.value, (tuple, list)) else (item.value,)
    return str(words[0]) if len(words) == 1 else ""


def _take_setting(gathered: _Gathered, here: dict[str, RawValue], info: FieldInfo, item: RawValue) -> None:
    """Add a setting to `here`, which holds the settings of the same source."""
    before = here.get(info.name)
    here[info.name] = item
    if before is None or _same(info, before, item):
        return
    # Scripts repeat a flag to override it, which is legal; two spellings with different values are taken for a mistake.
    if _flag_of(before) != _flag_of(item):
        gathered.problems.append(_clash(before.source, item.source, info.flag))
    else:
        gathered.notices.append(f"{item.source}: given last, so it counts in place of {before.source}")


def _flag_of(item: RawValue) -> str:
    return item.source.split()[0]


def _same(info: FieldInfo, first: RawValue, second: RawValue) -> bool:
    """Return True if two raw values mean the same, such as 2 in a file and "2" on a command line."""
    parsed = [parse_value(info, item) for item in (first, second)]
    values = [item.value for item in parsed if isinstance(item, ParsedValue)]
    return bool(values[0] == values[1] if len(values) == 2 else first.value == second.value)


def _clash(first: str, second: str, flag: str) -> Problem:
    return Problem(f"{first} and {second}", f"both set {flag}, to different values", "one of the two")


def _take_shorthand(gathered: _Gathered, here: dict[str, RawValue], item: RawValue) -> None:
    """Set the setting that the shorthand stands for; `here` holds the settings of the same source, which may clash."""
    flag = f"--{item.flag_name}"
    if not _switch(gathered, item):
        return
    short = SHORTHANDS[item.flag_name]
    info = INFO[short.field]
    value, before = coerce(info, short.value), gathered.settings.get(info.name)
    if before is not None and before.value in [coerce(info, word) for word in short.gives_way_to]:
        gathered.notices.append(f"{flag}: covered by {before.source}")
        return
    if info.name in here and info.name in gathered.broken:
        return
    if info.name in here and before is not None and before.value != value:
        gathered.problems.append(_clash(before.source, item.source, info.flag))
    here[info.name] = item
    gathered.put(info.name, ParsedValue(info.name, value, item.source, item.origin))
    if short.gives_way_to:
        gathered.notices.append(f"{flag}: taken as {info.flag} {short.value}")


def _take_foreign(gathered: _Gathered, item: RawValue) -> None:
    """Add the notice or the problem of a name that is not a setting."""
    name = item.flag_name
    if name in ACCEPTED:
        gathered.notices.append(f"--{name}: accepted, without effect: {ACCEPTED[name]}")
    elif name in FIXED:
        _take_fixed(gathered, item)
    elif name in FOLLOWING:
        gathered.following.append(item)
    elif name == _STRICT:
        gathered.problems.append(Problem(item.source, "--strict is a flag of the command line only", "--strict"))
    elif name in _SOURCES:
        rule = f"--{name} names a source of settings, on the command line only"
        gathered.problems.append(Problem(item.source, rule, _SOURCES[name]))
    elif name in QUESTIONS:
        rule = f"--{name} is no setting: it stands alone, on the command line of megazero pretrain only"
        gathered.problems.append(Problem(item.source, rule, f"leave out --{name}"))
    elif name in REFUSED:
        legal = f"{INSTEAD[name]} in place of" if name in INSTEAD else "leave out"
        gathered.problems.append(Problem(item.source, f"refused: {REFUSED[name]}", f"{legal} --{name}"))
    else:
        gathered.put_unknown([_unknown(name, item.source)])


def _check_following(gathered: _Gathered, item: RawValue, config: RunConfig) -> None:
    """Add the notice or the problem of a flag whose one legal value follows from the settings."""
    name, row = item.flag_name, FOLLOWING[item.flag_name]
    words = item.value if isinstance(item.value, (tuple, list)) else (item.value,)
    given = as_number(words[0]) if len(words) == 1 else None
    try:
        if given is not None and given == row.value(config):
            gathered.notices.append(f"{item.source}: accepted, without effect: {row.rule}")
        elif given is None or given != int(given):
            gathered.problems.append(Problem(item.source, f"--{name} needs a whole number", f"--{name} N"))
        else:
            gathered.problems.append(Problem(item.source, f"refused: {row.rule}", row.instead(config, int(given))))
    except Unknown:  # the setting that it follows from has a problem of its own
        return


def _take_fixed(gathered: _Gathered, item: RawValue) -> None:
    name, fixed = item.flag_name, FIXED[item.flag_name]
    given = item.value if isinstance(item.value, (tuple, list)) else (item.value,)
    values = [str(value).lower() if isinstance(value, bool) else str(value) for value in given]
    if len(values) == 1 and values[0].lower() in [value.lower() for value in fixed.values]:
        gathered.notices.append(f"--{name} {values[0]}: accepted, without effect: {fixed.rule}")
        return
    ours = [f"--{name} {value}" for value in fixed.values]
    legal = ", ".join(filter(None, (INSTEAD.get(name), *ours)))
    gathered.problems.append(Problem(item.source, f"refused: {fixed.rule}", legal))


def _unknown(name: str, source: str) -> Problem:
    return Problem(source, "there is no setting of this name", suggest(name) or "--help lists all")
