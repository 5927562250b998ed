"""Tests of the tokenizer trainer as a user starts it."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_python import TOOLS, warm_python

from megazero.data.tokenizers import TokenizerSpec, load_tokenizer

TOOL = str(Path(__file__).parents[2] / "tools" / "train_tokenizer.py")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    lines = Path(pytest.__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines * 2))
    return path


def start(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the tool in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", [TOOL, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(TOOL, run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_gpt2s_files_are_the_same_every_time(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--model-type", "byte-level-bpe", "--vocab-size", "400", "--input"]
    command = [warm_python(TOOLS), TOOL, *flags, "-", "--output", str(tmp_path / "a")]
    with open(source) as stream:
        done = subprocess.run(command, stdin=stream, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/a: 400 pieces" in done.stdout
    assert start(monkeypatch, *flags, source, "--output", tmp_path / "b") == 0
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    files = {"vocab_file": str(tmp_path / "a/vocab.json"), "merge_file": str(tmp_path / "a/merges.txt")}
    tokenizer = load_tokenizer(TokenizerSpec("GPT2BPETokenizer", **files))
    assert (tokenizer.vocab_size, tokenizer.eod) == (400, 399)


def test_user_errors_have_no_traceback(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, complaint in (
        (["--vocab-size", "257", "--model-type", "byte-level-bpe"], "--vocab-size 257\n"),
        (["--vocab-size", "60000", "--model-type", "byte-level-bpe"], "that many tokens can be learnt"),
        (["--vocab-size", "60000"], "SentencePiece can learn it"),
        (["--json-keys", "body"], "c.jsonl:1\n"),
    ):
        assert start(monkeypatch, "--input", source, "--output", tmp_path / "t", *flags) == 2
        assert complaint in capsys.readouterr().err
    assert start(monkeypatch, "--input", source, "--output", tmp_path) == 2
    assert "is the model's file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
