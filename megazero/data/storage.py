"""Reads the tokens of corpora from a disk, or from any storage that fsspec opens.

A *token reader* returns the tokens [start, stop) of a .bin.  On a disk they come from a memory map, or (no map) from
positional reads.  A prefix with a *scheme*, such as s3://bucket/folder/name, lies in an *object store*: its index and
its sidecar are copied once into a cache folder, and tokens are read from the .bin by byte ranges, as they are needed.

A cached copy is named by the identity of the content: the store's own checksums and sizes of the three files, and the
sidecar itself, which holds digests of the two others.  A corpus that was made anew under the same prefix gets another
copy, so an index is never used with other tokens.  The folder may be removed whenever no run is starting.  While a run
reads, it checks at intervals that the .bin has not been replaced.
"""

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
from megazero.files import cannot_read, cannot_write, open_regular, written_aside
from megazero.operating_system import lock_file

# A scheme has at least two characters: a single one would be a drive.
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# A failed request is retried after pauses that grow threefold: 20 s in all, for a store that restarts.
ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 0.5
# The time limit of a request: this, and the time of its bytes at this bandwidth.
REQUEST_SECONDS, SLOWEST_BYTES_A_SECOND = 15.0, 1 << 20
# The interval between checks that a .bin has not been replaced.
CHECK_SECONDS = 60.0
# The status codes of web servers for an object that does not exist.
NO_OBJECT = (404, 410)
# Files up to this size are left to the system's reading ahead; ranges from this length on are prefetched as a whole.
SMALL_FILE_BYTES, LONG_RANGE_BYTES = 1 << 30, 1 << 18
# The number of bytes of an index that are copied at a time.
COPY_BYTES = 64 << 20

Result = TypeVar("Result")


@dataclass(frozen=True)
class Access:
    """The settings with which a run reads its corpora.

    maps: True if token files on a disk are mapped into memory; False makes every read a system call.
    index_folder: the folder for indexes of corpora in object stores; None for one in the user's cache folder.
    """

    maps: bool = True
    index_folder: Path | None = None


PLAIN_ACCESS = Access()


class TokenReader(Protocol):
    """A reader of the tokens of a .bin, by their numbers."""

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Return tokens [start, stop): a read-only array [stop - start]; the range must be inside the file."""
        ...


class CorpusLocation(NamedTuple):
    """The location of a corpus: `prefix` of its .idx and .json on this machine, and a reader of its .bin."""

    prefix: str
    bin_bytes: int
    read_as: Callable[["np.dtype[Any]"], TokenReader]


def is_remote(prefix: str) -> bool:
    """Return True if the prefix names an object store."""
    return SCHEME.match(prefix) is not None


def output_problems(prefix: str) -> list[Problem]:
    """Return the problems of writing a corpus at this prefix."""
    if not is_remote(prefix):
        return []
    given = f"--output-prefix {prefix}"
    return [Problem(given, "corpora are written to a disk", "a folder; its files can be copied to the store")]


def locate_corpus(prefix: str, access: Access) -> CorpusLocation:
    """Locate a corpus; the index of one in an object store is copied to this machine.  Raises DataError."""
    if is_remote(prefix):
        return _cache_index(prefix, access.index_folder or _cache_folder())
    path = Path(f"{prefix}.bin")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise cannot_read(path, error) from error
    return CorpusLocation(prefix, size, partial(MappedTokens if access.maps else PositionedTokens, path))


# --- on a disk -------------------------------------------------------------------------------------------------------


def map_file(path: Path) -> mmap.mmap | bytes:
    """Map a file into read-only memory."""
    try:
        with open_regular(path) as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                return b""  # mmap refuses empty files; a corpus without tokens has an empty .bin
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise cannot_read(path, error) from error


class MappedTokens:
    """A reader of tokens as a view of the mapped file.

    A page that is missing is read with its neighbours, so a small file is soon in memory.  Samples of a large one are
    spread over it, and neighbours (megabytes on some machines) would be read for nothing; so there pages are read one
    by one, except for ranges that are long themselves.
    """

    def __init__(self, path: Path, dtype: "np.dtype[Any]") -> None:
        self._memory = map_file(path)
        self._tokens: NDArray[Any] = np.frombuffer(self._memory, dtype)
        self._reads_alone = len(self._memory) > SMALL_FILE_BYTES
        if self._reads_alone:
            advise(self._memory, mmap.MADV_RANDOM)

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Return tokens [start, stop)."""
        found = self._tokens[start:stop]
        if self._reads_alone and found.nbytes >= LONG_RANGE_BYTES:
            advise(self._memory, mmap.MADV_WILLNEED, start * found.itemsize, found.nbytes)
        return found


def advise(memory: mmap.mmap | bytes, option: int, start: int = 0, length: int | None = None) -> None:
    """Advise the system how bytes [start, start + length) of a mapped file will be read; length None: all of it."""
    if isinstance(memory, mmap.mmap):
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        memory.madvise(option, begin, len(memory) if length is None else start - begin + length)


class PositionedTokens:
    """A reader of tokens by positional reads, without page tables to fill; an I/O error is an exception, no signal."""

    def __init__(self, path: Path, dtype: "np.dtype[Any]") -> None:
        self._path, self._dtype = path, dtype
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise cannot_read(path, error) from error
        weakref.finalize(self, os.close, self._descriptor)

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Return tokens [start, stop)."""
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
    """A reader of tokens by byte ranges of an object."""

    def __init__(self, store: "_Store", dtype: "np.dtype[Any]") -> None:
        self._store, self._dtype = store, dtype

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Return tokens [start, stop)."""
        size = self._dtype.itemsize
        found = self._store.read("bin", start * size, stop * size) if start < stop else b""
        return np.frombuffer(found, self._dtype)


class _Identity(NamedTuple):
    """The identity of a corpus's content; `key` names its cached copy."""

    key: str
    sizes: Mapping[str, int]
    sidecar: bytes


class _Store:
    """The objects PREFIX.idx, PREFIX.bin and PREFIX.json; a request that fails is retried a few times."""

    def __init__(self, prefix: str) -> None:
        import fsspec

        self._prefix = prefix
        try:
            self._system, path = fsspec.url_to_fs(f"{prefix}.bin")
        except (ImportError, ValueError) as error:
            raise _no_driver(prefix, error) from error
        self.path = path.removesuffix(".bin")
        self._is_web = prefix.startswith(("http://", "https://"))
        self._bin_fingerprint, self._last_check = "", 0.0

    def identity(self) -> _Identity:
        """Return the identity of the present content; raises DataError with all objects that are missing."""
        self._system.invalidate_cache()
        sizes, words, problems = {}, [self._prefix], []
        for ending in ("idx", "bin"):
            try:
                sizes[ending], fingerprint = self._fingerprint(ending)
                words.append(fingerprint)
            except FileNotFoundError:
                rule = "must be an object; a corpus is PREFIX.bin and PREFIX.idx"
                problems.append(Problem(f"{self._prefix}.{ending}", rule))
        raise_problems(DataError, problems)
        self._bin_fingerprint, self._last_check = words[-1], time.monotonic()
        try:
            sidecar = self._request("json", self._system.cat_file)
        except FileNotFoundError:
            sidecar = b""
        words.append(hashlib.sha256(sidecar).hexdigest())
        return _Identity(hashlib.sha256(json.dumps(words).encode()).hexdigest()[:32], sizes, sidecar)

    def read(self, ending: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of an object."""

        def whole_range(path: str) -> bytes:
            found: bytes = self._system.cat_file(path, start=start, end=stop)
            if len(found) > stop - start:
                given = f"{self._prefix}.{ending}: {len(found)} bytes received for {stop - start}"
                raise DataError(
                    Problem(given, "the store answers requests for byte ranges", "another store, or a disk")
                )
            if len(found) != stop - start:
                raise OSError(f"{len(found)} bytes received for bytes {start} to {stop}")
            return found

        try:
            if ending == "bin" and time.monotonic() - self._last_check > CHECK_SECONDS:
                self._check_unchanged()
            return self._request(ending, whole_range, stop - start)
        except FileNotFoundError as error:
            given = f"{self._prefix}.{ending}: is gone"
            raise DataError(Problem(given, "a corpus is not moved while it is read")) from error

    def _fingerprint(self, ending: str) -> tuple[int, str]:
        """Return the size of an object, and a text that identifies its content."""
        size = self._request(ending, self._system.size)
        if size is None:
            given = f"{self._prefix}.{ending}: the store does not return its size"
            raise DataError(Problem(given, "the size of an object is known", "another store, or a disk"))
        return int(size), f"{ending} {size} {self._request(ending, self._system.checksum)}"

    def _check_unchanged(self) -> None:
        """Raise DataError if the .bin is not the one that `identity` found."""
        self._last_check = time.monotonic()
        self._system.invalidate_cache()
        size, fingerprint = self._fingerprint("bin")
        if fingerprint != self._bin_fingerprint:
            given = f"{self._prefix}.bin: was replaced by another object, of {size} bytes"
            raise DataError(Problem(given, "a corpus stays as it is while it is read", "a new prefix for a new corpus"))

    def _request(self, ending: str, request: Callable[[str], Result], nbytes: int = 0) -> Result:
        """Return the result of a request, retrying failures; a missing object raises FileNotFoundError.

        Drivers raise errors of their own kinds, so every other exception counts as a failure of the store.
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
                break  # would fail again
            if attempt + 1 < ATTEMPTS:
                time.sleep(FIRST_PAUSE_SECONDS * 3**attempt)
        given = f"{self._prefix}.{ending}: {type(failure).__name__} {failure}".strip()
        legal = "a store that can be reached, by its address and with its credentials"
        raise DataError(Problem(given, f"can be read; {attempt + 1} attempts have failed", legal)) from failure


def _hides_failure(error: FileNotFoundError) -> bool:
    """Return whether the driver of web servers raised "not found" for another failure, which is the cause."""
    cause = error.__cause__
    return cause is not None and getattr(cause, "status", None) not in NO_OBJECT


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return a call's result; raise TimeoutError if it takes longer, and abandon its thread.

    Drivers have their own time limits, but some multiply them by their retries.
    """
    result: Future[Result] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError as error:
        if result.done():  # raised by the call itself
            raise
        raise TimeoutError(f"no answer within {seconds:.0f} s") from error


def _cache_index(prefix: str, folder: Path) -> CorpusLocation:
    store = _Store(prefix)
    found = store.identity()
    store.read("idx", 0, 1)  # finds a store that ignores byte ranges, by the smaller of the two files
    local = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', Path(store.path).name)}-{found.key}"
    index = local.with_name(f"{local.name}.idx")
    with _locked(local):
        if not index.is_file():
            if found.sidecar:
                with written_aside(local.with_name(f"{local.name}.json")) as stream:
                    stream.write(found.sidecar)
            with written_aside(index) as stream:
                _copy_index(store, found, stream)
    return CorpusLocation(str(local), found.sizes["bin"], partial(RemoteTokens, store))


def _copy_index(store: _Store, found: _Identity, stream: IO[bytes]) -> None:
    size = found.sizes["idx"]
    for first in range(0, size, COPY_BYTES):
        stream.write(store.read("idx", first, min(first + COPY_BYTES, size)))
    if store.identity() != found:
        given = f"{store.path}.idx: changed while it was copied"
        raise DataError(Problem(given, "a corpus stays as it is while it is read"))


def _no_driver(prefix: str, error: Exception) -> DataError:
    """Return the error for a prefix that fsspec cannot open; `error` names the package to install, if there is one."""
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
def _locked(local: Path) -> Iterator[None]:
    """Lock a cached copy: processes of one machine copy one after the other; file systems without locks don't wait."""
    lock = local.with_name(f".{local.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        stream = open(lock, "wb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise cannot_write(lock, error) from error
    with stream:
        with suppress(OSError):
            lock_file(stream.fileno(), wait=True)
        yield


def _cache_folder() -> Path:
    """Return the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megazero"
