"""Inspect a corpus: counts, documents, lengths, samples as a run reads them; verify it, compare it with another."""

if __name__ == "__main__":  # before the other imports
    from megazero.interrupts import end_without_traceback

    end_without_traceback()

import sys

from megazero.commands.inspect import main
from megazero.console import run_program

if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
