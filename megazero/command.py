"""The installed command `megazero`, which is `python -m megazero`."""

import sys

from megazero.interrupts import end_without_traceback


def run() -> int:
    """Run the command line; return the exit status."""
    end_without_traceback()
    from megazero.__main__ import main
    from megazero.console import run_program

    return run_program(lambda: main(sys.argv[1:]))
