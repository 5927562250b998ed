"""The flags of tools that compute with a run's model: its checkpoint, its tokenizer, and the layout of processes."""

import argparse
from pathlib import Path

from megazero.command_line.tools import Number
from megazero.generate.model_layout import ACROSS
from megazero.prepare.arguments import add_tokenizer_arguments


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --load and --step, which name a checkpoint."""
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="a run's checkpoints, or one of them")
    parser.add_argument(
        "--step", action=Number, kind="int", metavar="N", help="step of the run; without it, the newest"
    )


def add_place_arguments(parser: argparse.ArgumentParser, processes: str) -> None:
    """Add the tokenizer's flags, and those of the layout and the device; processes: what the layout's sizes make."""
    tokenizer = parser.add_argument_group("tokenizer", "needed only where the run's configuration names none")
    add_tokenizer_arguments(tokenizer, required=False)
    layout = parser.add_argument_group("layout", f"of the processes: {processes}")
    layout.add_argument(
        "--tensor-model-parallel-size",
        action=Number,
        kind="int",
        default=1,
        metavar="N",
        help="processes that share every layer",
    )
    layout.add_argument(
        "--pipeline-model-parallel-size", action=Number, kind="int", default=1, metavar="N", help="pipeline stages"
    )
    layout.add_argument(ACROSS, dest="across_nodes", action="store_true", help="share layers with other nodes too")
    layout.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
