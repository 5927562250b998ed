"""Ends a program that is interrupted while it imports its modules, or started on Windows, without a traceback.

Programs import this module before all others, so it imports next to nothing.
"""

import os
import signal
import sys
from types import FrameType

NOT_ON_WINDOWS = "megazero needs Linux or macOS; on Windows run it inside WSL (https://aka.ms/wsl)"


def end_without_traceback() -> None:
    """End the program in a sentence on Windows; elsewhere make Ctrl-C end it in a word.

    Ctrl-C does until `megazero.console.run_program` catches it.
    """
    if sys.platform == "win32":
        os.write(2, f"error: {NOT_ON_WINDOWS}\n".encode())
        os._exit(2)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell has set it to be ignored
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(128 + number)
