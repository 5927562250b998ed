"""Defines the flags that the tools which read text have in common."""

import argparse
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megazero.command_line.tools import Number
from megazero.config.run import DataConfig
from megazero.data.rank_files import STYLES
from megazero.data.storage import is_remote
from megazero.data.tokenizers import FILES, TokenizerSpec
from megazero.dialects.megatron import TOKENIZERS
from megazero.errors import ConfigError, Problem
from megazero.prepare.text.chunks import INVALID_UTF8, TEXT_RULES, WHOLE, DocumentRules, Shard
from megazero.prepare.text.inputs import FORMATS

# The flags of `add_tokenizer_arguments`, as attributes.
TOKENIZER_FLAGS = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model")
_TIKTOKEN_FLAGS = ("tiktoken_pattern", "tiktoken_num_special_tokens")
_ASCII = re.compile(r"[\x00-\x7f]+")


def local_path(word: str) -> Path:
    """Parse the path of an output file, which must be on a disk."""
    if is_remote(word):
        raise argparse.ArgumentTypeError(f"{word} names an object store: give a path on a disk, and copy it there")
    return Path(word)


def wrong_new_file(flag: str, path: Path) -> Iterator[Problem]:
    """Yield the problem of an output file that is there already, or that cannot be made."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if there == path:
        yield Problem(f"{flag} {path}", "must not exist yet", "another name")
    elif not (there.is_dir() and os.access(there, os.W_OK)):
        yield Problem(f"{flag} {path}", f"{there} must be writable, and a folder")


def separator_text(word: str) -> str:
    r"""Parse a separator: \n in it is a line end, \t a tabulator, and so on."""
    try:
        text = _ASCII.sub(lambda run: run[0].encode().decode("unicode_escape"), word)
        text.encode()
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is no text: {error}") from error
    if not text:
        raise argparse.ArgumentTypeError("a separator has at least one character")
    return text


def add_input_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the input and its documents."""
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files, folders or patterns: .jsonl, .json, .ndjson, .txt, each also with .gz or .zst, .parquet; "
        "- reads standard input",
    )
    group.add_argument(
        "--input-format", choices=FORMATS, help="format of standard input, and of files without a known ending"
    )
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys or columns to read")
    group.add_argument("--text-rule", choices=TEXT_RULES, help="rule for documents in plain text (default: blocks)")
    group.add_argument(
        "--separator",
        type=separator_text,
        metavar="TEXT",
        help=r"text between two documents of plain text; \n is a line end",
    )
    group.add_argument(
        "--invalid-utf8", choices=INVALID_UTF8, default="refuse", help="treatment of bytes that are no UTF-8"
    )


def input_rules(arguments: argparse.Namespace) -> DocumentRules:
    """Return the document rules that the flags set."""
    return DocumentRules(
        json_keys=tuple(arguments.json_keys),
        text_rule=arguments.text_rule or ("separator" if arguments.separator else "blocks"),
        separator=arguments.separator,
        invalid_utf8=arguments.invalid_utf8,
        input_format=arguments.input_format,
    )


def add_tokenizer_arguments(group: argparse._ArgumentGroup, *, required: bool) -> None:
    """Add the flags for a tokenizer and its files."""
    group.add_argument(
        "--tokenizer-type",
        type=lambda word: TOKENIZERS.get(word, word),
        choices=tuple(FILES),
        required=required,
        help="type of tokenizer",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument(
        "--tokenizer-model",
        "--tokenizer-name-or-path",
        metavar="FILE",
        help="model of SentencePieceTokenizer; tokenizer.json of HuggingFaceTokenizer, or a folder that has one; ranks"
        " of TikTokenizer",
    )
    group.add_argument(
        "--tiktoken-pattern",
        choices=tuple(STYLES),
        help="TikTokenizer's rule for words: v1 and v2 of Megatron's JSON lists, others of .tiktoken files",
    )
    group.add_argument(
        "--tiktoken-num-special-tokens",
        action=Number,
        kind="int",
        ge=7,
        metavar="N",
        help="special tokens in front of the ranks of a JSON list (default: 1000)",
    )


def tokenizer_spec(arguments: argparse.Namespace) -> TokenizerSpec:
    """Return the tokenizer that the flags set."""
    return TokenizerSpec(*(getattr(arguments, name) for name in TOKENIZER_FLAGS), **_given(arguments, _TIKTOKEN_FLAGS))


def with_tokenizer_flags(data: DataConfig, arguments: argparse.Namespace) -> DataConfig:
    """Return a run's data settings with what the flags for a tokenizer set."""
    given: dict[str, Any] = {}
    for name in TOKENIZER_FLAGS:
        word = getattr(arguments, name)
        if word is not None:
            given[name] = word if name == "tokenizer_type" else Path(word)
    return replace(data, **given, **_given(arguments, _TIKTOKEN_FLAGS))


def _given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those of these flags that are given, by attribute."""
    return {name: word for name in names if (word := getattr(arguments, name)) is not None}


def add_shard_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags for a shard of the input."""
    group.add_argument(
        "--num-shards",
        action=Number,
        kind="int",
        ge=1,
        metavar="N",
        help="number of shards; megazero merge joins them",
    )
    group.add_argument("--shard-index", action=Number, kind="int", metavar="I", help="number of this shard, from 0")
    group.add_argument(
        "--shards-from-slurm", action="store_true", help="both from SLURM_ARRAY_TASK_ID, _MIN, _MAX and _COUNT"
    )


def chosen_shard(arguments: argparse.Namespace) -> Shard:
    """Return the shard of this process; raise ConfigError if only one of its flags is given."""
    index, count = arguments.shard_index, arguments.num_shards
    if arguments.shards_from_slurm:
        names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT")]
        values = [os.environ.get(name, "") for name in names]
        if not all(text.isdecimal() for text in values) or index is not None or count is not None:
            found = ", ".join(f"{name} {text!r}" for name, text in zip(names, values, strict=True))
            rule = "the shard comes from an array job of Slurm, and from no other flag"
            legal = "sbatch --array=0-7, or --shard-index and --num-shards alone"
            raise ConfigError(Problem(f"--shards-from-slurm with {found}", rule, legal))
        number, first, last, size = map(int, values)
        if last - first + 1 != size:
            given = f"--shards-from-slurm with {size} tasks from {first} to {last}"
            raise ConfigError(Problem(given, "shards are numbered without a gap", f"sbatch --array=0-{size - 1}"))
        return Shard(number - first, size)
    if (index is None) != (count is None):
        raise ConfigError(
            Problem("one of --shard-index and --num-shards", "they go together", "--shard-index 0 --num-shards 8")
        )
    return WHOLE if index is None else Shard(index, count)
