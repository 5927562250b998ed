"""Tests that every setting of the library's sections takes the same values through all sources, with one verdict.

The verdict is that of tests/support/raw_values.py, to which tests/command_line/test_one_grammar.py holds the settings
of a run. A value is read by `load_engine_config` from a mapping, a JSON file and a YAML file with megazero's own
sections, and from a mapping with DeepSpeed's keys where a key has the setting's value as it stands. In a DeepSpeed
configuration "auto" and null have a meaning of their own, so they are left out there, and so are keys whose value
differs from the setting's (a power of 2, a number format under several names). A setting that only a run uses is
refused by a rule with a sentence of its own, which distinguishes that refusal from the verdict on the value.
"""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.each import each
from support.raw_values import FORMS, NOT_FINITE, REFUSED, expected, same

from megazero.config.curriculum import CurriculumConfig
from megazero.config.engine_sections import (
    ActivationConfig,
    LimitConfig,
    PrecisionConfig,
    ReportConfig,
    ZeroConfig,
)
from megazero.config.fields import FieldInfo, describe
from megazero.dialects.deepspeed.keys import ACTIVATION_KEYS, PRECISION_KEYS, ZERO_KEYS
from megazero.errors import ConfigError
from megazero.library.config import EngineConfig, load_engine_config

SECTIONS = {
    "zero": ZeroConfig,
    "precision": PrecisionConfig,
    "activations": ActivationConfig,
    "limits": LimitConfig,
    "reports": ReportConfig,
    "curriculum": CurriculumConfig,
}
SETTINGS = {(section, info.name): info for section, cls in SECTIONS.items() for info in describe(section, cls)}
# Settings that make another one legal: a loss scale needs fp16, a count of checkpoints needs an arena.
BESIDE = {"precision": {"precision": "fp16"}, "activations": {"contiguous_checkpointing": True}}
Door = Callable[[dict[str, Any], Path], Any]
# The verdict on a value that reads as legal, and which only a rule between settings refuses.
ACCEPTED = "accepted"


def verdict(config: Any, section: str, info: FieldInfo, name: str) -> Any:
    """Return the setting's value, or REFUSED if the value itself is illegal, `name` being the key in messages."""
    try:
        loaded = load_engine_config(config)
    except ConfigError as error:
        rules = [problem.rule for problem in error.problems]
        return REFUSED if any(rule.startswith((f"{name} is ", f"{name} has an empty")) for rule in rules) else ACCEPTED
    assert isinstance(loaded, EngineConfig)
    return getattr(getattr(loaded, section), info.name)


def own(section: str, name: str, value: Any) -> dict[str, Any]:
    return {section: {**BESIDE.get(section, {}), name: value}}


def from_mapping(content: dict[str, Any], folder: Path) -> Any:
    return content


def from_json(content: dict[str, Any], folder: Path) -> Any:
    (folder / "engine.json").write_text(json.dumps(content))
    return folder / "engine.json"


def from_yaml_file(content: dict[str, Any], folder: Path) -> Any:
    (folder / "engine.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder / "engine.yaml"


def unexpected(form: str, verdicts: dict[str, tuple[FieldInfo, Any]]) -> dict[str, Any]:
    """Return the verdicts that differ from those of the table, each beside the table's."""
    wanted = {name: expected(info, form) for name, (info, _) in verdicts.items()}
    return {
        name: (item, wanted[name])
        for name, (_, item) in verdicts.items()
        if not same(item, wanted[name]) and not (item == ACCEPTED and wanted[name] != REFUSED)
    }


def verdicts_of(form: str, settings: Mapping[tuple[str, str], FieldInfo], door: Door, folder: Path) -> dict[str, Any]:
    return {
        name: (info, verdict(door(own(section, name, FORMS[form]), folder), section, info, f"{section}.{name}"))
        for (section, name), info in settings.items()
    }


@each("form", FORMS)
def test_megazeros_own_sections(form: str, tmp_path: Path) -> None:
    verdicts = verdicts_of(form, SETTINGS, from_mapping, tmp_path)
    assert unexpected(form, verdicts) == {} and len(verdicts) == len(SETTINGS)


@each("door", [from_json, from_yaml_file])
@each("form", FORMS)
def test_files_of_megazeros_own_sections(form: str, door: Door, tmp_path: Path) -> None:
    """A setting of every kind alone; and all settings together, whose problems are those of the mapping."""
    of_kinds = {(info.section, info.kind, info.optional): info for info in SETTINGS.values()}.values()
    verdicts = verdicts_of(form, {(info.section, info.name): info for info in of_kinds}, door, tmp_path)
    assert unexpected(form, verdicts) == {} and len(verdicts) > 10
    whole: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for section, name in SETTINGS:
        whole[section][name] = deepcopy(FORMS[form])  # YAML would write one list once
    path = door(whole, tmp_path)
    assert problems_of(path, str(path)) == problems_of(whole, "config")


def problems_of(config: Any, origin: str) -> list[str]:
    """Return the text of all problems of a configuration, without its origin."""
    with pytest.raises(ConfigError) as caught:
        load_engine_config(config)
    return [str(problem).replace(f"{origin}: ", "") for problem in caught.value.problems]


KEYS = {
    **{key: ("zero", name) for name, key in ZERO_KEYS.items() if name != "communication_data_type"},
    **{key: ("activations", name) for name, key in ACTIVATION_KEYS.items()},
    **{
        key: ("precision", name)
        for name, key in PRECISION_KEYS.items()
        if "scale" not in name or name == "loss_scale_window"
    },
}


def foreign(key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    if not section:
        return {name: value}
    beside = {"fp16": {"enabled": True}, "activation_checkpointing": {"contiguous_memory_optimization": True}}
    return {section: {**beside.get(section, {}), name: value}}


@each("form", [form for form in FORMS if form not in ("auto", "null")])
def test_deepspeeds_keys(form: str) -> None:
    verdicts = {
        key: (SETTINGS[setting], verdict(foreign(key, FORMS[form]), setting[0], SETTINGS[setting], key))
        for key, setting in KEYS.items()
    }
    assert unexpected(form, verdicts) == {} and len(verdicts) > 25


@pytest.mark.parametrize("form", NOT_FINITE)
def test_numbers_that_are_not_finite(form: str) -> None:
    for (section, name), info in SETTINGS.items():
        found = verdict(own(section, name, NOT_FINITE[form]), section, info, f"{section}.{name}")
        assert found == REFUSED, name
    for key, (section, name) in KEYS.items():
        assert verdict(foreign(key, NOT_FINITE[form]), section, SETTINGS[section, name], key) == REFUSED, key
