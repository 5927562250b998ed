"""Gathers text for benchmarks from what this machine has installed: sources and documentation, every document once.

In real text a tokenizer meets new words all the way, unlike in one file repeated.  Documents come in the order of the
hashes of their contents, so a part from the front is a fair sample, and the same installation gives the same text.
"""

import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson
import xxhash

from megazero.files import written_aside
from megazero.prepare.text.source_text import SourceFile, find_sources

_ENDINGS = "c cc cmake cpp css cu cuh el h hh hpp html java js md pl pm py pyi rb rst sh tcl tex texi txt vim"
PATTERNS = (*(f"*.{ending}" for ending in _ENDINGS.split()), "README*", "changelog", "copyright")
EXCLUDED = ("__pycache__", "*.min.js", "*.min.css")
# Folders that most systems have; those of the running Python come before them.
SYSTEM = ("/usr/share", "/usr/include", "/usr/lib/python3", "/usr/lib/gcc")
# Bytes of a document: smaller files hold hardly any text, and larger ones are mostly tables.
_LEAST, _MOST = 64, 1 << 20


class Text(NamedTuple):
    """A corpus as a jsonl file with the keys `text` and `name`.  nbytes: the size of the file."""

    path: Path
    documents: int
    nbytes: int


def installed() -> list[Path]:
    """Return the folders with text: the standard library, installed packages, the system's documentation and headers.

    No folder is below another one of them.
    """
    paths = [sysconfig.get_paths()["stdlib"], *(path for path in sys.path if path.endswith("-packages")), *SYSTEM]
    folders = [Path(path).resolve() for path in paths if Path(path).is_dir()]
    return [one for one in dict.fromkeys(folders) if not any(other in one.parents for other in folders)]


def gather(roots: Sequence[Path], nbytes: int, output: Path) -> Text:
    """Write documents below `roots` until the file has `nbytes`, or there are no more."""
    found: dict[bytes, SourceFile] = {}
    for source in find_sources(roots, PATTERNS, EXCLUDED):
        content = _content(source.path)
        if content:
            found.setdefault(xxhash.xxh3_128_digest(content), source)
    size = documents = 0
    with written_aside(output) as stream:
        for digest in sorted(found):
            if size >= nbytes:
                break
            content = _content(found[digest].path)
            name = found[digest].name.encode(errors="replace").decode()
            line = orjson.dumps({"text": content.decode(), "name": name}) + b"\n"
            stream.write(line)
            size, documents = size + len(line), documents + 1
    return Text(output, documents, size)


def counted(path: Path) -> Text:
    """Return the text of an existing jsonl file, with one document a line, whose documents and bytes are counted."""
    documents = nbytes = 0
    for line in _lines(path):
        documents, nbytes = documents + 1, nbytes + len(line)
    return Text(path, documents, nbytes)


def front(text: Text, nbytes: int, output: Path) -> Text:
    """Write the first documents of a text, at least one, until the new file has `nbytes`."""
    size = documents = 0
    with written_aside(output) as stream:
        for line in _lines(text.path):
            if documents and size >= nbytes:
                break
            stream.write(line)
            size, documents = size + len(line), documents + 1
    return Text(output, documents, size)


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        yield from stream


def _content(path: Path) -> bytes:
    """Return the content of a file, or nothing where it is no text or has too few or too many bytes."""
    try:
        content = path.read_bytes() if _LEAST <= path.stat().st_size <= _MOST else b""
        text = content.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return content if text.strip() and "\0" not in text else b""
