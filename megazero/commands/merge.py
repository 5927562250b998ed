"""Merge several corpora into one: byte for byte the result of preprocessing all their text at once."""

import argparse
import signal
import time
from collections.abc import Sequence

from megazero.command_line.tools import Flags, HelpFormatter
from megazero.console import Console
from megazero.errors import ConfigError, Problem
from megazero.prepare.tokens.array_shards import find_prefixes
from megazero.prepare.tokens.merge import merge, open_inputs
from megazero.units import counted, format_bytes, format_duration


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(prog="megazero merge", description=__doc__, allow_abbrev=False, formatter_class=HelpFormatter)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="corpora: prefixes, a folder with some, or a pattern; shards are put in the order of their numbers",
    )
    parser.add_argument("--output-prefix", "--output_prefix", required=True, metavar="PREFIX", help="the new corpus")
    parser.add_argument("--multimodal", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    """Open all corpora, then copy them."""
    arguments, console, started = parse_arguments(words), Console(), time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # copied files are removed, as after Ctrl-C
    if arguments.multimodal:
        raise ConfigError(Problem("--multimodal", "refused: corpora are of text alone", "leave out --multimodal"))
    parts = open_inputs(find_prefixes(arguments.input), arguments.output_prefix)
    total = sum(part.tokens for part in parts)
    size = format_bytes(total * parts[0].dtype.itemsize)
    console.line(f"{len(parts)} corpora with {total} tokens, {size}, in this order:")
    for part in parts:
        console.line(f"  {part.prefix}: {counted(part.documents, 'document')}, {part.tokens} tokens")
    with console.progress() as progress:
        task = progress.add_task("tokens", total=total)
        merged = merge(parts, arguments.output_prefix, lambda tokens: progress.advance(task, tokens))
    counts = f"{counted(merged.documents, 'document')}, {merged.tokens} tokens"
    console.line(f"{arguments.output_prefix}: {counts} in {format_duration(time.monotonic() - started)}")
    if merged.without:
        console.line(f"no .json is written, since {merged.without[0]} has none ({len(merged.without)} without in all)")
