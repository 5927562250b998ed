"""Pretrain a BLOOM: pretrain_gpt.py with --position-embedding-type alibi --embed-layernorm in front of its flags."""

if __name__ == "__main__":  # before the other imports
    from megazero.interrupts import end_without_traceback

    end_without_traceback()

import sys

from megazero.commands.pretrain import main
from megazero.console import run_program

# What BLOOM has and a GPT has not; its sizes are flags, or a preset's.
BLOOM = ("--position-embedding-type", "alibi", "--embed-layernorm")

if __name__ == "__main__":
    sys.exit(run_program(lambda: main([*BLOOM, *sys.argv[1:]])))
