"""Tests of the cleaning tool as a user starts it."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_python import TOOLS, warm_python

TOOL = str(Path(__file__).parents[2] / "tools" / "clean_corpus.py")


def start(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the tool in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", [TOOL, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(TOOL, run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


def corpus(folder: Path, *texts: str) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"body": text, "n": number}) + "\n" for number, text in enumerate(texts)))
    return path


def test_a_corpus_is_cleaned(tmp_path: Path) -> None:
    source = corpus(tmp_path, "schÃ¶n und gut", "schön und gut", "kurz", "noch ein Text")
    flags = ["--json-key", "body", "--fix-text", "--min-characters", "5", "--deduplicate", "exact"]
    command = [warm_python(TOOLS), TOOL, "--input", str(source), *flags, "--output", str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == [{"body": "schön und gut", "n": 0}, {"body": "noch ein Text", "n": 3}]
    told = [line.split() for line in done.stdout.splitlines()]
    assert told[0][0] == "documents" and told[1][:3] == ["read", "4", "4"]
    assert ["--fix-text", "4", "0", "4", "45", "B", "(1", "mended)"] in told
    assert ["--min/max-characters", "4", "1", "3", "41", "B"] in told
    assert ["--deduplicate", "exact", "3", "1", "2", "27", "B"] in told
    assert told[-1][0] == f"{tmp_path}/out.jsonl:"


def test_bad_lines_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = corpus(tmp_path, "a", "b")
    source.write_text(source.read_text() + "{\n" * 20)
    flags = ["--input", source, "--json-keys", "body", "--output", tmp_path / "out.jsonl.zst"]
    assert start(monkeypatch, *flags) == 2
    assert "in.jsonl:3" in capsys.readouterr().err
    assert start(monkeypatch, *flags, "--skip-bad-lines") == 0
    told = capsys.readouterr().out
    assert "20 bad lines skipped, such as" in told and told.count("in.jsonl:") == 10


def test_user_errors_have_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    flags = ["--input", corpus(tmp_path, "a"), "--json-key", "body", "--output"]
    assert start(monkeypatch, *flags, tmp_path / "out.txt", "--near-threshold", "2") == 2
    told = capsys.readouterr().err
    assert "3 data errors" in told and "--near-threshold 2.0" in told and "--deduplicate near" in told
    assert start(monkeypatch, *flags, tmp_path / "out.jsonl", "--deduplicate", "near") == 2
    assert 'pip install "megazero[corpora]"' in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
