"""Commands for users: `python -m megazero verify-layout ...`."""

if __name__ == "__main__":  # before the other imports
    from megazero.interrupts import end_without_traceback

    end_without_traceback()

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from megazero.command_line.parse import ParsedRun, parse
from megazero.console import Console, run_program
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.parallel.launch import Launch
from megazero.rules.run import advice
from megazero.train.check import check
from megazero.verify.configuration import (
    VerifyArguments,
    in_float64,
    overridden,
    split_verify_steps,
    without_checkpoints,
)
from megazero.verify.verdict import BOUNDS

VERIFY_LAYOUT = f"""usage: torchrun --nproc-per-node N -m megazero verify-layout [--verify-steps N] FLAGS

Trains a few steps in the layout of FLAGS and, on rank 0 alone, the same steps as one process, both in float64 without
dropout, and compares losses, gradient norms, every gradient and every weight by name.  Prints the first difference, and
what it indicates about the cause.  Exit status 0: all agree; 1: something differs.

FLAGS are those of pretrain_gpt.py, whose --help lists them: model, batch, layout, and --data-path or --mock-data.
Nothing is loaded or saved.  --verify-steps N: steps to compare (default: 3).

One process holds the whole model, 32 bytes a parameter, and makes each step alone, while the others wait: verify a
layout with fewer layers (--num-layers), a shorter sequence or a smaller batch than it is made for; a step that takes
one process longer than ten minutes needs --distributed-timeout-minutes.

{BOUNDS}
"""
USAGE = """usage: python -m megazero COMMAND ...

verify-layout    whether a layout computes what one process computes; see verify-layout --help
"""


def verify_layout(words: Sequence[str]) -> int:
    """Check the flags, join the other ranks, compare, and print the report; return the exit status."""
    if {"--help", "-h"} & set(words):
        Console().line(VERIFY_LAYOUT)
        return 0
    launch, console = Launch.from_environment(), Console()
    own = split_verify_steps(words)
    parsed = _parse(own, launch)
    for notice in _notices(parsed, launch):
        console.line(notice)
    inputs = check(without_checkpoints(parsed.config), launch)
    replaced = overridden(parsed.config)
    console.line(f"verify-layout computes in float64{f', in place of {replaced}' if replaced else ''}")
    # This imports torch, so it comes after all checks that don't need it.
    from megazero.verify import program

    report = program.verify_layout(parsed.config, launch, inputs, steps=own.steps)
    for line in report.lines():
        console.line(line)
    return 0 if report.agrees else 1


def _parse(own: VerifyArguments, launch: Launch) -> ParsedRun:
    """Parse the run's flags; raise ConfigError with the problems of all words."""
    try:
        parsed = parse(own.rest, world_size=launch.world_size)
    except ConfigError as error:
        raise ConfigError(*own.problems, *error.problems) from None
    raise_problems(ConfigError, own.problems)
    return parsed


def _notices(parsed: ParsedRun, launch: Launch) -> Iterator[str]:
    """Yield the notices about flags, with advice for the run that takes place."""
    config, size = parsed.config, launch.world_size
    stale = advice(config, size)
    yield from (notice for notice in parsed.notices if notice not in stale)
    yield from advice(in_float64(config), size)


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = MappingProxyType({"verify-layout": verify_layout})


def main() -> int:
    """Run the command that the first word of the command line names; return the exit status."""
    words = sys.argv[1:]
    if not words or words[0] in ("--help", "-h"):
        Console().line(USAGE)
        return 0 if words else 2
    if words[0] not in COMMANDS:
        raise ConfigError(Problem(words[0], "must be the name of a command", ", ".join(COMMANDS)))
    return COMMANDS[words[0]](words[1:])


if __name__ == "__main__":
    sys.exit(run_program(main))
