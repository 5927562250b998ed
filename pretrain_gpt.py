"""Pretrain a GPT: `torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --zero-stage 2 ...`."""

if __name__ == "__main__":  # before the other imports
    from megazero.interrupts import end_without_traceback

    end_without_traceback()

import sys

from megazero.commands.pretrain import main
from megazero.console import run_program

if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
