"""Reads `--processes N`, by which a program starts the processes of its job itself, and passes on their statuses."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megazero.errors import ConfigError, Problem

FLAG = "--processes"
# The variable of the ranks' environment that names the folder where each leaves its exit status.
STATUS_FOLDER = "MEGAZERO_STATUS_FOLDER"
HELP = f"{FLAG} N: start N processes on this machine (without it: torchrun, srun or mpirun start them; or one process)"


class OwnProcesses(NamedTuple):
    """A command line without `--processes`, and the number of processes; None without the flag."""

    number: int | None
    rest: list[str]


def split_processes(words: Sequence[str]) -> OwnProcesses:
    """Separate `--processes N` from the words; the last one counts.

    Raises ConfigError for a value that is no number of processes.
    """
    rest: list[str] = []
    given: str | None = None
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if name != FLAG:
            rest.append(word)
            continue
        given = value if equals else remaining.pop(0) if remaining and not remaining[0].startswith("--") else ""
    if given is None:
        return OwnProcesses(None, rest)
    if not (given.isascii() and given.isdecimal() and int(given) > 0):
        rule = "the number of processes on this machine is a whole number, at least 1"
        raise ConfigError(Problem(f"{FLAG} {given}".rstrip(), rule, f"{FLAG} 4"))
    return OwnProcesses(int(given), rest)


def leave_status(status: int, rank: int) -> None:
    """Write a rank's exit status for the program that has started it by `--processes`, if one has.

    torch's agent, by which it has, reports after a signal only that there was one.
    """
    folder = os.environ.get(STATUS_FOLDER)
    if folder is not None and os.path.isdir(folder):
        Path(folder, f"status_{rank}").write_text(str(status), encoding="ascii")


def read_statuses(folder: Path) -> list[int]:
    """Return the exit statuses that ranks have left in the folder."""
    return [int(path.read_text(encoding="ascii") or 0) for path in sorted(folder.glob("status_*"))]
