"""Tests of what scripts/quickstart.sh refuses, and that it leaves folders alone that it has not made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "quickstart.sh"


def quickstart(*arguments: str | Path, cwd: Path = ROOT, python: str = sys.executable) -> tuple[int, str]:
    """Run the script with a given python and without installing anything; return its exit status and all output."""
    command = ["bash", str(SCRIPT), "--no-install", *map(str, arguments)]
    environment = {**os.environ, "PYTHON": python}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--frsh"], "unknown option --frsh"),
        (["--input"], "--input needs a value"),
        (["--input", "nowhere.jsonl"], "no such file"),
        (["--input", "README.pdf"], "no such file"),
        (["--train-iters", "0"], "must be a whole number, at least 1"),
        (["--train-iters", "many"], "must be a whole number, at least 1"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, tmp_path: Path) -> None:
    status, output = quickstart(*arguments, cwd=tmp_path)
    assert status == 2
    assert output.startswith("error: ") and message in output


def test_input_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "text.pdf").write_text("words")
    status, output = quickstart("--input", "text.pdf", cwd=tmp_path)
    assert status == 2 and "must end in .jsonl or .txt" in output


def test_too_little_text_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("a few words\n" * 100)
    status, output = quickstart("--input", "note.txt", "--dir", "run", cwd=tmp_path)
    assert status == 2 and "1200 bytes of text" in output
    assert not (tmp_path / "run").exists()


def test_help_names_every_option() -> None:
    status, output = quickstart("--help")
    assert status == 0
    for option in ("--fresh", "--input", "--train-iters", "--dir", "--no-install"):
        assert option in output


def test_a_python_without_torch(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    # -S starts python without site-packages.
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    status, output = quickstart("--dir", tmp_path / "run", python=str(bare))
    assert status == 2 and "lacks the packages: torch numpy" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, fresh: list[str]) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    status, output = quickstart("--dir", tmp_path, *fresh)
    assert status == 2 and "holds no quickstart" in output
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_made_from_other_text(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "text").write_text("another.jsonl, 1 2\n")
    (tmp_path / "a.txt").write_text("words " * 50_000)
    status, output = quickstart("--dir", "run", "--input", "a.txt", cwd=tmp_path)
    assert status == 2 and "was made from other text (another.jsonl, 1 2)" in output


def test_a_stage_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("not json\n" * 40_000)
    status, output = quickstart("--dir", "run", "--input", "a.jsonl", cwd=tmp_path)
    assert status != 0
    assert "a.jsonl" in output and "stopped after" in output and "Traceback" not in output
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["text"]
