"""Summarize a run: validation before and after, pace, its newest checkpoint, the command for TensorBoard."""

if __name__ == "__main__":  # before the other imports
    from megazero.interrupts import end_without_traceback

    end_without_traceback()

import argparse
import shlex
import sys
from pathlib import Path

from megazero.checkpoint.folders import newest
from megazero.command_line.tools import Flags
from megazero.console import Console, run_program
from megazero.report.summary import summarize


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--metrics-file", type=Path, required=True, metavar="FILE.jsonl", help="metrics file of the run"
    )
    parser.add_argument("--load", type=Path, metavar="DIR", help="the run's checkpoints")
    parser.add_argument("--tensorboard-dir", type=Path, metavar="DIR", help="the run's TensorBoard folder")
    return parser.parse_args()


def main() -> None:
    """Read the metrics file and print the summary."""
    arguments, console = parse_arguments(), Console()
    for line in summarize(arguments.metrics_file).lines():
        console.line(line)
    if arguments.load is not None:
        console.line(f"{'checkpoint':<16} {newest(arguments.load) or 'none'}")
    if arguments.tensorboard_dir is not None:
        command = shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(arguments.tensorboard_dir)])
        console.line(f"{'TensorBoard':<16} {command}")


if __name__ == "__main__":
    sys.exit(run_program(main))
