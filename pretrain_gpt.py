"""Pretrain a GPT: `torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --zero-stage 2 ...`."""

if __name__ == "__main__":  # before the other imports
    from megazero.interrupts import end_without_traceback

    end_without_traceback()

import sys

from megazero.command_line.parse import parse
from megazero.console import Console, run_program
from megazero.parallel.launch import Launch
from megazero.train.check import check


def main() -> int:
    """Read the command line and check it; then join the other ranks, build the run and train; return the status."""
    launch = Launch.from_environment()
    parsed = parse(world_size=launch.world_size)
    for notice in parsed.notices:
        Console().line(notice)
    inputs = check(parsed.config, launch)
    # This imports torch, which takes a second, so a mistyped flag is reported before it.
    from megazero.train.program import pretrain

    return pretrain(parsed.config, launch, inputs)


if __name__ == "__main__":
    sys.exit(run_program(main))
