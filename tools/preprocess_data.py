"""Turn text into token files: PREFIX_KEY_document.bin, .idx and .json (counts, tokenizer) for every JSON key."""

import argparse
import sys
import time
from pathlib import Path

from megazero.config.compat import PREPROCESSING_ACCEPTED, PREPROCESSING_FIXED, PREPROCESSING_REFUSED
from megazero.console import Console, HelpFormatter, run_program
from megazero.data.documents import TEXT_RULES, DocumentRules
from megazero.data.preprocess import PreprocessRequest, preprocess
from megazero.data.tokenizers import FILES, TokenizerSpec
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.units import format_bytes, format_duration


def positive(text: str) -> int:
    """An integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=HelpFormatter)
    text = parser.add_argument_group("text")
    text.add_argument("--input", nargs="+", type=Path, required=True, metavar="FILE", help=".jsonl, .json, .txt files")
    text.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to take, a corpus for each")
    text.add_argument("--text-rule", choices=TEXT_RULES, default="blocks", help="what a document is in a .txt file")
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument("--tokenizer-type", choices=tuple(FILES), required=True, help="how text becomes ids")
    tokenizer.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    tokenizer.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    tokenizer.add_argument("--tokenizer-model", metavar="FILE", help="model of SentencePieceTokenizer")
    tokenizer.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, metavar="PREFIX", help="where the files go")
    output.add_argument("--workers", type=positive, default=1, metavar="N", help="processes")
    output.add_argument("--log-interval", type=positive, default=1000, metavar="N", help="documents between two lines")
    for name in (*PREPROCESSING_ACCEPTED, *PREPROCESSING_FIXED, *PREPROCESSING_REFUSED):
        parser.add_argument(f"--{name}", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args([dashed(word) for word in sys.argv[1:]])


def dashed(word: str) -> str:
    """A flag with dashes for underscores; any other word as it is."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def take_foreign_flags(arguments: argparse.Namespace, console: Console) -> None:
    """Tell which flags of other tools have no effect; raises ConfigError for those that would need one."""
    given = {name.replace("_", "-"): words for name, words in vars(arguments).items() if words is not None}
    problems = []
    for name, rule in PREPROCESSING_REFUSED.items():
        if name in given:
            problems.append(Problem(f"--{name}", f"refused: {rule}", f"leave out --{name}"))
    for name, fixed in PREPROCESSING_FIXED.items():
        if name in given and tuple(given[name]) not in {(value,) for value in fixed.values}:
            legal = ", ".join(f"--{name} {value}" for value in fixed.values)
            problems.append(Problem(" ".join([f"--{name}", *given[name]]), f"refused: {fixed.rule}", legal))
    raise_problems(ConfigError, problems)
    effects = {**PREPROCESSING_ACCEPTED, **{name: fixed.rule for name, fixed in PREPROCESSING_FIXED.items()}}
    for name in (name for name in effects if name in given):
        console.line(f"--{name}: accepted, without effect: {effects[name]}")


def main() -> None:
    """Encode, write, tell."""
    arguments, console, started = parse_arguments(), Console(), time.monotonic()
    take_foreign_flags(arguments, console)
    request = PreprocessRequest(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        tokenizer=TokenizerSpec(
            arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file, arguments.tokenizer_model
        ),
        rules=DocumentRules(tuple(arguments.json_keys), arguments.text_rule),
        append_eod=arguments.append_eod,
        workers=arguments.workers,
        log_interval=arguments.log_interval,
    )
    for prefix, sidecar in preprocess(request, console):
        console.line(
            f"{prefix}: {sidecar.documents} documents, {sidecar.tokens} tokens, vocabulary {sidecar.vocab_size}, "
            f"{format_bytes(sidecar.text_bytes)} of text, {sidecar.text_bytes / sidecar.tokens:.2f} bytes a token"
        )
    console.line(f"done in {format_duration(time.monotonic() - started)}")


if __name__ == "__main__":
    sys.exit(run_program(main))
