"""Makes corpora of text files: one JSON object a line, for every file, or for every piece between separators.

Files are sorted by a hash of their names, so any contiguous part of the corpus (a held-out split, say) is a fair sample
of the whole, on every machine.
"""

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megazero.errors import DataError, Problem, raise_problems
from megazero.files import cannot_read, read_bounded
from megazero.prepare.text.bad_lines import BadLines
from megazero.prepare.text.chunks import MAX_DOCUMENT_BYTES, DocumentRules, find_chunks
from megazero.prepare.text.documents import read_objects
from megazero.prepare.text.inputs import TEXT, InputFile, file_format
from megazero.prepare.text.jsonl_output import ending_problems, written_lines

# Installed packages are not the standard library; its tests are tables of cases more than text, and its code pages
# tables of hexadecimal digits, an eighth of all bytes, which would dominate a small model's output.
STDLIB_EXCLUDED = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings")


class SourceFile(NamedTuple):
    """A file, with its name in the corpus, which is relative and has / between folders."""

    name: str
    path: Path


class SourceSummary(NamedTuple):
    """The counts of what was written.  skipped: files (or pieces) that are not UTF-8, and files of white space."""

    documents: int
    text_bytes: int
    skipped: int


def find_sources(roots: Sequence[Path], patterns: Sequence[str], excluded: Sequence[str]) -> list[SourceFile]:
    """Return the files below `roots` whose name matches one of `patterns`, in hashed order.

    excluded: patterns of files to leave out: those whose relative name, or any folder or file name in it, matches one.
    A root that is a file is read whatever its name.  Raises DataError for missing roots, or when nothing is found.
    """
    missing = [Problem(f"--input {root}", "must be a folder or a file") for root in roots if not root.exists()]
    if missing:
        raise DataError(*missing)
    found = [source for root in roots for source in _walk(root, patterns, excluded)]
    if not found:
        where = ", ".join(map(str, roots))
        raise DataError(Problem(f"--input {where} --glob {' '.join(patterns)}", "some file matches"))
    return sorted(found, key=_hashed)


def find_stdlib() -> list[SourceFile]:
    """Return the sources of the running interpreter's standard library, without tests and installed packages."""
    return find_sources([Path(sysconfig.get_paths()["stdlib"])], ["*.py"], STDLIB_EXCLUDED)


def write_jsonl(sources: Iterable[SourceFile], output: Path, separator: str | None = None) -> SourceSummary:
    """Write {"text": ..., "name": ...} lines, atomically, compressed by the ending of `output`.

    separator: the text that cuts a file into documents called NAME#1, NAME#2, ...; such files may be larger than
    memory, and .gz or .zst.
    """
    raise_problems(DataError, ending_problems("--output", output))
    documents = text_bytes = skipped = 0
    with written_lines(output) as stream:
        for source in sources:
            for name, text in _pieces(source, separator) if separator else [(source.name, _text(source.path))]:
                if text is None:
                    skipped += 1
                    continue
                line = json.dumps({"text": text, "name": name}, ensure_ascii=False)
                # Only a file's name can have characters outside Unicode; they become question marks.
                stream.write(line.encode(errors="replace") + b"\n")
                documents += 1
                text_bytes += len(text.encode())
        if not documents:
            raise DataError(Problem(f"--output {output}: {skipped} files, none of them text", "some file is UTF-8"))
    return SourceSummary(documents, text_bytes, skipped)


def _pieces(source: SourceFile, separator: str) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the text of every piece that is not white space alone; None for a text that is not UTF-8."""
    path, bad = str(source.path), BadLines()
    rules = DocumentRules(text_rule="separator", separator=separator)
    file = InputFile(path, TEXT, file_format(path)[1])
    pieces = (content["text"] for chunk in find_chunks([file], rules) for content in read_objects(chunk, rules, bad))
    yield from ((f"{source.name}#{number}", text) for number, text in enumerate(pieces, start=1))
    yield from [(source.name, None)] * bad.count


def _walk(root: Path, patterns: Sequence[str], excluded: Sequence[str]) -> Iterator[SourceFile]:
    if root.is_file():
        yield SourceFile(root.name, root)
        return
    for folder, below, files in os.walk(root):
        # Assigned in place: os.walk enters only the folders in this list, so nothing excluded is even listed.
        below[:] = [name for name in below if not _matches(name, excluded)]
        for file in files:
            path = Path(folder, file)
            name = path.relative_to(root).as_posix()
            wanted = any(fnmatch(file, pattern) for pattern in patterns) and not _matches(name, excluded)
            if wanted and path.is_file():  # no dangling link, and no pipe, which would block for ever
                yield SourceFile(name, path)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(part, pattern) for pattern in patterns for part in (name, *PurePosixPath(name).parts))


def _hashed(source: SourceFile) -> tuple[bytes, str]:
    return blake2b(source.name.encode(errors="surrogateescape"), digest_size=16).digest(), str(source.path)


def _text(path: Path) -> str | None:
    try:
        text = read_bounded(path, MAX_DOCUMENT_BYTES).decode()
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise cannot_read(path, error) from error
    return text if text.strip() else None
