"""Tests of files that list corpora: their content becomes the settings that flags would set."""

import json
from pathlib import Path

import pytest
from support.configs import SMALL
from support.each import each

from megazero.command_line.parse import parse
from megazero.errors import ConfigError

GOOD = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if name != "mock_data"]
GROUPS = ["valid: 0.3 0.95:1.0 /d/ar, 0.7 0.95:1.0 /d/en", "valid_ar: 1 0.95:1.0 /d/ar"]


@each(
    ("flag", "text", "words"),
    [
        ("--data-args-path", "0.3 a\n0.7 b\n", ["--data-path", "0.3", "a", "0.7", "b"]),
        (
            "--per-split-data-args-path",
            json.dumps({"train": "1 a 2 b", "valid": ["c"], "test": None}),
            ["--train-data-path", "1", "a", "2", "b", "--valid-data-path", "c"],
        ),
        ("--valid-weighted-split-paths-path", " ".join(f'"{group}"' for group in GROUPS) + "\n", GROUPS),
        ("--train-weighted-split-paths-path", f'"{GROUPS[0]}"\n', GROUPS[:1]),
        ("--test-weighted-split-paths-path", f'"{GROUPS[0]}"', GROUPS[:1]),
    ],
)
def test_a_file_says_what_flags_would(flag: str, text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "corpora.txt"
    path.write_text(text)
    same = words if words[0].startswith("--") else [flag.removesuffix("-path"), *words]
    expected = parse([*GOOD, *same]).config
    assert parse([*GOOD, flag, str(path)]).config == expected
    (tmp_path / "run.yaml").write_text(f"{flag.removeprefix('--').replace('-', '_')}: {path}\n")
    assert parse([*GOOD, "--config", str(tmp_path / "run.yaml")]).config == expected


@each(
    ("flag", "text", "told"),
    [
        ("--data-args-path", " \n", "this one is empty"),
        ("--per-split-data-args-path", '{"train": 1}', "a value is a text, or a list"),
        ("--per-split-data-args-path", '{"training": "a"}', "the keys are train, valid, test"),
        ("--per-split-data-args-path", "{", "the file lists corpora: Expecting"),
        ("--train-weighted-split-paths-path", '"t: 1 0:1 a', "No closing quotation"),
        ("--train-weighted-split-paths-path", None, "the file can't be read: No such file"),
    ],
)
def test_files_of_another_form_are_refused(flag: str, text: str | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "corpora.txt"
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse([*GOOD, flag, str(path)], world_size=1)
    (problem,) = caught.value.problems
    assert told in problem.rule and problem.given == f"{flag} {path}" and f"{flag} FILE, a file of" in problem.legal


def test_a_file_beside_other_words_is_a_clash(tmp_path: Path) -> None:
    path = tmp_path / "corpora.txt"
    path.write_text("a")
    with pytest.raises(ConfigError, match="both set --data-path, to different values"):
        parse([*GOOD, "--data-path", "b", "--data-args-path", str(path)])
    with pytest.raises(ConfigError, match="--data-args-path needs one value"):
        parse([*GOOD, "--data-args-path"])
