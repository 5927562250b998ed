"""The command `megazero COMMAND ...`, also `python -m megazero COMMAND ...`."""

if __name__ == "__main__":  # before the other imports
    from megazero.interrupts import end_without_traceback

    end_without_traceback()

import difflib
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType

from megazero.console import Console, run_program
from megazero.errors import ConfigError, Problem

# {command: what it does}; its module in megazero.commands has the same name.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "pretrain": "train a GPT",
        "preprocess": "turn text into token files",
        "train-tokenizer": "train a tokenizer on text",
        "text-to-jsonl": "turn files of text into JSON lines",
        "clean": "remove documents of little use, and duplicates, from a corpus of text",
        "merge": "join token files",
        "inspect": "show, verify and compare token files",
        "generate": "generate text from a checkpoint",
        "evaluate": "evaluate a checkpoint on files: perplexity, last words, multiple choice",
        "checkpoint": "inspect, verify and compare checkpoints",
        "convert": "exchange checkpoints with transformers, and import those of Megatron-LM and DeepSpeed",
        "verify-layout": "compare what a layout computes with what one process computes",
        "verify-module": "compare what a module of yours computes in a layout with plain PyTorch on one process",
        "plan": "run a job of any size dry: its memory, its traffic, and whether it fits a machine",
        "preflight": "test the nodes of a job",
        "summarize": "put a run's figures into a table",
        "completion": "print a script that completes commands and flags in a shell",
    }
)


def main(words: Sequence[str]) -> int:
    """Run the command that the first word names; return the exit status."""
    if not words or words[0] in ("--help", "-h"):
        Console().line(usage())
        return 0 if words else 2
    name = words[0]
    if name == "--version":
        Console().line(import_module("megazero").__version__)
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise ConfigError(Problem(name, "the first word is the name of a command", *(near or [", ".join(COMMANDS)])))
    command = import_module(f"megazero.commands.{name.replace('-', '_')}")
    status: int | None = command.main(words[1:])
    return status or 0


def usage() -> str:
    """Return the list of commands."""
    width = max(map(len, COMMANDS)) + 4
    lines = (f"{name.ljust(width)}{purpose}" for name, purpose in COMMANDS.items())
    return "\n".join(
        ("usage: megazero COMMAND ...", "", *lines, "", "megazero COMMAND --help shows a command's flags.")
    )


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
