"""Summarize a run: validation before and after, pace, its newest checkpoint, TensorBoard's command; or as a page."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megazero.checkpoint.folders import MANIFEST, neighbours, newest
from megazero.command_line.tools import Flags
from megazero.console import Console
from megazero.errors import DataError, Problem
from megazero.report.summary import read_records, summarize
from megazero.train.leaving import PAGE, figures_of, run_id, write_page


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(prog="megazero summarize", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--metrics-file",
        type=Path,
        metavar="FILE.jsonl",
        help="metrics file of the run; without it the one that the run under --load has written, or its curves.jsonl",
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
    """Read the run's figures and print the summary."""
    arguments, console = parse_arguments(words), Console()
    if arguments.load is not None and (arguments.load / MANIFEST).is_file():
        arguments.load = arguments.load.parent  # one of the run's checkpoints
    figures = _figures(arguments)
    for line in summarize(read_records(figures, run_id(arguments.load))).lines():
        console.line(line)
    if arguments.load is not None:
        console.line(f"{'checkpoint':<16} {newest(arguments.load) or 'none'}")
    if arguments.tensorboard_dir is not None:
        command = shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(arguments.tensorboard_dir)])
        console.line(f"{'TensorBoard':<16} {command}")
    page = None if arguments.load is None else arguments.load / PAGE
    if arguments.html is not None:
        write_page(arguments.html, arguments.load, figures)
        page = arguments.html
    if page is not None and page.is_file():
        console.line(f"{'page':<16} {page}")


def _figures(arguments: argparse.Namespace) -> Path:
    if arguments.metrics_file is not None:
        return Path(arguments.metrics_file)
    if arguments.load is None:
        given = "neither --load nor --metrics-file"
        raise DataError(Problem(given, "a summary is made of a run's figures", "--load DIR of a run that saves"))
    found = figures_of(arguments.load)
    if found is None and not arguments.load.is_dir():
        near = ", ".join(f"--load {path}" for path in neighbours(arguments.load))
        raise DataError(Problem(f"--load {arguments.load}", "there is no such folder", near))
    if found is None:
        given = f"--load {arguments.load}: no figures of a run are here"
        legal = "the folder of megazero pretrain --save, or --metrics-file FILE.jsonl"
        raise DataError(Problem(given, "a summary is made of curves.jsonl or a metrics file", legal))
    return found
