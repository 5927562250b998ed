"""Train a tokenizer that restores every text exactly: a SentencePiece model, or GPT-2's byte-level BPE."""

import argparse
import time
from collections.abc import Sequence

from megazero.command_line.tools import Flags, HelpFormatter, Number
from megazero.console import Console
from megazero.errors import DataError, raise_problems
from megazero.prepare.arguments import add_input_arguments, input_rules, local_path
from megazero.prepare.tokenizer.tokenizer_training import BYTE_LEVEL, MODEL_TYPES, TokenizerRequest, train_tokenizer
from megazero.prepare.tokenizer.training_text import sample_text
from megazero.units import format_bytes, format_duration


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(
        prog="megazero train-tokenizer", description=__doc__, allow_abbrev=False, formatter_class=HelpFormatter
    )
    text = parser.add_argument_group("text")
    add_input_arguments(text)
    text.add_argument(
        "--seed-limit",
        action=Number,
        kind="int",
        ge=1,
        default=4 << 20,
        metavar="BYTES",
        help="text to learn from, sampled evenly",
    )
    model = parser.add_argument_group("tokenizer")
    model.add_argument(
        "--vocab-size", action=Number, kind="int", default=2048, metavar="N",
        help=f"pieces, 258 reserved ones included (257 with {BYTE_LEVEL})",
    )  # fmt: skip
    model.add_argument(
        "--model-type", choices=MODEL_TYPES, default="bpe",
        help=f"bpe and unigram (slower): a SentencePiece model; {BYTE_LEVEL}: GPT-2's vocab.json and merges.txt",
    )  # fmt: skip
    model.add_argument(
        "--output",
        type=local_path,
        required=True,
        metavar="PATH",
        help=f"the .model to write, or a folder with {BYTE_LEVEL}",
    )
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    """Sample text, learn the tokenizer, print its size."""
    arguments, console, started = parse_arguments(words), Console(), time.monotonic()
    request = TokenizerRequest(arguments.output, arguments.vocab_size, arguments.model_type)
    raise_problems(DataError, request.problems())
    text = sample_text(arguments.input, input_rules(arguments), arguments.seed_limit, console)
    console.line(f"learning {request.vocab_size} pieces ({request.model_type}) from {format_bytes(text.num_bytes)}")
    with console.progress() as progress:
        progress.add_task("learning", total=None)  # neither library reports its progress
        train_tokenizer(request, text)
    console.line(f"{request.output}: {request.vocab_size} pieces, {format_duration(time.monotonic() - started)}")
