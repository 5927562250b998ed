"""Summarize a run: validation before and after, pace, its newest checkpoint, TensorBoard's command; or as a page."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megazero.checkpoint.folders import newest
from megazero.command_line.tools import Flags
from megazero.console import Console
from megazero.report.summary import read_records, summarize
from megazero.train.leaving import PAGE, write_page


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(prog="megazero summarize", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--metrics-file", type=Path, required=True, metavar="FILE.jsonl", help="metrics file of the run"
    )
    parser.add_argument("--load", type=Path, metavar="DIR", help="the run's checkpoints")
    parser.add_argument("--tensorboard-dir", type=Path, metavar="DIR", help="the run's TensorBoard folder")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE.html",
        help="the run as a page too; --load adds layout, events, settings",
    )
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    """Read the metrics file and print the summary."""
    arguments, console = parse_arguments(words), Console()
    for line in summarize(read_records(arguments.metrics_file)).lines():
        console.line(line)
    if arguments.load is not None:
        console.line(f"{'checkpoint':<16} {newest(arguments.load) or 'none'}")
    if arguments.tensorboard_dir is not None:
        command = shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(arguments.tensorboard_dir)])
        console.line(f"{'TensorBoard':<16} {command}")
    page = None if arguments.load is None else arguments.load / PAGE
    if arguments.html is not None:
        write_page(arguments.html, arguments.load, arguments.metrics_file)
        page = arguments.html
    if page is not None and page.is_file():
        console.line(f"{'page':<16} {page}")
