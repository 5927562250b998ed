"""Tests that every setting accepts and refuses the same values as a flag, in a run file and in a DeepSpeed file.

The verdicts are those of tests/support/raw_values.py; tests/library/test_one_grammar.py holds the library's interfaces
to the same.  A flag's value is always a word, so `--seed 2` stands for both 2 and "2" of a file; `as_words` returns
None for forms that a command line cannot express.  NaN and infinity as YAML writes them have a test of their own.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.configs import SMALL
from support.each import each
from support.raw_values import FORMS, REFUSED, as_words, expected, same

from megazero.command_line.flags import split_words
from megazero.command_line.parse import from_yaml, parse
from megazero.config.run import FIELDS, RunConfig
from megazero.config.validate import INFO, parse_value
from megazero.config.yaml_file import SAVED
from megazero.dialects.deepspeed.keys import ACTIVATION_KEYS, PRECISION_KEYS, ZERO_KEYS
from megazero.errors import ConfigError, Problem

MINIMUM = {name: value for name, value in SMALL.items() if INFO[name].required}


def refused(problems: ConfigError) -> set[str]:
    """Return the settings that an error's rules begin with: "--seed is a whole number ..."."""
    by_flag = {info.flag: info.name for info in FIELDS}
    return {by_flag[problem.rule.split()[0]] for problem in problems.problems}


def value(config: RunConfig, name: str) -> Any:
    return getattr(getattr(config, INFO[name].section), name)


def verdicts_of_flags(form: str) -> dict[str, Any]:
    """Return the verdict on every setting that can take the form on a command line, with all of them in one line."""
    words = {info.name: found for info in FIELDS if (found := as_words(info, form)) is not None}
    given = {name: [f"{INFO[name].flag}={item}"] for name, item in MINIMUM.items()}
    wanted = {
        name: [f"{INFO[name].flag}={found[0]}"] if len(found) == 1 else [INFO[name].flag, *found]
        for name, found in words.items()
    }
    wrong: set[str] = set()
    idle: set[str] = set()
    while True:  # a setting left out as idle may have given another one its effect
        accepted = given | {name: item for name, item in wanted.items() if name not in wrong | idle}
        try:
            config = parse([word for item in accepted.values() for word in item]).config
            break
        except ConfigError as error:
            for problem in error.problems:
                name = problem.given.split("=")[0].split()[0].removeprefix("--").replace("-", "_")
                (idle if problem.rule.startswith("it has no effect here") else wrong).add(name)
    verdicts = {name: REFUSED if name in wrong else value(config, name) for name in words.keys() - idle}
    return verdicts | {name: alone(name, wanted[name]) for name in words.keys() & idle}


def alone(name: str, words: list[str]) -> Any:
    """Return the verdict on a flag alone, for one that has no effect beside the others."""
    (raw,), _ = split_words(words)
    parsed = parse_value(INFO[name], raw)
    return REFUSED if isinstance(parsed, Problem) else parsed.value


def verdicts_of_a_file(form: str, path: Path) -> dict[str, Any]:
    """Return the verdict on every setting, all in one file, marked as saved so that idle settings are legal."""
    wrong: set[str] = set()
    try:
        from_yaml(as_yaml(dict.fromkeys(INFO, FORMS[form])))
    except ConfigError as error:
        wrong = refused(error)
    path.write_text(f"{SAVED}\n" + as_yaml(MINIMUM | {name: FORMS[form] for name in INFO if name not in wrong}))
    config = parse(["--config", str(path)]).config
    return {name: REFUSED if name in wrong else value(config, name) for name in INFO}


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Return the settings as YAML, one line each, with strings in quotes."""
    return "".join(f"{name}: {json.dumps(item)}\n" for name, item in settings.items())


def unexpected(form: str, verdicts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdicts that differ from those expected, each with the expected one."""
    wanted = {name: expected(INFO[name], form) for name in verdicts}
    return {name: (item, wanted[name]) for name, item in verdicts.items() if not same(item, wanted[name])}


@each("form", FORMS)
def test_flags(form: str) -> None:
    verdicts = verdicts_of_flags(form)
    assert unexpected(form, verdicts) == {} and (form in ("null", "list of one") or len(verdicts) > 90)


@each("form", FORMS)
def test_run_files(form: str, tmp_path: Path) -> None:
    verdicts = verdicts_of_a_file(form, tmp_path / "run.yaml")
    assert unexpected(form, verdicts) == {} and set(verdicts) == set(INFO)


# DeepSpeed's keys that hold a setting's value unchanged, by key.  The file below turns on the arena, without which the
# number of checkpoints would have no effect.
KEYS = {
    key: name
    for name, key in {**ZERO_KEYS, **ACTIVATION_KEYS, **PRECISION_KEYS, "clip_grad": "gradient_clipping"}.items()
    if name not in ("communication_data_type", "contiguous_checkpointing", "min_loss_scale")
    and name not in ("loss_scale", "initial_loss_scale")
}


def deepspeed_file(settings: Mapping[str, Any], path: Path) -> str:
    """Write a DeepSpeed configuration with these keys and return the command line of a run with it."""
    content: dict[str, Any] = {
        "fp16": {"enabled": True},
        "activation_checkpointing": {"contiguous_memory_optimization": True},
    }
    for key, item in settings.items():
        section, _, name = key.rpartition(".")
        (content.setdefault(section, {}) if section else content)[name] = item
    path.write_text(json.dumps(content))
    base = " ".join(f"{INFO[name].flag} {item}" for name, item in MINIMUM.items())
    return f"{base} --deepspeed-config {path}"


@each("form", [form for form in FORMS if form not in ("auto", "null")])
def test_deepspeed_configurations(form: str, tmp_path: Path) -> None:
    """Keys have the verdicts of settings; "auto" and null mean other things in these files and are left out."""
    path = tmp_path / "ds.json"
    wrong: set[str] = set()
    try:
        parse(deepspeed_file(dict.fromkeys(KEYS, FORMS[form]), path).split())
    except ConfigError as error:
        wrong = {problem.given.removeprefix(f"{path}: ").partition(":")[0] for problem in error.problems}
    accepted = {key: FORMS[form] for key in KEYS if key not in wrong}
    config = parse(deepspeed_file(accepted, path).split()).config
    verdicts = {name: REFUSED if key in wrong else value(config, name) for key, name in KEYS.items()}
    assert unexpected(form, verdicts) == {} and len(verdicts) > 25


@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf"])
def test_yamls_own_numbers_that_are_not_finite(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml("".join(f"{info.name}: {text}\n" for info in FIELDS))
    assert refused(caught.value) == set(INFO)


@each("text", ["5e8", "5.0e8", "5.0e+8", "500_000_000", "'5e8'"])
def test_yaml_without_quotes(text: str) -> None:
    config = from_yaml(f"{as_yaml(MINIMUM)}reduce_bucket_size: {text}\n")
    assert config.zero.reduce_bucket_size == 500_000_000
