"""Tests of reading and writing settings as a flat YAML mapping."""

import os
from pathlib import Path

import pytest
from support.configs import make_run
from support.each import each

from megazero.config.yaml_file import read_file, read_nested, read_text, to_yaml
from megazero.errors import ConfigError


def test_values_keep_yamls_types_and_names_have_one_spelling() -> None:
    raw = read_text("num_layers: 12\nlr: 1e-4\ndata-path: [a, b]\nmock_data: yes\n", origin="run.yaml")
    assert [(item.name, item.value) for item in raw] == [
        ("num_layers", 12),
        ("lr", "1e-4"),
        ("data_path", ["a", "b"]),
        ("mock_data", True),
    ]
    assert raw[0].source == "run.yaml: num_layers: 12"


def test_an_empty_file_says_nothing() -> None:
    assert read_text("# nothing yet\n", origin="x") == ()


@each(
    ("text", "message"),
    [
        ("lr: 1\nlr: 2\n", "the key lr stands twice (line 2)"),
        ("num-layers: 1\nnum_layers: 2\n", "the key num_layers stands twice (line 2)"),
        ("- lr\n", "a mapping from settings to values"),
        ("a: [1\n", "not valid YAML"),
        ("x: !!python/object:os.system {}\n", "not valid YAML"),
        ("save: 2026-13-40\n", "not valid YAML"),
        (f"seed: {'1' * 5000}\n", "not valid YAML"),
        ("model:\n  num_layers: 2\n", "the file is flat"),
        ("{[1]: 2}\n", "not valid YAML"),
    ],
)
def test_what_is_no_flat_mapping_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_text(text, origin="run.yaml")
    assert message in str(caught.value) and "run.yaml" in str(caught.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_file(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a: " + "[" * 3000, "nested too deeply"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("".join(" " * depth + "a:\n" for depth in range(900)), "nested too deeply"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("a: &a [1, 2]\nb: [*a, *a]", "an alias stands for one value"),
    ],
    ids=["open", "lists", "mappings", "5,000 digits", "aliases"],
)
def test_yaml_of_strangers_ends_in_a_message(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        read_text(text, origin="run.yaml")


def test_a_file_that_is_no_regular_one_or_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zeros").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_text("# a comment\n" * 100_000)
    for name, rule in {"zeros": "not a regular file", "fifo": "not a regular file", "large": "larger than"}.items():
        with pytest.raises(ConfigError, match=rule):
            read_file(tmp_path / name)


def test_every_setting_is_written_once_below_its_section() -> None:
    lines = to_yaml(make_run(data_path=["0.5", "a", "0.5", "b"], mock_data=False, save="runs/x")).splitlines()
    assert lines[0].startswith("# The resolved configuration of a run") and lines[1:3] == ["# model", "num_layers: 2"]
    assert "save: runs/x" in lines and "lr: 0.001" in lines and "global_batch_size: null" in lines


def test_a_file_may_have_sections(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("zero: {max_live_parameters: 5, a: [0.5, x, 2]}\nlr: 15e-5\nname: e5\n")
    assert read_nested(file) == {"zero": {"max_live_parameters": 5, "a": [0.5, "x", 2]}, "lr": "15e-5", "name": "e5"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zero: {a: 1, a: 2}\n", "the key a stands twice"),
        ("- 1\n", "a mapping from names to values"),
        ("", "a mapping from names to values"),
        ("a: [1\n", "not valid YAML"),
    ],
)
def test_what_is_no_mapping_with_sections_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "engine.yaml").write_text(text)
    with pytest.raises(ConfigError, match="engine") as caught:
        read_nested(tmp_path / "engine.yaml")
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_nested(tmp_path / "none.yaml")
