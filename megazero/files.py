"""Files that appear whole or not at all.

An *aside file* is written under a temporary name next to its destination, flushed to the disk, and then renamed over
the destination in one step.  A reader sees the old file or the new one, never half of either.  Its name carries its
owner, and the next process that writes the same destination removes those whose owners are gone.

Files that others may have written are read by `open_regular`, `read_bounded` and `parse_json`, which end in an error,
soon and within bounded memory, whatever lies there.
"""

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from megazero.errors import DataError, Problem
from megazero.owner import Owner
from megazero.units import format_bytes

MAX_JSON_DEPTH = 64


class AsideFile:
    """A file being written next to `path`; `publish` renames it to that, `discard` removes it.

    Raises DataError when the folder cannot be made or written, and later when the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        here = Owner.of_this_process()
        self._aside = path.with_name(f".{path.name}.{here.tag}.{secrets.token_hex(4)}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_left_over(path, here)
            # "x" makes a new file: nothing that lies under this name, a link say, is followed or overwritten.
            self.stream: IO[bytes] = open(self._aside, "xb")  # noqa: SIM115 (lives until publish or discard)
        except OSError as error:
            raise cannot_write(path, error) from error

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        try:
            self.stream.write(content)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def seal(self) -> None:
        """Sync every byte to the disk and close; the file still has its temporary name."""
        try:
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self.stream.close()
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def publish(self) -> None:
        """Rename to the final name and make the rename itself durable."""
        if not self.stream.closed:
            self.seal()
        try:
            os.replace(self._aside, self.path)
            sync_path(self.path.parent)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def discard(self) -> None:
        """Remove the temporary file; harmless after `publish`."""
        with suppress(OSError):
            self.stream.close()
        with suppress(FileNotFoundError):
            self._aside.unlink()


def _remove_left_over(path: Path, here: Owner) -> None:
    """Remove the aside files of `path` whose owners are gone; leave what cannot be removed."""
    for name in os.listdir(path.parent):
        if name.startswith(f".{path.name}.") and name.endswith(".tmp"):
            owner = Owner.from_tag(name[len(path.name) + 2 : -len(".tmp")].partition(".")[0])
            if owner is not None and owner.is_gone(here):
                with suppress(OSError):
                    os.unlink(path.parent / name)


@contextmanager
def written_aside(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary stream that becomes `path` when the block ends well and leaves no trace when it does not."""
    aside = AsideFile(path)
    try:
        yield aside.stream
        aside.publish()
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        aside.discard()


def remove_file(path: Path) -> None:
    """Remove a file if it is there; raise DataError when it cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def move_into_place(source: Path, path: Path) -> None:
    """Rename over `path`, if `source` is there, and make that durable."""
    try:
        if source.exists():
            os.replace(source, path)
            sync_path(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def sync_path(path: Path) -> None:
    """Sync a file's bytes, or a folder's renames, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> DataError:
    """Return the error for a destination that cannot be written."""
    return DataError(Problem(str(path), f"must be writable: {error.strerror or error}", "another path, or free space"))


def cannot_read(path: Path | str, error: OSError) -> DataError:
    """Return the error for a file that cannot be read."""
    return DataError(Problem(str(path), f"must be a readable file: {error.strerror or error}"))


def open_regular(path: Path, *, inside: Path | None = None) -> BufferedReader:
    """Open a regular file for reading, without waiting for a FIFO without a writer.

    inside: the folder that the file must lie in, links followed.  Raises OSError, with the rule that is broken as its
    `strerror`, for anything but a regular file and for a link that leads out of the folder.
    """
    if inside is not None and _leads_out(path, inside):
        raise OSError(errno.EXDEV, "a link that leads out of the folder", str(path))
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 (returned)
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return stream


def _leads_out(path: Path, inside: Path) -> bool:
    """Return True if a path leads out of a folder, links followed."""
    # To follow links takes longer than to read a small file, and nearly all files lie in the folder and are no links.
    if path.parent == inside and not path.is_symlink():
        return False
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(inside))


def read_bounded(path: Path, limit: int, *, inside: Path | None = None) -> bytes:
    """Return the content of a regular file; raise OSError as `open_regular` does, and if it has over `limit` bytes."""
    with open_regular(path, inside=inside) as stream:
        is_larger = os.fstat(stream.fileno()).st_size > limit
        content = b"" if is_larger else stream.read(limit + 1)
    if is_larger or len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {format_bytes(limit)}", str(path))
    return content


def parse_json(text: bytes | str, **hooks: Any) -> Any:
    """Parse JSON from an untrusted source; raise ValueError for everything that is not JSON of bounded depth.

    hooks: `object_pairs_hook` and `parse_constant` of `json.loads`.
    """
    rule = f"nested deeper than {MAX_JSON_DEPTH} levels"
    try:
        content = json.loads(text, **hooks)
    except RecursionError:
        raise ValueError(rule) from None
    level = [content]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for each in level
            for child in (each.values() if type(each) is dict else each if type(each) is list else ())
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return content
    raise ValueError(rule)
