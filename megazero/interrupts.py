"""Ends a program that is interrupted while it imports its modules, without a traceback.

Programs import this module before all others, so it imports next to nothing.
"""

import os
import signal
from types import FrameType


def end_without_traceback() -> None:
    """Make Ctrl-C end the program in a word, until `megazero.console.run_program` catches it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell has set it to be ignored
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(128 + number)
