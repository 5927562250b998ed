"""Command-line arguments under DeepSpeed's names."""

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config to a parser, and return it."""
    group = parser.add_argument_group("DeepSpeed", "the configuration of the engine")
    group.add_argument(
        "--deepspeed", action="store_true", help="a switch for the program's own use; the engine does not read it"
    )
    group.add_argument(
        "--deepspeed_config", metavar="FILE", help="JSON file with the configuration, for initialize(args=...)"
    )
    return parser
