"""Make a jsonl corpus of text files: a folder's, or the sources of the Python standard library.

Every file is a document, or with --separator every piece of it.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from megazero.command_line.tools import Flags
from megazero.console import Console
from megazero.prepare.arguments import local_path, separator_text
from megazero.prepare.text.source_text import find_sources, find_stdlib, write_jsonl
from megazero.units import format_bytes, format_duration


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(prog="megazero text-to-jsonl", description=__doc__, allow_abbrev=False)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--input", nargs="+", type=Path, metavar="PATH", help="folders (or files) to read")
    where.add_argument("--stdlib", action="store_true", help="the sources of this interpreter's standard library")
    parser.add_argument("--glob", nargs="+", default=["*"], metavar="PATTERN", help="file names to read (default: all)")
    parser.add_argument(
        "--exclude", nargs="+", default=[], metavar="PATTERN", help="file, folder or relative names to leave out"
    )
    parser.add_argument(
        "--separator", type=separator_text, metavar="TEXT",
        help=r"text between two documents of a file; \n is a line end",
    )  # fmt: skip
    parser.add_argument(
        "--output",
        type=local_path,
        required=True,
        metavar="FILE",
        help="the file to write: .jsonl, .jsonl.gz or .jsonl.zst",
    )
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    """Find the files, write the corpus, print the counts."""
    arguments, console, started = parse_arguments(words), Console(), time.monotonic()
    sources = find_stdlib() if arguments.stdlib else find_sources(arguments.input, arguments.glob, arguments.exclude)
    tracked = console.track(sources, total=len(sources), description="files")
    summary = write_jsonl(tracked, arguments.output, arguments.separator)
    console.line(
        f"{arguments.output}: {summary.documents} documents, {format_bytes(summary.text_bytes)} of text, "
        f"{summary.skipped} files skipped (empty or not UTF-8), {format_duration(time.monotonic() - started)}"
    )
