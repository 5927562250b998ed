"""Flags that the tools which read text have in common."""

import argparse

from megazero.data.chunks import INVALID_UTF8, TEXT_RULES, DocumentRules
from megazero.data.inputs import FORMATS
from megazero.data.tokenizers import FILES, TokenizerSpec


def positive(text: str) -> int:
    """An integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def add_input_arguments(group: argparse._ArgumentGroup) -> None:
    """What is read, and what a document in it is."""
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files, folders or patterns: .jsonl, .json, .ndjson, .txt, each also with .gz or .zst, .parquet; "
        "- reads standard input",
    )
    group.add_argument(
        "--input-format", choices=FORMATS, help="of files whose ending tells none, and of standard input"
    )
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys or columns to take")
    group.add_argument("--text-rule", choices=TEXT_RULES, help="what a document is in plain text (default: blocks)")
    group.add_argument(
        "--separator", metavar="TEXT", help=r"what stands between two documents of plain text; \n is a line end"
    )
    group.add_argument(
        "--invalid-utf8", choices=INVALID_UTF8, default="refuse", help="what to do with bytes that are no UTF-8"
    )


def input_rules(arguments: argparse.Namespace) -> DocumentRules:
    """What they said."""
    separator = arguments.separator and arguments.separator.encode("latin-1", "backslashreplace").decode(
        "unicode_escape"
    )
    return DocumentRules(
        json_keys=tuple(arguments.json_keys),
        text_rule=arguments.text_rule or ("separator" if separator else "blocks"),
        separator=separator or None,
        invalid_utf8=arguments.invalid_utf8,
        input_format=arguments.input_format,
    )


def add_tokenizer_arguments(group: argparse._ArgumentGroup, *, required: bool) -> None:
    """Which tokenizer, from which files."""
    group.add_argument("--tokenizer-type", choices=tuple(FILES), required=required, help="how text becomes ids")
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--tokenizer-model", metavar="FILE", help="model of SentencePieceTokenizer")


def tokenizer_spec(arguments: argparse.Namespace) -> TokenizerSpec:
    """What they said."""
    return TokenizerSpec(
        arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file, arguments.tokenizer_model
    )
