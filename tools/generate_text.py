"""Continue a text with a trained model: a checkpoint of any layout, on one process or over several."""

if __name__ == "__main__":  # before the other imports
    from megazero.interrupts import end_without_traceback

    end_without_traceback()

import sys

from megazero.commands.generate import main
from megazero.console import run_program

if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
