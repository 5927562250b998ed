"""Finds and checks the files of --input: files, folders, patterns and standard input, recognised by their endings.

    .jsonl .json .ndjson   JSON lines          .gz .zst after any of the first two rows: compressed
    .txt                   plain text
    .parquet               a table
    -                      standard input: JSON lines, or the format of --input-format

A folder stands for all files below it with such an ending, a pattern (`*`, `?`, `[...]`, `**`) for all files it
matches; both in the order of their names, and without names that begin with a dot.
"""

import glob
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from megazero.data.storage import is_remote
from megazero.errors import DataError, Problem, raise_problems

JSON, TEXT, PARQUET = FORMATS = ("jsonl", "text", "parquet")
FORMAT_ENDINGS = MappingProxyType({".jsonl": JSON, ".json": JSON, ".ndjson": JSON, ".txt": TEXT, ".parquet": PARQUET})
COMPRESSION_ENDINGS = MappingProxyType({".gz": "gzip", ".zst": "zstd"})
STANDARD_INPUT = "-"


class InputFile(NamedTuple):
    """A file to read.

    path: the file's path, "-" for standard input.  format: one of FORMATS.  compression: "gzip", "zstd" or "".
    size: bytes of the file on the disk, 0 if unknown.  modified: the time of its last change, in nanoseconds.
    is_pipe: True if it can be read only once.
    """

    path: str
    format: str
    compression: str = ""
    size: int = 0
    modified: int = 0
    is_pipe: bool = False

    @property
    def is_seekable(self) -> bool:
        """True if bytes in the middle of the file can be read without those before them."""
        return not self.compression and self.format != PARQUET and not self.is_pipe


def find_inputs(words: Sequence[str], input_format: str | None = None) -> list[InputFile]:
    """Return every file that `words` name, in order; raise DataError with all words that name none.

    input_format: the format of standard input, and of files without a known ending.
    """
    found: list[InputFile] = []
    problems: list[Problem] = []
    for word in words:
        for item in _expand(word, input_format):
            if isinstance(item, Problem):
                problems.append(item)
            else:
                found.append(item)
    pipes = [file.path for file in found if file.is_pipe]
    for path in dict.fromkeys(pipes):
        if pipes.count(path) > 1:
            problems.append(Problem(f"--input {path} {path}", "a pipe can be read once", f"--input {path}"))
    raise_problems(DataError, problems)
    return found


def file_format(path: str) -> tuple[str | None, str]:
    """Return the format (None for an unknown ending) and the compression that a file's name has."""
    endings = [ending.lower() for ending in Path(path).suffixes[-2:]]
    compression = COMPRESSION_ENDINGS.get(endings[-1], "") if endings else ""
    if compression:
        endings.pop()
    return (FORMAT_ENDINGS.get(endings[-1]) if endings else None), compression


def _expand(word: str, input_format: str | None) -> Iterator[InputFile | Problem]:
    if word == STANDARD_INPUT:
        if input_format == PARQUET:
            yield Problem("--input - --input-format parquet", "a table is read from its end", "a file")
        elif sys.stdin is None or sys.stdin.isatty():
            yield Problem("--input - at a terminal", "standard input is a pipe or a file", "zcat FILE | ...")
        else:
            yield InputFile(STANDARD_INPUT, input_format or JSON, is_pipe=True)
        return
    if os.path.isdir(word):
        problems: list[Problem] = []
        names = sorted(name for name in _below(word, problems) if file_format(name)[0])
        yield from problems
        yield from (_opened(name, None) for name in names)
        if not names and not problems:
            yield Problem(f"--input {word}", "some file in the folder has a known ending", _endings())
    elif not os.path.exists(word) and is_remote(word):
        yield Problem(
            f"--input {word}", "text is read from a disk, or from a pipe", "its driver's copy command | ... --input -"
        )
    elif not os.path.exists(word) and glob.has_magic(word):
        names = sorted({name for name in glob.glob(word, recursive=True) if not os.path.isdir(name)})
        yield from (_opened(name, input_format) for name in names)
        if not names:
            yield Problem(f"--input {word}", "the pattern matches some file")
    else:
        yield _opened(word, input_format)


def _below(top: str, problems: list[Problem]) -> Iterator[str]:
    """Yield all files below a folder; links are followed, but no folder is entered twice."""

    def refuse(error: OSError) -> None:
        problems.append(Problem(f"--input {error.filename}", f"must be a readable folder: {error.strerror}"))

    entered: set[str] = set()
    for folder, below, names in os.walk(top, onerror=refuse, followlinks=True):
        # Assigned in place: os.walk enters the folders in this list.
        below[:] = sorted(name for name in below if not name.startswith("."))
        if (real := os.path.realpath(folder)) in entered:
            below.clear()
            continue
        entered.add(real)
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _opened(name: str, input_format: str | None) -> InputFile | Problem:
    """Return the file, or its problem, without reading it."""
    if not name:
        return Problem("--input ''", "must be a file")
    try:
        status = os.stat(name)
    except OSError as error:
        return Problem(f"--input {name}", f"must be a file: {error.strerror or error}")
    known, compression = file_format(name)
    chosen = known or input_format
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
        return Problem(f"--input {name}", "must be a file")
    if not os.access(name, os.R_OK):
        return Problem(f"--input {name}", "must be a readable file")
    if chosen is None:
        return Problem(f"--input {name}", "must have a known ending", f"{_endings()}, or --input-format")
    if compression and chosen == PARQUET:
        return Problem(f"--input {name}", "a table compresses its columns itself", "a .parquet file")
    is_pipe = stat.S_ISFIFO(status.st_mode)
    if is_pipe and chosen == PARQUET:
        return Problem(f"--input {name}", "a table is read from its end", "a file")
    return InputFile(name, chosen, compression, status.st_size, status.st_mtime_ns, is_pipe)


def _endings() -> str:
    plain = ", ".join(FORMAT_ENDINGS)
    return f"{plain}, or one of these but .parquet with {' or '.join(COMPRESSION_ENDINGS)}"


def pipe_problems(files: Sequence[InputFile], *, resumes: bool, num_shards: int) -> list[Problem]:
    """Return the problems of standard input and other pipes, which can be read only once, by one process."""
    pipe = next((file.path for file in files if file.is_pipe), None)
    if pipe is None:
        return []
    problems = []
    if resumes:
        problems.append(Problem(f"--input {pipe} with --resume", "a pipe can be read only once", "files"))
    if num_shards > 1:
        problems.append(Problem(f"--input {pipe} with --num-shards", "shards are parts of files", "files"))
    return problems
