"""What a command takes: seconds of CPU, its own and those of all processes below it, wall seconds, and memory.

The command is started by a small Python of its own, this file as a program, because the kernel counts into a process's
peak of memory what its parent held when it was started, and a benchmark has torch in it.  The peak is that of the
largest process, not of all together.  Processes that nobody waits for are not counted.
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
    """cpu, wall: seconds.  peak: resident bytes of the largest process.  said: what it wrote to stdout."""

    cpu: float
    wall: float
    peak: int
    said: str


class CommandFailed(RuntimeError):
    """A command that came to no good end; says how, with the last line that it wrote."""


def measure(words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Usage:
    """Runs a command in `folder`, with more in its environment; raises CommandFailed for any exit status but 0."""
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
    """`usage.py TOLD.json COMMAND ...`: the command's exit status; what it took goes to the file."""
    began = time.perf_counter()
    process = subprocess.Popen(sys.argv[2:])
    _, status, taken = os.wait4(process.pid, 0)  # of the process and of all that it waited for
    wall = time.perf_counter() - began
    usage = {"cpu": taken.ru_utime + taken.ru_stime, "wall": wall, "peak": taken.ru_maxrss * 1024}
    Path(sys.argv[1]).write_text(json.dumps(usage), encoding="utf-8")
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
