"""Verify a layout: train a few steps in it and on one process, and compare everything by name."""

from collections.abc import Iterator, Sequence

from megazero.command_line.parse import ParsedRun, parse
from megazero.command_line.processes import HELP
from megazero.commands.pretrain import deciding
from megazero.console import Console
from megazero.errors import ConfigError, raise_problems
from megazero.parallel.job import read_job
from megazero.rules.run import advice
from megazero.train.start.check import check
from megazero.verify.configuration import (
    VerifyArguments,
    in_float64,
    overridden,
    split_verify_steps,
    without_checkpoints,
)
from megazero.verify.verdict import BOUNDS

USAGE = f"""usage: megazero verify-layout [--processes N] [--verify-steps N] FLAGS

Trains a few steps in the layout of FLAGS and, on rank 0 alone, the same steps as one process, both in float64 without
dropout, quantized wires and late updates, and compares losses, gradient norms, every gradient and every weight by name.
Prints the first difference, and what it indicates about the cause.  Exit status 0: all agree; 1: something differs.

{HELP}
FLAGS are those of megazero pretrain, whose --help lists them: model, batch, layout, and --data-path or --mock-data.
Nothing is loaded or saved.  --verify-steps N: steps to compare (default: 3).

One process holds the whole model, 32 bytes a parameter, and makes each step alone, while the others wait: verify a
layout with fewer layers (--num-layers), a shorter sequence or a smaller batch than it is made for; a step that takes
one process longer than ten minutes needs --distributed-timeout-minutes.

{BOUNDS}
"""


def main(words: Sequence[str]) -> int:
    """Check the flags, join the other ranks, compare, and print the report; return the exit status."""
    if {"--help", "-h"} & {*words}:
        Console().line(USAGE)
        return 0
    job, console = read_job(words), Console()
    launch, own = job.launch, split_verify_steps(job.rest)
    parsed = _parse(own, job.world_size)
    if job.processes is not None:
        from megazero.cluster.local_processes import start_processes

        return start_processes(job)
    for notice in (*_notices(parsed, job.world_size), *job.notices):
        console.line(notice)
    inputs = check(without_checkpoints(parsed.config), launch)
    replaced = overridden(parsed.config)
    console.line(f"verify-layout computes in float64{f', in place of {replaced}' if replaced else ''}")
    # This imports torch, so it comes after all checks that don't need it.
    from megazero.verify import program

    report = program.verify_layout(parsed.config, launch, inputs, deciding(inputs), steps=own.steps)
    for line in report.lines():
        console.line(line)
    return 0 if report.agrees else 1


def _parse(own: VerifyArguments, size: int) -> ParsedRun:
    """Parse the run's flags; raise ConfigError with the problems of all words."""
    try:
        parsed = parse(own.rest, world_size=size)
    except ConfigError as error:
        raise ConfigError(*own.problems, *error.problems) from None
    raise_problems(ConfigError, own.problems)
    return parsed


def _notices(parsed: ParsedRun, size: int) -> Iterator[str]:
    """Yield the notices about flags, with advice for the run that takes place."""
    config = parsed.config
    stale = advice(config, size)
    yield from (notice for notice in parsed.notices if notice not in stale)
    yield from advice(in_float64(config), size)
