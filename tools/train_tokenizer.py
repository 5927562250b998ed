"""Train a SentencePiece tokenizer that reads back every text exactly (byte fallback, white space kept)."""

import argparse
import sys
import time
from pathlib import Path

from megazero.console import Console, HelpFormatter, run_program
from megazero.data.documents import TEXT_RULES, DocumentRules
from megazero.data.tokenizer_training import MODEL_TYPES, TokenizerRequest, sample_text, train_tokenizer
from megazero.units import format_bytes, format_duration


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=HelpFormatter)
    parser.add_argument(
        "--input", nargs="+", type=Path, required=True, metavar="FILE", help=".jsonl, .json, .txt files"
    )
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys whose texts are read")
    parser.add_argument("--text-rule", choices=TEXT_RULES, default="blocks", help="what a document is in a .txt file")
    parser.add_argument("--vocab-size", type=int, default=2048, metavar="N", help="pieces, 258 reserved ones included")
    parser.add_argument("--model-type", choices=MODEL_TYPES, default="bpe", help="kind of model; unigram is slower")
    parser.add_argument(
        "--seed-limit", type=int, default=4 << 20, metavar="BYTES", help="text to learn from, taken from all over"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.model", help="the model to write")
    return parser.parse_args()


def main() -> None:
    """Sample, learn, tell."""
    arguments, console, started = parse_arguments(), Console(), time.monotonic()
    request = TokenizerRequest(
        inputs=tuple(arguments.input),
        output=arguments.output,
        vocab_size=arguments.vocab_size,
        rules=DocumentRules(tuple(arguments.json_keys), arguments.text_rule),
        model_type=arguments.model_type,
        max_bytes=arguments.seed_limit,
    )
    text = sample_text(request.inputs, request.rules, request.max_bytes)
    console.line(f"learning {request.vocab_size} pieces ({request.model_type}) from {format_bytes(text.num_bytes)}")
    train_tokenizer(request, text)
    console.line(f"{request.output}: {request.vocab_size} pieces, {format_duration(time.monotonic() - started)}")


if __name__ == "__main__":
    sys.exit(run_program(main))
