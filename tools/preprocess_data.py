"""Turn text into token files: PREFIX_KEY_document.bin, .idx and .json (counts, tokenizer) for every JSON key."""

if __name__ == "__main__":  # before the other imports
    from megazero.interrupts import end_without_traceback

    end_without_traceback()

import sys

from megazero.commands.preprocess import main
from megazero.console import run_program

if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
