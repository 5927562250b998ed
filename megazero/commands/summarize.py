"""Summarize a run: validation before and after, pace, its newest checkpoint, TensorBoard's command; or as a page."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megazero.checkpoint.folders import newest
from megazero.command_line.tools import Flags
from megazero.console import Console
from megazero.errors import DataError, Problem
from megazero.report.summary import read_records, summarize
from megazero.train.leaving import PAGE, metrics_file_of, write_page


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(prog="megazero summarize", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--metrics-file",
        type=Path,
        metavar="FILE.jsonl",
        help="metrics file of the run; without it the one that the run under --load has written",
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
    metrics_file = _metrics_file(arguments)
    for line in summarize(read_records(metrics_file)).lines():
        console.line(line)
    if arguments.load is not None:
        console.line(f"{'checkpoint':<16} {newest(arguments.load) or 'none'}")
    if arguments.tensorboard_dir is not None:
        command = shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(arguments.tensorboard_dir)])
        console.line(f"{'TensorBoard':<16} {command}")
    page = None if arguments.load is None else arguments.load / PAGE
    if arguments.html is not None:
        write_page(arguments.html, arguments.load, metrics_file)
        page = arguments.html
    if page is not None and page.is_file():
        console.line(f"{'page':<16} {page}")


def _metrics_file(arguments: argparse.Namespace) -> Path:
    if arguments.metrics_file is not None:
        return Path(arguments.metrics_file)
    found = None if arguments.load is None else metrics_file_of(arguments.load)
    if found is None:
        run = "" if arguments.load is None else f"--load {arguments.load}: its run has "
        given = f"{run}no metrics file"
        legal = "--metrics-file FILE.jsonl, which megazero pretrain --metrics-file FILE.jsonl writes"
        raise DataError(Problem(given, "a summary is made of the steps in a metrics file", legal))
    return found
