"""Measures what a command takes: seconds of CPU, with those of all processes below it, wall seconds, and memory.

The command is started by a small Python process, which runs this file as a program, because the kernel counts into a
process's peak of memory what its parent held when it was started, and a benchmark holds torch.  The peak is that of the
largest process, not of all together.  Processes for which their parent does not wait are not counted.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """The resources that a command took, and its output.

    cpu, wall: seconds.  peak: resident bytes of the largest process.  said: its output to stdout.
    """

    cpu: float
    wall: float
    peak: int
    said: str


class CommandFailed(RuntimeError):
    """Raised when a command has failed, with its exit status and the last line that it wrote."""


def measure(words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Usage:
    """Run a command in `folder` with this added to its environment, and return what it took.

    Raises CommandFailed for any exit status but 0.
    """
    with tempfile.TemporaryDirectory() as place:
        told = Path(place, "usage.json")
        done = subprocess.run(
            [sys.executable, "-S", "-E", str(Path(__file__).resolve()), str(told), *words],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise CommandFailed(f"exit status {done.returncode}: {lines[-1] if lines else 'nothing said'}")
        taken = json.loads(told.read_text(encoding="utf-8"))
    return Usage(taken["cpu"], taken["wall"], taken["peak"], done.stdout)


def main() -> int:
    """Run `usage.py FILE.json COMMAND ...`: write what the command took to the file, and return its exit status."""
    began = time.perf_counter()
    process = subprocess.Popen(sys.argv[2:])
    _, status, taken = os.wait4(process.pid, 0)  # for the process and all processes that it waited for
    wall = time.perf_counter() - began
    usage = {"cpu": taken.ru_utime + taken.ru_stime, "wall": wall, "peak": taken.ru_maxrss * 1024}
    Path(sys.argv[1]).write_text(json.dumps(usage), encoding="utf-8")
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
