"""Verify a module of a user: train it in a layout and by plain PyTorch on one process, and compare all by name."""

import argparse
from collections.abc import Sequence

from megazero.command_line.processes import HELP
from megazero.command_line.tools import Flags, Number
from megazero.console import Console
from megazero.parallel.job import read_job
from megazero.verify.user_file import functions_of, split_place
from megazero.verify.verdict import BOUNDS

DESCRIPTION = f"""Trains a module of yours for a few steps by megazero.initialize on all processes and, on rank 0 alone,
by plain PyTorch on the batches of all of them, both in float64, and compares losses, gradient norms, every gradient and
every weight by name.  Prints the first difference, and what it indicates about the cause.  Exit status 0: all agree;
1: something differs.  FILE.py has three functions:

    make_model()         returns the torch.nn.Module; any name, which is given behind the file
    loss(model, batch)   returns the mean loss of a batch
    batches()            returns the batches: one for each micro-batch of each process and step, on all the same
                         (megazero.verify_module has the order)

{HELP}

{BOUNDS}"""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line without `--processes`."""
    flags = Flags(
        prog="megazero verify-module",
        usage="megazero verify-module [--processes N] FILE.py:NAME [FLAGS]",
        description=DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = flags.add_argument
    add("module", metavar="FILE.py:NAME", help="the file, and the function in it that makes the module")
    add("--loss", metavar="NAME", default="loss", help="the function that returns a batch's loss (default: loss)")
    add("--batches", metavar="NAME", default="batches", help="the function that returns batches (default: batches)")
    add("--optimizer", metavar="NAME", help="a function that makes a torch optimizer of the module's parameters")
    add("--config", metavar="FILE", help="the configuration of megazero.initialize, .json or .yaml (default: AdamW)")
    stage = "the ZeRO stage, in place of the configuration's"
    add("--zero-stage", dest="stage", metavar="N", action=Number, kind="int", ge=0, le=3, help=stage)
    steps = "at most so many steps (default: all batches')"
    add("--verify-steps", metavar="N", action=Number, kind="int", ge=1, help=steps)
    return flags.parse_args(list(words))


def main(words: Sequence[str]) -> int:
    """Check the words, take the functions from the user's file, compare, and print the report; return the status."""
    job, console = read_job(words), Console()
    options = parse_arguments(job.rest)
    path, name = split_place(options.module)
    # What imports torch comes after all checks that don't need it.
    if job.processes is not None:
        from megazero.cluster.local_processes import start_processes

        return start_processes(job)
    for notice in job.notices:
        console.line(notice)
    functions = functions_of(
        path, [each for each in (name, options.loss, options.batches, options.optimizer) if each is not None]
    )
    from megazero.verify import program

    report = program.verify_module(
        functions, options.config, stage=options.stage, steps=options.verify_steps, print_line=console.line
    )
    for line in report.lines():
        console.line(line)
    return 0 if report.agrees else 1
