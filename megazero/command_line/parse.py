"""The command line: one flag for each setting, made from the settings' own descriptions.

Order of precedence: flags (and `--deepspeed-config ds.json`, whose values count as flags), then `--config run.yaml`,
then `--zero-config C4`, then `--preset gpt2-124m`, then defaults.  argparse splits the words and prints `--help`;
pydantic checks all values in one pass at the end.  The two libraries that would do both at once were tried first: tyro
and jsonargparse list unknown flags together, but stop at the first value that doesn't fit its type, and don't report
unknown flags beside it.  Neither has a place for flags that are known and refused, or known and without effect here
(compat.py), and both would put a second type system beside pydantic's ranges.  So values stay raw words until
everything is gathered, and the user sees all findings at once.
"""

import difflib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.command_line.flags import spellings, split_words
from megazero.config.fields import FieldInfo
from megazero.config.origin import Origin
from megazero.config.presets import PRESETS, ZERO_CONFIGS
from megazero.config.run import FIELDS, RunConfig
from megazero.config.validate import Outcome, Said, validate
from megazero.config.values import is_number
from megazero.config.yaml_file import read_file, read_text
from megazero.dialects.deepspeed.reading import read as read_deepspeed
from megazero.dialects.deepspeed.reading import read_file as read_deepspeed_file
from megazero.dialects.deepspeed.run import adopt, complete
from megazero.dialects.megatron import ACCEPTED, FIXED, INSTEAD, REFUSED, SHORTHANDS
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.rules import moot
from megazero.rules import run as rules

# Flags that name further sources of settings, and what they want to hear.
_SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "config": "--config RUN.yaml",
        "preset": f"--preset {', --preset '.join(PRESETS)}",
        "zero-config": f"--zero-config {', --zero-config '.join(ZERO_CONFIGS)}",
        "deepspeed-config": "--deepspeed-config FILE.json",
    }
)

_STRICT = "strict"


@dataclass(frozen=True)
class ParsedRun:
    """A valid configuration, and what the user should know about flags without effect, one line each."""

    config: RunConfig
    notices: tuple[str, ...]


@dataclass
class _Gathered:
    """What has been read while sources are taken one after the other, weakest first.

    settings: by name; broken: settings with too few or too many words; problems: findings about anything else.
    """

    settings: dict[str, Said] = field(default_factory=dict)
    broken: dict[str, Problem] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def parse(argv: Sequence[str] | None = None, *, world_size: int | None = None) -> ParsedRun:
    """Read flags (sys.argv's by default) and the files they name.

    Raises ConfigError with everything that is wrong.  When settings are invalid and `world_size` is known, the rules
    between the valid ones are tried as well; a configuration without findings is left to `rules.check`, which
    the caller runs together with its other checks.  A known `world_size` adds the rules' advice to the notices.
    """
    words, stray = split_words(sys.argv[1:] if argv is None else argv)
    gathered = _Gathered()
    gathered.problems.extend(_unexpected(stray))
    gathered.problems.extend(_nameless_sources(words))
    _take_rows(gathered, words, "preset", PRESETS)
    _take_rows(gathered, words, "zero-config", ZERO_CONFIGS)
    for path in _values(words, "config"):
        _take_file(gathered, Path(path))
    strict = _is_strict(gathered, words)
    flags = [word for word in words if word.name not in (*_SOURCES, _STRICT)]
    _take_flags(gathered, flags, _values(words, "deepspeed-config"), world_size or 1)
    outcome = validate(gathered.settings, broken=gathered.broken)
    given = [moot.Given(name, item.source, item.origin) for name, item in gathered.settings.items()]
    idle = moot.of_a_run(outcome.partial, given, world_size=world_size, strict=strict)
    problems = [*gathered.problems, *outcome.problems, *idle.problems]
    if problems and world_size is not None:
        problems.extend(rules.check(outcome.partial, world_size))
    raise_problems(ConfigError, problems)
    config = _valid(outcome)
    advice = () if world_size is None else rules.advice(config, world_size)
    return ParsedRun(config, (*gathered.notices, *idle.notices, *advice))


def from_yaml(text: str, *, origin: str = "configuration") -> RunConfig:
    """The configuration that `to_yaml` wrote; ConfigError with everything that is wrong."""
    gathered = _Gathered()
    _take(gathered, read_text(text, origin=origin))
    outcome = validate(gathered.settings, broken=gathered.broken)
    raise_problems(ConfigError, [*gathered.problems, *outcome.problems])
    return _valid(outcome)


def _valid(outcome: Outcome) -> RunConfig:
    assert outcome.config is not None, "an outcome without problems has a configuration"
    return outcome.config


def _unexpected(stray: Sequence[str]) -> Iterable[Problem]:
    """One problem for every unknown flag, and one for words that follow none."""
    loose = []
    in_unknown = False
    for word in stray:
        if word.startswith("--") and len(word) > 2:
            in_unknown = True
            yield _unknown(word.partition("=")[0].removeprefix("--"), word)
        elif not in_unknown:
            loose.append(word)
    if loose:
        yield Problem(" ".join(loose), "a word belongs to a flag, and these follow none", "--flag VALUE")


def _nameless_sources(words: Iterable[Said]) -> Iterable[Problem]:
    for word in words:
        if word.name in _SOURCES and not word.value:
            yield Problem(word.source, f"--{word.name} needs a value", _SOURCES[word.name])


def _values(words: Iterable[Said], name: str) -> list[str]:
    return [value for word in words if word.name == name for value in word.value]


def _is_strict(gathered: _Gathered, words: Iterable[Said]) -> bool:
    """Whether the last --strict is true; one that is neither true nor false is a problem."""
    strict = False
    for word in words:
        if word.name == _STRICT:
            switch = _switch(word)
            if switch is None:
                gathered.problems.append(Problem(word.source, "--strict is true or false", "--strict"))
            strict = bool(switch)
    return strict


def _take_rows(gathered: _Gathered, words: Iterable[Said], source: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the named rows of settings that the words of `source` ask for."""
    for name in _values(words, source):
        if name not in rows:
            near = difflib.get_close_matches(name, rows, n=1, cutoff=0.3)
            legal = ", ".join([*near, *(row for row in rows if row not in near)])
            gathered.problems.append(Problem(f"--{source} {name}", f"there is no {source} of this name", legal))
            continue
        for key, value in rows[name].items():
            gathered.settings[key] = Said(key, value, f"--{source} {name}: {key} {value}", Origin.PROGRAM)


def _take_file(gathered: _Gathered, path: Path) -> None:
    try:
        said = read_file(path)
    except ConfigError as error:
        gathered.problems.extend(error.problems)
        return
    _take(gathered, said)


def _take_flags(gathered: _Gathered, flags: Sequence[Said], names: Sequence[str], world_size: int) -> None:
    """Add the flags, and beside them the settings of the DeepSpeed configuration in `names`, which count as flags."""
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
        return
    reading = read_deepspeed(content, names[0])
    adopted = adopt(reading, wants_fp16=_wants_fp16(gathered.settings, flags))
    _take(gathered, [*adopted.said, *flags])
    data_parallel_size = world_size // _model_parallel_size(gathered.settings)
    gathered.problems.extend(complete(adopted, gathered.settings, data_parallel_size=max(data_parallel_size, 1)))
    gathered.problems.extend(reading.findings.problems)
    gathered.notices.extend(reading.findings.notices)


def _wants_fp16(settings: Mapping[str, Said], flags: Iterable[Said]) -> bool:
    """Whether the flags ask for fp16, or the weaker sources do and the flags ask for nothing else."""
    formats = [flag.name if flag.name in SHORTHANDS else flag.value for flag in flags if _sets_precision(flag.name)]
    weaker = settings.get("precision")
    return formats[-1] in ("fp16", ("fp16",)) if formats else weaker is not None and weaker.value == "fp16"


def _sets_precision(name: str) -> bool:
    return name == "precision" or (name in SHORTHANDS and SHORTHANDS[name].field == "precision")


def _model_parallel_size(settings: Mapping[str, Said]) -> int:
    """Processes that hold one copy of the model, as far as valid settings say."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    said = [str(settings[name].value) for name in names if name in settings]
    return math.prod(int(value) for value in said if value.isdecimal() and int(value) > 0)


def _take(gathered: _Gathered, said: Sequence[Said]) -> None:
    """Add one source: settings replace those of weaker sources; foreign names become notices or problems."""
    settings = {flag.removeprefix("--"): info for info in FIELDS for flag in spellings(info)}
    here: dict[str, Said] = {}
    shorthands = []
    for item in said:
        if item.name in settings:
            _take_setting(gathered, here, settings[item.name], item)
        elif item.name in SHORTHANDS:
            shorthands.append(item)
        else:
            _take_foreign(gathered, item)
    gathered.settings.update(here)
    for item in shorthands:
        _take_shorthand(gathered, here, item)


def _take_setting(gathered: _Gathered, here: dict[str, Said], info: FieldInfo, item: Said) -> None:
    value = _one_value(info, item)
    if isinstance(value, Problem):
        gathered.broken.setdefault(info.name, value)
        return
    if item.name == f"no-{info.flag.removeprefix('--')}":
        value = {"true": "false", "false": "true", True: False, False: True}.get(value, value)
    before = here.get(info.name)
    here[info.name] = replace(item, name=info.name, value=value)
    # The same flag twice is how scripts override themselves; two spellings that disagree are a slip.
    if before is not None and _flag_of(before) != _flag_of(item) and not _same(info, before.value, value):
        gathered.problems.append(_clash(before.source, item.source, info.flag))


def _one_value(info: FieldInfo, item: Said) -> Any:
    """The raw value of a setting: the words of a list, the one word of anything else, or a Problem."""
    if not isinstance(item.value, tuple):
        return item.value
    if info.kind == "list" and item.value:
        return item.value
    if info.can_stand_alone and not item.value:
        return "true"
    if len(item.value) != 1:
        count = "a value" if not item.value else f"one value, not {len(item.value)}"
        return Problem(item.source, f"--{item.name} needs {count}", info.legal)
    return item.value[0]


def _flag_of(item: Said) -> str:
    return item.source.split()[0]


def _same(info: FieldInfo, first: Any, second: Any) -> bool:
    """Whether two raw values mean the same: a file's 2 and a command line's "2"."""
    if info.kind in ("int", "float") and is_number(first) and is_number(second):
        return math.isclose(float(first), float(second), rel_tol=1e-12)
    return str(first).lower() == str(second).lower() if info.can_stand_alone else bool(first == second)


def _clash(first: str, second: str, flag: str) -> Problem:
    return Problem(f"{first} and {second}", f"both set {flag}, to different values", "one of the two")


def _take_shorthand(gathered: _Gathered, here: dict[str, Said], item: Said) -> None:
    """Set what the shorthand stands for; `here` are the settings of the same source, which may contradict it."""
    switch = _switch(item)
    if switch is None:
        gathered.problems.append(Problem(item.source, f"--{item.name} is true or false", f"--{item.name}"))
    if not switch:
        return
    short = SHORTHANDS[item.name]
    before = gathered.settings.get(short.field)
    if before is not None and str(before.value) in short.gives_way_to:
        gathered.notices.append(f"--{item.name}: covered by {before.source}")
        return
    clashing = here.get(short.field)
    if clashing is not None and str(clashing.value).lower() != short.value:
        gathered.problems.append(_clash(clashing.source, item.source, f"--{short.field.replace('_', '-')}"))
    here[short.field] = gathered.settings[short.field] = replace(item, name=short.field, value=short.value)
    if short.gives_way_to:
        gathered.notices.append(f"--{item.name}: taken as --{short.field.replace('_', '-')} {short.value}")


def _switch(item: Said) -> bool | None:
    """Whether a shorthand is turned on; None when its value is neither yes nor no."""
    words = item.value if isinstance(item.value, tuple) else (item.value,)
    values = {"true": True, "false": False}
    return values.get(" ".join(str(word).lower() for word in words)) if words else True


def _take_foreign(gathered: _Gathered, item: Said) -> None:
    """A name that is no setting: notice, refusal, or unknown."""
    if item.name in ACCEPTED:
        gathered.notices.append(f"--{item.name}: accepted, without effect: {ACCEPTED[item.name]}")
    elif item.name in FIXED:
        _take_fixed(gathered, item)
    elif item.name == _STRICT:
        gathered.problems.append(Problem(item.source, "--strict is a flag of the command line only", "--strict"))
    elif item.name in _SOURCES:
        rule = f"--{item.name} names a source of settings, on the command line only"
        gathered.problems.append(Problem(item.source, rule, _SOURCES[item.name]))
    elif item.name in REFUSED:
        legal = f"{INSTEAD[item.name]} in place of" if item.name in INSTEAD else "leave out"
        gathered.problems.append(Problem(item.source, f"refused: {REFUSED[item.name]}", f"{legal} --{item.name}"))
    else:
        gathered.problems.append(_unknown(item.name, item.source))


def _take_fixed(gathered: _Gathered, item: Said) -> None:
    fixed = FIXED[item.name]
    values = [str(value) for value in (item.value if isinstance(item.value, (tuple, list)) else (item.value,))]
    if len(values) == 1 and values[0] in fixed.values:
        gathered.notices.append(f"--{item.name} {values[0]}: accepted, without effect: {fixed.rule}")
        return
    said = [f"--{item.name} {value}" for value in fixed.values]
    legal = ", ".join(filter(None, (INSTEAD.get(item.name), *said)))
    gathered.problems.append(Problem(item.source, f"refused: {fixed.rule}", legal))


def _unknown(name: str, source: str) -> Problem:
    known = [flag.removeprefix("--") for info in FIELDS for flag in spellings(info)]
    near = difflib.get_close_matches(name, [*known, *SHORTHANDS], n=3, cutoff=0.6)
    legal = ", ".join(f"--{match}" for match in near) or "--help lists all"
    return Problem(source, "there is no setting of this name", legal)
