"""The flags that all tools for reading text share are parsed into document rules, tokenizers and shards."""

import argparse
from pathlib import Path

import pytest
from support.each import each

from megazero.command_line.tools import Flags
from megazero.data.tokenizers import TokenizerSpec
from megazero.errors import ConfigError
from megazero.prepare.arguments import (
    add_input_arguments,
    add_shard_arguments,
    add_tokenizer_arguments,
    chosen_shard,
    input_rules,
    local_path,
    tokenizer_spec,
)
from megazero.prepare.text.chunks import WHOLE, DocumentRules, Shard


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_input_arguments(parser.add_argument_group("input"))
    return parser.parse_args(["--input", "a.jsonl", *words])


def rules(*words: str) -> DocumentRules:
    return input_rules(parsed(*words))


def test_files_are_written_to_a_disk() -> None:
    assert local_path("a/b.jsonl") == Path("a/b.jsonl")
    with pytest.raises(argparse.ArgumentTypeError, match="s3://b/x names an object store"):
        local_path("s3://b/x")


def test_nothing_said_is_jsonl_of_one_key() -> None:
    assert rules() == DocumentRules()
    assert parsed("--input", "a", "b*", "-").input == ["a", "b*", "-"]


def test_everything_said() -> None:
    words = ["--json-keys", "q", "a", "--text-rule", "lines", "--invalid-utf8", "replace", "--input-format", "text"]
    assert rules(*words) == DocumentRules(("q", "a"), "lines", None, "replace", "text")


@each(
    ("word", "separator"),
    [
        (r"\n\n", "\n\n"),
        (r"\r\n", "\r\n"),
        (r"\t|", "\t|"),
        ("<|end|>", "<|end|>"),
        (r"\\n", r"\n"),
        (r"\x1e", "\x1e"),
        (r"\u00e9\n中é\n\U0001f600", "é\n中é\n\U0001f600"),
        ("\n", "\n"),
        ("é", "é"),
        (r"é\\中", r"é\中"),
    ],
)
def test_separators(word: str, separator: str) -> None:
    assert rules("--separator", word) == DocumentRules(text_rule="separator", separator=separator)
    assert rules("--separator", word, "--text-rule", "lines").text_rule == "lines"


@pytest.mark.parametrize("word", ["", "\\", "\\x1", "\\中", r"\ud800", "\udcff"])
def test_what_cannot_be_a_separator_is_told(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        rules("--separator", word)
    assert caught.value.code == 2
    assert "argument --separator: " in capsys.readouterr().err


def test_tokenizer_flags() -> None:
    parser = argparse.ArgumentParser()
    add_tokenizer_arguments(parser.add_argument_group("tokenizer"), required=False)
    words = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "v", "--merge-file", "m"]
    assert tokenizer_spec(parser.parse_args(words)) == TokenizerSpec("GPT2BPETokenizer", "v", "m", None)
    assert parser.parse_args([]).tokenizer_type is None
    required = argparse.ArgumentParser(exit_on_error=False)
    add_tokenizer_arguments(required.add_argument_group("tokenizer"), required=True)
    with pytest.raises(SystemExit):
        required.parse_args([])


def shard(*words: str) -> Shard:
    parser = Flags()
    add_shard_arguments(parser.add_argument_group("shards"))
    return chosen_shard(parser.parse_args(words))


def test_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shard() == WHOLE
    assert shard("--shard-index", "2", "--num-shards", "8") == Shard(2, 8)
    for half in (("--shard-index", "2"), ("--num-shards", "8")):
        with pytest.raises(ConfigError, match="go together"):
            shard(*half)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    with pytest.raises(ConfigError, match="SLURM_ARRAY_TASK_ID ''"):
        shard("--shards-from-slurm")
    for name, number in (("ID", 5), ("MIN", 3), ("MAX", 6), ("COUNT", 4)):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(number))
    assert shard("--shards-from-slurm") == Shard(2, 4)
    with pytest.raises(ConfigError, match="from no other flag"):
        shard("--shards-from-slurm", "--num-shards", "4")
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", "9")  # --array=3-9:2
    with pytest.raises(ConfigError, match=r"4 tasks from 3 to 9(?s:.*)--array=0-3"):
        shard("--shards-from-slurm")
