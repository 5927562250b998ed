"""Inspect checkpoints: the content of one, whether it is sound, how two differ, what has become of their run."""

if __name__ == "__main__":  # before the other imports
    from megazero.interrupts import end_without_traceback

    end_without_traceback()

import sys

from megazero.commands.checkpoint import main
from megazero.console import run_program

if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
