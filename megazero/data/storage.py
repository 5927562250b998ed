"""Where the bytes of a corpus are, and how they are read: a disk, or anything fsspec reaches.

A *token reader* gives the tokens [start, stop) of a .bin.  On a disk they come from a memory map, or (no map) from
positional reads.  A prefix with a *scheme*, such as s3://bucket/folder/name, lies in an *object store*: its index and
its sidecar are copied once into a cache folder, and tokens are read from the .bin by byte ranges, as they are needed.

A cached copy is named by what identifies the content: the store's own checksums and sizes of the three files, and the
sidecar itself, which holds digests of the two others.  A corpus that was made anew under the same prefix gets another
copy, so an index never meets tokens it does not belong to.  The folder may be removed whenever no run is starting.
While a run reads, it looks now and then whether the .bin is still the one it began with.
"""

import fcntl
import hashlib
import json
import mmap
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megazero.errors import DataError, Problem, raise_problems
from megazero.files import cannot_read, cannot_write, written_aside

# Two characters at least: a single one would be a drive.
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# A failed request is made again after pauses that grow threefold: 20 s in all, for a store that restarts.
ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 0.5
# What a request may take: this, and the time that its bytes take at this pace.
REQUEST_SECONDS, SLOWEST_BYTES_A_SECOND = 15.0, 1 << 20
# Between two looks whether a .bin is still the same.
LOOK_SECONDS = 60.0
# Web servers' way of saying that there is no such object.
NO_OBJECT = (404, 410)
# Files up to this size are left to the system's reading ahead; ranges from this length on are asked for as a whole.
SMALL_FILE_BYTES, LONG_RANGE_BYTES = 1 << 30, 1 << 18
# Bytes of an index that are asked for at a time.
COPY_BYTES = 64 << 20

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Access:
    """How a run reads its corpora.

    maps: token files on a disk are mapped into memory; False: every read is a system call of its own.
    index_folder: for the indexes of corpora in object stores; None: one in the user's cache folder.
    """

    maps: bool = True
    index_folder: Path | None = None


PLAIN_ACCESS = Access()


class TokenReader(Protocol):
    """The tokens of a .bin, by their numbers."""

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop): a read-only array [stop - start]; the caller keeps to the file's limits."""
        ...


class Stored(NamedTuple):
    """A corpus that was found: `prefix` of its .idx and .json on this machine, and its .bin, wherever that is."""

    prefix: str
    bin_bytes: int
    read_as: Callable[["np.dtype[Any]"], TokenReader]


def is_remote(prefix: str) -> bool:
    """Whether the prefix names an object store."""
    return SCHEME.match(prefix) is not None


def output_problems(prefix: str) -> list[Problem]:
    """What speaks against writing a corpus there."""
    if not is_remote(prefix):
        return []
    given = f"--output-prefix {prefix}"
    return [Problem(given, "corpora are written to a disk", "a folder; its files can be copied to the store")]


def find(prefix: str, access: Access) -> Stored:
    """Where a corpus is; of one in an object store, the index is here afterwards.  Raises DataError."""
    if is_remote(prefix):
        return _fetched(prefix, access.index_folder or _cache_folder())
    path = Path(f"{prefix}.bin")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise cannot_read(path, error) from error
    return Stored(prefix, size, partial(MappedTokens if access.maps else PositionedTokens, path))


# --- on a disk -------------------------------------------------------------------------------------------------------


def map_file(path: Path) -> mmap.mmap | bytes:
    """A file as read-only memory."""
    try:
        with open(path, "rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                return b""  # mmap refuses empty files; a corpus without tokens has an empty .bin
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise cannot_read(path, error) from error


class MappedTokens:
    """Tokens as a view of the mapped file.

    A page that is missing is read with its neighbours, which soon brings a small file into memory.  Of a large one
    samples come from anywhere, and neighbours (megabytes on some machines) are read for nothing; so there pages come
    alone, except for ranges that are long themselves.
    """

    def __init__(self, path: Path, dtype: "np.dtype[Any]") -> None:
        self._memory = map_file(path)
        self._tokens: NDArray[Any] = np.frombuffer(self._memory, dtype)
        self._reads_alone = len(self._memory) > SMALL_FILE_BYTES
        if self._reads_alone:
            advise(self._memory, mmap.MADV_RANDOM)

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop)."""
        found = self._tokens[start:stop]
        if self._reads_alone and found.nbytes >= LONG_RANGE_BYTES:
            advise(self._memory, mmap.MADV_WILLNEED, start * found.itemsize, found.nbytes)
        return found


def advise(memory: mmap.mmap | bytes, option: int, start: int = 0, length: int | None = None) -> None:
    """Tell the system how bytes [start, start + length) of a mapped file will be read; all of it, unless told."""
    if isinstance(memory, mmap.mmap):
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        memory.madvise(option, begin, len(memory) if length is None else start - begin + length)


class PositionedTokens:
    """Tokens by positional reads: no page tables to fill, and an I/O error is an error instead of a signal."""

    def __init__(self, path: Path, dtype: "np.dtype[Any]") -> None:
        self._path, self._dtype = path, dtype
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise cannot_read(path, error) from error
        weakref.finalize(self, os.close, self._descriptor)

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop)."""
        position, end = start * self._dtype.itemsize, stop * self._dtype.itemsize
        parts = []
        while position < end:
            try:
                part = os.pread(self._descriptor, end - position, position)
            except OSError as error:
                raise cannot_read(self._path, error) from error
            if not part:
                given = f"{self._path}: ends at byte {position}, while bytes up to {end} are read"
                raise DataError(Problem(given, "a corpus stays as it is while it is read"))
            parts.append(part)
            position += len(part)
        return np.frombuffer(b"".join(parts), self._dtype)


# --- in an object store ----------------------------------------------------------------------------------------------


class RemoteTokens:
    """Tokens by byte ranges of an object."""

    def __init__(self, store: "_Store", dtype: "np.dtype[Any]") -> None:
        self._store, self._dtype = store, dtype

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop)."""
        size = self._dtype.itemsize
        found = self._store.read("bin", start * size, stop * size) if start < stop else b""
        return np.frombuffer(found, self._dtype)


class _Identity(NamedTuple):
    """What tells one making of a corpus from another; `key` names its copy."""

    key: str
    sizes: Mapping[str, int]
    sidecar: bytes


class _Store:
    """The objects PREFIX.idx, PREFIX.bin and PREFIX.json; a request that fails is made again, a few times."""

    def __init__(self, prefix: str) -> None:
        import fsspec

        self._prefix = prefix
        try:
            self._system, path = fsspec.url_to_fs(f"{prefix}.bin")
        except (ImportError, ValueError) as error:
            raise _no_driver(prefix, error) from error
        self.path = path.removesuffix(".bin")
        self._is_web = prefix.startswith(("http://", "https://"))
        self._bin_marks, self._last_look = "", 0.0

    def identity(self) -> _Identity:
        """What is there now; raises DataError with all objects that are missing."""
        self._system.invalidate_cache()
        sizes, words, problems = {}, [self._prefix], []
        for ending in ("idx", "bin"):
            try:
                sizes[ending], marks = self._marks(ending)
                words.append(marks)
            except FileNotFoundError:
                rule = "must be an object; a corpus is PREFIX.bin and PREFIX.idx"
                problems.append(Problem(f"{self._prefix}.{ending}", rule))
        raise_problems(DataError, problems)
        self._bin_marks, self._last_look = words[-1], time.monotonic()
        try:
            sidecar = self._ask("json", self._system.cat_file)
        except FileNotFoundError:
            sidecar = b""
        words.append(hashlib.sha256(sidecar).hexdigest())
        return _Identity(hashlib.sha256(json.dumps(words).encode()).hexdigest()[:32], sizes, sidecar)

    def read(self, ending: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of an object."""

        def whole_range(path: str) -> bytes:
            found: bytes = self._system.cat_file(path, start=start, end=stop)
            if len(found) > stop - start:
                given = f"{self._prefix}.{ending}: {len(found)} bytes came for {stop - start}"
                raise DataError(
                    Problem(given, "the store answers requests for byte ranges", "another store, or a disk")
                )
            if len(found) != stop - start:
                raise OSError(f"{len(found)} bytes came for bytes {start} to {stop}")
            return found

        try:
            if ending == "bin" and time.monotonic() - self._last_look > LOOK_SECONDS:
                self._look()
            return self._ask(ending, whole_range, stop - start)
        except FileNotFoundError as error:
            given = f"{self._prefix}.{ending}: is gone"
            raise DataError(Problem(given, "a corpus stays where it is while it is read")) from error

    def _marks(self, ending: str) -> tuple[int, str]:
        """The size of an object, and what tells it from another one."""
        size = self._ask(ending, self._system.size)
        if size is None:
            given = f"{self._prefix}.{ending}: the store does not tell its size"
            raise DataError(Problem(given, "the size of an object is known", "another store, or a disk"))
        return int(size), f"{ending} {size} {self._ask(ending, self._system.checksum)}"

    def _look(self) -> None:
        """Raises DataError when the .bin is not the one that `identity` saw."""
        self._last_look = time.monotonic()
        self._system.invalidate_cache()
        size, marks = self._marks("bin")
        if marks != self._bin_marks:
            given = f"{self._prefix}.bin: was replaced by another object, of {size} bytes"
            raise DataError(Problem(given, "a corpus stays as it is while it is read", "a new prefix for a new corpus"))

    def _ask(self, ending: str, request: Callable[[str], Answer], nbytes: int = 0) -> Answer:
        """What the request for an object returns; that there is no such object is an answer too, an exception.

        Drivers raise errors of their own making, so whatever else comes counts as a failure of the store.
        """
        seconds = REQUEST_SECONDS + nbytes / SLOWEST_BYTES_A_SECOND
        for attempt in range(ATTEMPTS):
            try:
                return _within(seconds, partial(request, f"{self.path}.{ending}"))
            except DataError:
                raise
            except FileNotFoundError as error:
                if not (self._is_web and _hides_failure(error)):
                    raise
                failure: BaseException = error.__cause__ or error
            except Exception as error:
                failure = error
            if isinstance(failure, PermissionError):
                break  # asking again makes nobody welcome
            if attempt + 1 < ATTEMPTS:
                time.sleep(FIRST_PAUSE_SECONDS * 3**attempt)
        given = f"{self._prefix}.{ending}: {type(failure).__name__} {failure}".strip()
        legal = "a store that can be reached, by its address and with its credentials"
        raise DataError(Problem(given, f"can be read; {attempt + 1} attempts have failed", legal)) from failure


def _hides_failure(error: FileNotFoundError) -> bool:
    """The driver of web servers says "not found" whatever went wrong; the cause tells."""
    cause = error.__cause__
    return cause is not None and getattr(cause, "status", None) not in NO_OBJECT


def _within(seconds: float, call: Callable[[], Answer]) -> Answer:
    """What a call returns or raises; TimeoutError when it takes longer, and its thread is left to itself.

    Drivers have limits of their own, but some multiply them until nobody is waiting any more.
    """
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        if answer.done():  # the call's own
            raise
        raise TimeoutError(f"no answer within {seconds:.0f} s") from error


def _fetched(prefix: str, folder: Path) -> Stored:
    store = _Store(prefix)
    found = store.identity()
    store.read("idx", 0, 1)  # one that answers with all of it is found out by the smaller of two files
    local = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', Path(store.path).name)}-{found.key}"
    index = local.with_name(f"{local.name}.idx")
    with _only_one_at(local):
        if not index.is_file():
            if found.sidecar:
                with written_aside(local.with_name(f"{local.name}.json")) as stream:
                    stream.write(found.sidecar)
            with written_aside(index) as stream:
                _copy_index(store, found, stream)
    return Stored(str(local), found.sizes["bin"], partial(RemoteTokens, store))


def _copy_index(store: _Store, found: _Identity, stream: IO[bytes]) -> None:
    size = found.sizes["idx"]
    for first in range(0, size, COPY_BYTES):
        stream.write(store.read("idx", first, min(first + COPY_BYTES, size)))
    if store.identity() != found:
        given = f"{store.path}.idx: changed while it was copied"
        raise DataError(Problem(given, "a corpus stays as it is while it is read"))


def _no_driver(prefix: str, error: Exception) -> DataError:
    """Nothing that fsspec knows opens the prefix; `error` names what to install, if there is something."""
    from fsspec.registry import known_implementations

    scheme = prefix.partition("://")[0]
    if scheme != scheme.lower():
        legal = f"{scheme.lower()}{prefix.removeprefix(scheme)}"
        return DataError(Problem(prefix, "the name of a store's kind is in lower case", legal))
    package = known_implementations.get(scheme, {}).get("class", "fsspec").partition(".")[0]
    if scheme in ("http", "https"):
        package = "aiohttp"
    legal = "a folder on a disk" if package == "fsspec" else f"pip install {package}, or a folder on a disk"
    return DataError(Problem(prefix, f"{scheme}:// is read through a driver of fsspec: {error}", legal))


@contextmanager
def _only_one_at(local: Path) -> Iterator[None]:
    """Processes of one machine copy one after the other, the first for all; file systems without locks do without."""
    lock = local.with_name(f".{local.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        stream = open(lock, "wb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise cannot_write(lock, error) from error
    with stream:
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _cache_folder() -> Path:
    """The user's own cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megazero"
