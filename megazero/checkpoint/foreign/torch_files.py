"""Reads the files that `torch.save` writes, as data: a zip file of one pickle and of storages, each a file in it.

The pickle becomes plain values and records (`pickles.py`); a tensor in it becomes a `StoredTensor`, which is read when
it is asked for, and then only its own bytes.  Such a zip file compresses nothing, so nothing in it grows: its files lie
one behind the other, and every size and place is checked against those of the file.
"""

import math
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.checkpoint.foreign.pickles import MAX_BYTES, Name, Record, read_pickle
from megazero.errors import CheckpointError, DamageError, Problem
from megazero.files import open_regular

_END, _END64, _LOCATOR, _ENTRY, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_MAX_ENTRIES = 1 << 20
_MAX_DIRECTORY = 256 << 20
_MAX_DIMS = 16
_UNKNOWN = 0xFFFF_FFFF  # in a field of 32 bits: the number is in the entry's extra field
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "torch.DoubleStorage": torch.float64,
        "torch.FloatStorage": torch.float32,
        "torch.HalfStorage": torch.float16,
        "torch.BFloat16Storage": torch.bfloat16,
        "torch.LongStorage": torch.int64,
        "torch.IntStorage": torch.int32,
        "torch.ShortStorage": torch.int16,
        "torch.CharStorage": torch.int8,
        "torch.ByteStorage": torch.uint8,
        "torch.BoolStorage": torch.bool,
    }
)


class _Entry(NamedTuple):
    """A file within a zip file: where its header begins, how many bytes it has, and their checksum."""

    begin: int
    size: int
    checksum: int


class _Storage(NamedTuple):
    """The elements of one tensor or of several."""

    file: "TorchFile"
    entry: _Entry
    dtype: torch.dtype
    numel: int


class StoredTensor(NamedTuple):
    """A tensor in a file, until it is read."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    def read(self) -> Tensor:
        """Read the tensor, contiguous; raises DamageError when its bytes are not those that were saved."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        count = last + 1 if math.prod(self.shape) else 0
        flat = self.storage.file.elements(self.storage, self.offset, count)
        return flat.as_strided(self.shape, self.strides).contiguous()


class TorchFile:
    """A file that `torch.save` has written, or a part of one: `content` is what was saved.

    Raises CheckpointError for anything else, and for what is not data.
    """

    def __init__(self, path: Path, *, inside: Path, begin: int = 0, length: int | None = None) -> None:
        self.path = path
        try:
            self._stream = open_regular(path, inside=inside)
            size = os.fstat(self._stream.fileno()).st_size
        except OSError as error:
            raise CheckpointError(Problem(f"{path}: {error.strerror}", "a file that torch.save has written")) from error
        self._begin, self._size = begin, size - begin if length is None else length
        if not 0 <= begin <= begin + self._size <= size:
            raise DamageError(Problem(f"{path}: bytes {begin} to {begin + self._size}", f"the file has {size}"))
        self._entries = self._read_directory()
        pickles = [name for name in self._entries if name.partition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise self._damage("no zip file of torch.save's: it has one data.pkl")
        self._root = pickles[0].partition("/")[0]
        order = self._entries.get(f"{self._root}/byteorder")
        if order is not None and self._content(order, limit=16) != b"little":
            raise CheckpointError(Problem(f"{path}: not little-endian", "numbers are little-endian"))
        content = self._content(self._entries[pickles[0]], limit=MAX_BYTES)
        made = read_pickle(content, source=str(path), persistent=self._storage)
        self.content = _with_tensors(made, str(path))

    def close(self) -> None:
        """Close the file; its tensors cannot be read any more."""
        self._stream.close()

    def _damage(self, rule: str) -> DamageError:
        return DamageError(Problem(f"{self.path}, {self._size} bytes from {self._begin}", rule))

    def _bytes(self, begin: int, count: int) -> bytes:
        if not 0 <= begin <= begin + count <= self._size:
            raise self._damage(f"truncated or damaged: it names bytes {begin} to {begin + count}")
        try:
            found = os.pread(self._stream.fileno(), count, self._begin + begin)
        except OSError as error:
            raise self._damage(f"must be readable: {error.strerror}") from error
        if len(found) != count:
            raise self._damage("truncated while it was read")
        return found

    def _read_directory(self) -> dict[str, _Entry]:
        """Return the files by name, none of which overlaps another."""
        tail = self._bytes(max(0, self._size - 22 - 0xFFFF), min(self._size, 22 + 0xFFFF))
        at = tail.rfind(_END)
        if at < 0 or len(tail) - at < 22:
            if self._size > 2 and self._bytes(0, 1) == b"\x80":
                raise self._damage("a file of torch before 1.6; load and save it once with a newer torch")
            raise self._damage("truncated, or no zip file")
        count, size, begin = struct.unpack_from("<HII", tail, at + 10)
        if at >= 20 and tail[at - 20 : at - 16] == _LOCATOR:
            (place,) = struct.unpack_from("<Q", tail, at - 12)
            end = self._bytes(place, 56)
            count, size, begin = struct.unpack_from("<QQQ", end, 32)
            if end[:4] != _END64:
                raise self._damage("damaged: the end of its directory is somewhere else")
        if count > _MAX_ENTRIES or size > _MAX_DIRECTORY:
            most = f"at most {_MAX_ENTRIES} and {_MAX_DIRECTORY} are read"
            raise self._damage(f"its directory has {count} files, {size} bytes; {most}")
        directory, entries, position = self._bytes(begin, size), dict[str, _Entry](), 0
        for _ in range(count):
            if len(directory) - position < 46 or directory[position : position + 4] != _ENTRY:
                raise self._damage("damaged: its directory is too short")
            flags, method = struct.unpack_from("<HH", directory, position + 8)
            checksum, stored, whole = struct.unpack_from("<III", directory, position + 16)
            lengths = struct.unpack_from("<HHH", directory, position + 28)
            (header,) = struct.unpack_from("<I", directory, position + 42)
            name_end = position + 46 + lengths[0]
            name = directory[position + 46 : name_end].decode("utf-8", errors="replace")
            extra = directory[name_end : name_end + lengths[1]]
            whole, stored, header = _wide(extra, (whole, stored, header))
            position = name_end + lengths[1] + lengths[2]
            if method != 0 or flags & 1 or whole != stored:
                raise self._damage(f"{name[:80]!r} is compressed or encrypted, as in no file of torch.save's")
            if name in entries:
                raise self._damage(f"{name[:80]!r} is there twice")
            entries[name] = _Entry(header, whole, checksum)
        position = 0
        for each in sorted(entries.values()):
            if each.begin < position or each.begin + 30 + each.size > begin:
                raise self._damage("damaged: files in it overlap")
            position = each.begin + 30 + each.size
        return entries

    def _place(self, entry: _Entry) -> int:
        """Return where the bytes of a file within this one begin."""
        header = self._bytes(entry.begin, 30)
        if header[:4] != _LOCAL:
            raise self._damage("damaged: a file in it does not begin where the directory places it")
        name, extra = struct.unpack_from("<HH", header, 26)
        return entry.begin + 30 + int(name) + int(extra)

    def _content(self, entry: _Entry, *, limit: int) -> bytes:
        if entry.size > limit:
            raise self._damage(f"a part of {entry.size} bytes; at most {limit} are read")
        content = self._bytes(self._place(entry), entry.size)
        if zlib.crc32(content) != entry.checksum:
            raise self._damage("damaged: a part does not match its checksum")
        return content

    def _storage(self, identity: Any) -> _Storage:
        """Return the storage that a persistent id of the pickle means."""
        if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
            raise ValueError("a reference to something else than a storage")
        _, kind, key, _, numel = identity
        dtype = _DTYPES.get(kind.text) if isinstance(kind, Name) else None
        entry = self._entries.get(f"{self._root}/data/{key}") if isinstance(key, str) else None
        if dtype is None:
            raise ValueError(f"a storage of {str(kind)[:80]}, which is none of {', '.join(_DTYPES)}")
        if entry is None or type(numel) is not int or numel < 0 or entry.size < numel * dtype.itemsize:
            raise ValueError(f"a storage of {str(numel)[:40]} elements, which the file hasn't")
        return _Storage(self, entry, dtype, numel)

    def elements(self, storage: _Storage, offset: int, count: int) -> Tensor:
        """Read elements of a storage of this file, which has them."""
        width = storage.dtype.itemsize
        raw = torch.empty(count * width, dtype=torch.uint8)
        begin = self._place(storage.entry) + offset * width
        if begin + count * width > self._size:
            raise self._damage("truncated: a tensor ends behind the file")
        view, done = raw.numpy().data, 0
        while done < len(view):
            got = os.preadv(self._stream.fileno(), [view[done : done + (1 << 30)]], self._begin + begin + done)
            if got == 0:
                raise self._damage("truncated while it was read")
            done += got
        if len(view) == storage.entry.size and zlib.crc32(view) != storage.entry.checksum:
            raise self._damage("damaged: a tensor's bytes do not match their checksum")
        return raw.view(storage.dtype)


def _wide(extra: bytes, numbers: tuple[int, int, int]) -> list[int]:
    """Return an entry's sizes and place, of which those that take over 32 bits are in its extra field."""
    position, wide = 0, b""
    while len(extra) - position >= 4:
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            wide = extra[position + 4 : position + 4 + length]
        position += 4 + length
    found = []
    for number in numbers:
        if number == _UNKNOWN and len(wide) >= 8:
            number, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        found.append(number)
    return found


_REBUILT = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
# A tensor that has got attributes: the function that makes it, its class, the function's arguments, the attributes.
_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")


def _with_tensors(content: Any, source: str) -> Any:
    """Return what was saved, with stored tensors for the records of tensors; raises CheckpointError for illegal ones.

    Dicts and lists are changed in place, each once, however often it occurs.
    """
    seen = set[int]()

    def replaced(value: Any) -> Any:
        if isinstance(value, Record) and value.name == _WITH_ATTRIBUTES and len(value.arguments) > 2:
            function, _, arguments = value.arguments[:3]
            if isinstance(function, Name) and isinstance(arguments, tuple):
                value = Record(function.text, arguments)
        if isinstance(value, Record) and value.name in _REBUILT:
            return _tensor(value.arguments, source)
        if isinstance(value, Record) and value.name in _PARAMETERS and value.arguments:
            return replaced(value.arguments[0]) if not _is_parameter(value.arguments[0]) else value
        return value

    top: list[Any] = [content]
    pending: list[Any] = [top]
    while pending:
        held = pending.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Record):
            if isinstance(held.state, Record):
                held.state = replaced(held.state)
            items: Any = (held.state,)
        elif isinstance(held, dict | list):
            for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
                held[key] = replaced(value)
            items = held.values() if isinstance(held, dict) else held
        else:
            items = held
        pending += [item for item in items if isinstance(item, dict | list | tuple | Record)]
    return top[0]


def _is_parameter(value: Any) -> bool:
    return isinstance(value, Record) and value.name in _PARAMETERS


def _tensor(arguments: tuple[Any, ...], source: str) -> StoredTensor:
    """Make a tensor of the arguments of torch's function: storage, offset, shape, strides, and others of no effect."""
    storage, offset, shape, strides = arguments[:4] if len(arguments) > 3 else (None,) * 4
    numbers = (offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (None,)
    is_sound = isinstance(storage, _Storage) and all(type(each) is int and each >= 0 for each in numbers)
    if is_sound and len(shape) == len(strides) <= _MAX_DIMS:
        numel = math.prod(shape)
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if numel == 0 or (last < storage.numel and numel <= storage.numel):
            return StoredTensor(storage, offset if numel else 0, shape, strides)
    given = (
        f"{source}: a tensor of shape {str(shape)[:80]}, strides {str(strides)[:80]}, from element {str(offset)[:40]}"
    )
    have = storage.numel if isinstance(storage, _Storage) else "no"
    raise CheckpointError(Problem(given, f"its storage has {have} elements, each for one place in it"))
