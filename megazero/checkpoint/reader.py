"""Loading: a rank's fragments are put together from the boxes that overlap them, whichever ranks saved those.

    saved boxes          wanted fragment           read: every box that overlaps, whole, once
    +-----+-----+                                        (its hash covers the whole box), and
    |  A  |  B  |          +-------+                     copy the overlap
    +-----+-----+    ->    | A   B |
    |     C     |          |   C   |
    +-----------+          +-------+

The layout of the run that saved plays no part.  Names, shapes, coverage and file sizes are checked before the first
byte is copied, all problems at once; a box is copied only if its bytes match its hash, and the header of every file
that is read must describe its boxes.  Of the indices only those of the wanted tensors are read, when they are first
needed, and of those only the segments that overlap wanted regions: a checkpoint of thousands of ranks has millions of
boxes, and a rank needs thousands.

What is missing or not what was saved is a DamageError.  What the system refuses for another reason (permissions, a file
server that is away) is a plain CheckpointError, since the checkpoint itself may be sound.
"""

import difflib
import errno
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor

from megazero.checkpoint.folders import MANIFEST, list_steps, resolve, step_of
from megazero.checkpoint.index import IndexSegment, content_problems, parse_directory, parse_segment
from megazero.checkpoint.manifest import (
    DTYPES,
    MAX_INDEX_BYTES,
    WIRES,
    BoxEntry,
    BoxTable,
    FileEntry,
    Manifest,
    TensorEntry,
    TensorKey,
    filling_problems,
    full_shapes,
    header_problem,
    layout_problems,
    parse_manifest,
)
from megazero.checkpoint.runs import MAX_MANIFEST_BYTES
from megazero.checkpoint.slices import BoxPiece, format_box, fragment_pieces, index_within, intersect, piece_view, whole
from megazero.config.yaml_file import MAX_BYTES as MAX_CONFIG_BYTES
from megazero.errors import CheckpointError, DamageError, Problem, raise_problems
from megazero.files import open_regular, read_bounded
from megazero.parallel.param_spec import Box, StateFragment, StateKind

_MAX_PROBLEMS = 20
# Errors of the system by which a file of a checkpoint is damaged: it is not there, unreadable on the disk, or no file
# of this folder.
_DAMAGE = frozenset(
    (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENXIO,
        errno.EIO,
        errno.EINVAL,
        errno.EXDEV,
        errno.EFBIG,
    )
)


@dataclass(frozen=True)
class SavedParameter:
    """The full shape of one parameter in a checkpoint, and the dtype of each kind of state."""

    full_shape: tuple[int, ...]
    kinds: Mapping[StateKind, torch.dtype]


class _StoredBox(NamedTuple):
    """A stored box and the file it lies in."""

    file: FileEntry
    entry: BoxEntry


class _Target(NamedTuple):
    """A region to be filled, and what returns the view, of the region's shape, that its values are copied to."""

    box: Box
    view: Callable[[], Tensor]


def open_checkpoint(path: str | Path, *, step: int | None = None) -> "Checkpoint":
    """Open the checkpoint in a step folder, or under a root (the one of `step`, or that `latest` names).

    Reads the manifest and the configuration, no tensor.  Raises CheckpointError.
    """
    return open_folder(resolve(Path(path), step))


def open_complete(path: str | Path, *, step: int | None = None) -> "Checkpoint":
    """Open a checkpoint as `open_checkpoint` does, to use all of it; one that misses files is not replaced by another.

    Raises CheckpointError, with the other steps of the same root where files are missing or of the wrong size.
    """
    checkpoint = open_checkpoint(path, step=step)
    try:
        checkpoint.check_files()
    except DamageError as error:
        others = sorted({each.step for each in list_steps(checkpoint.folder.parent) if each.path != checkpoint.folder})
        legal = f"another of the run's, --step {', '.join(map(str, others[-10:]))}" if others else ""
        rule = "a checkpoint is used whole, and this one is damaged"
        raise CheckpointError(*error.problems, Problem(str(checkpoint.folder), rule, legal)) from error
    return checkpoint


def open_folder(folder: Path) -> "Checkpoint":
    """Open the checkpoint in a step folder as `open_checkpoint` does."""
    manifest, boxes = parse_manifest(_read_file(folder / MANIFEST, MAX_MANIFEST_BYTES), source=str(folder / MANIFEST))
    if step_of(folder.name) not in (None, manifest.step):
        given = f"{folder / MANIFEST}: step {manifest.step}"
        raise DamageError(Problem(given, "a step folder is named after the step of its checkpoint"))
    config_file = folder / manifest.config.name
    config = _read_file(config_file, MAX_CONFIG_BYTES)
    if hashlib.sha256(config).hexdigest() != manifest.config.sha256:
        raise DamageError(Problem(str(config_file), "damaged or edited: it does not match the hash in the manifest"))
    return Checkpoint(folder, manifest, config.decode(errors="replace"), boxes)


class Checkpoint:
    """One checkpoint of a run, open for reading.  No file stays open, and no tensor is held in memory."""

    def __init__(self, folder: Path, manifest: Manifest, config_yaml: str, boxes: BoxTable | None = None) -> None:
        """Refer to a checkpoint; boxes: all of them, where the manifest itself lists them (version 1)."""
        self.folder = folder
        self.manifest = manifest
        self.config_yaml = config_yaml
        self._tensors: dict[TensorKey, TensorEntry] = {(each.parameter, each.kind): each for each in manifest.tensors}
        self._files = {file.name: file for file in manifest.files}
        # The index of each tensor, the indices whose directories are read, their segments that are not, and the boxes
        # of those that are, by tensor and by file.
        self._index_of: dict[TensorKey, int] = {}
        for number in self._all_indices:
            self._index_of |= {(each.parameter, each.kind): number for each in manifest.tensors_of(number)}
        self._listed: set[int] = set()
        self._unread: dict[TensorKey, list[IndexSegment]] = {key: [] for key in self._tensors}
        self._boxes: dict[TensorKey, list[_StoredBox]] = {key: [] for key in self._tensors}
        self._in_file: dict[str, list[BoxEntry]] = {name: [] for name in self._files}
        self._num_read = 0
        if boxes is not None:
            self._add(boxes)
        # Checked already: regions of tensors, their coverage and their files; how many boxes of a file are those of its
        # header; the hashes of boxes (file, first byte).
        self._complete: dict[TensorKey, set[Box]] = {key: set() for key in self._tensors}
        self._described: dict[str, int] = {}
        self._sound: set[tuple[str, int]] = set()

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def progress(self) -> Mapping[str, JsonValue]:
        """The counters that were passed to `save`."""
        return self.manifest.progress

    @property
    def parameters(self) -> Mapping[str, SavedParameter]:
        """Every parameter by logical name."""
        kinds: dict[str, dict[StateKind, torch.dtype]] = defaultdict(dict)
        for entry in self.manifest.tensors:
            if entry.kind != WIRES:
                kinds[entry.parameter][entry.kind] = DTYPES[entry.dtype]
        shapes = full_shapes(self.manifest.tensors)
        return {name: SavedParameter(shapes[name], found) for name, found in kinds.items()}

    @property
    def num_boxes(self) -> int:
        """The number of boxes; no index is read for it."""
        indexed = sum(entry.num_boxes for entry in self.manifest.indices)
        return indexed if self.manifest.indices else self._num_read

    def boxes(self) -> Iterator[tuple[FileEntry, BoxEntry]]:
        """Yield every box with its file, file by file in the order of bytes.  Reads all indices; raises DamageError."""
        self._load(self._all_regions)
        for file in self.manifest.files:
            for entry in self._boxes_in(file):
                yield file, entry

    def check(self, fragments: Iterable[StateFragment]) -> None:
        """Raise CheckpointError with everything that would keep `fill` from working, short of reading the data."""
        wanted = list(fragments)
        problems = dict.fromkeys(problem for fragment in wanted for problem in self._mismatch(fragment))
        raise_problems(CheckpointError, islice(problems, _MAX_PROBLEMS))
        regions: dict[TensorKey, list[Box]] = defaultdict(list)
        for fragment in wanted:
            pieces = fragment_pieces(fragment.spec, fragment.start, fragment.stop)
            regions[fragment.spec.name, fragment.kind] += [piece.box for piece in pieces]
        self._check_stored(regions)

    def check_files(self, *, rank: int = 0, size: int = 1) -> None:
        """Raise DamageError where indices are damaged, or files are missing or of the wrong size; no data is read.

        Holes in tensors are found here where there is one index; of several each is parsed where it is wanted.
        rank, size: of `size` processes that share the work, each hashes its share of the indices, and looks at its
        share of the data files.
        """
        if len(self.manifest.indices) <= 1:
            self._load(self._all_regions)
            _raise_damage({file.name: list(self._filling_problems(file)) for file in self.manifest.files})
            self._check_stored(self._all_regions)
        numbers = self._all_indices[rank::size]
        _raise_damage({self.manifest.indices[number].name: list(self._index_problems(number)) for number in numbers})
        _raise_damage({file.name: list(self._file_problems(file)) for file in self.manifest.files[rank::size]})

    def damage_in(self, files: Collection[str]) -> list[Problem]:
        """Read these indices and data files anew, and return the problems of the first that is damaged."""
        numbers = [number for number in self._all_indices if self.manifest.indices[number].name in files]
        data = [file for file in self.manifest.files if file.name in files]
        anew, every = Checkpoint(self.folder, self.manifest, self.config_yaml), self._all_regions
        steps = (
            *(self._index_problems(number) for number in numbers),
            anew._content_problems({key: every[key] for key, number in self._index_of.items() if number in numbers}),
            *(self._file_problems(file) for file in data),
            self._content_problems(every if data else {}),
            *(self._damage_of(file) for file in data),
        )
        return next(filter(None, map(list, steps)), [])

    def fill(self, fragments: Iterable[StateFragment]) -> None:
        """Copy the saved values into the fragments, cast to their dtype; padding is left as it is.

        Raises CheckpointError with all problems: before anything is copied, unless it is in the data itself (a damaged
        box, an I/O error); then what the sound boxes hold has been copied and the rest is as it was.  To fill the same
        fragments from another checkpoint overwrites all of it.
        """
        wanted = list(fragments)
        self.check(wanted)
        targets: dict[TensorKey, list[_Target]] = defaultdict(list)
        for fragment in wanted:
            for piece in fragment_pieces(fragment.spec, fragment.start, fragment.stop):
                target = _Target(piece.box, partial(_view_of, fragment, piece))
                targets[fragment.spec.name, fragment.kind].append(target)
        self._copy(targets)

    def read(self, name: str, box: Box, *, kind: StateKind = "weight") -> Tensor:
        """Read one region of a parameter's state as a CPU tensor in the saved dtype.  Raises CheckpointError."""
        raise_problems(CheckpointError, self._missing(name, kind))
        self._check_stored({(name, kind): [box]})
        entry = self._tensors[name, kind]
        assert intersect(box, Box((0,) * len(entry.shape), entry.shape)) == box or box.numel == 0, f"{name}: {box}"
        out = torch.empty(box.lengths, dtype=DTYPES[entry.dtype])
        targets = {(name, kind): [_Target(box, lambda: out)]} if box.numel else {}
        self._copy(targets)
        return out

    def read_full(self, name: str, kind: StateKind = "weight") -> Tensor:
        """Read a whole tensor; for tools and export, where it fits into memory."""
        raise_problems(CheckpointError, self._missing(name, kind))
        shape = self._tensors[name, kind].shape
        return self.read(name, Box((0,) * len(shape), shape), kind=kind)

    def verify(self) -> Iterator[list[Problem]]:
        """Read everything; yield the problems of indices and of the layout first, those of each data file in turn."""
        steps = (*map(self._index_problems, self._all_indices), self._content_problems(self._all_regions))
        yield list(dict.fromkeys(chain.from_iterable(steps)))
        for file in self.manifest.files:
            try:
                yield list(self._damage_of(file))
            except CheckpointError as error:
                yield list(error.problems)

    @property
    def _all_indices(self) -> range:
        return range(len(self.manifest.indices))

    @property
    def _all_regions(self) -> dict[TensorKey, list[Box]]:
        return {key: [whole(entry.shape)] for key, entry in self._tensors.items()}

    def _add(self, table: BoxTable) -> None:
        """Enter boxes."""
        for each in table.files:
            self._in_file[each.name] += each.boxes
            self._num_read += len(each.boxes)
            for box in each.boxes:
                self._boxes[box.parameter, box.kind].append(_StoredBox(self._files[each.name], box))

    def _boxes_in(self, file: FileEntry) -> list[BoxEntry]:
        """Return the boxes of a file that are read so far, in the order of bytes."""
        return sorted(self._in_file[file.name], key=lambda box: box.begin)

    def _load(self, wanted: Mapping[TensorKey, Collection[Box]]) -> None:
        """Read the boxes that overlap these regions unless they are read; raise DamageError with all problems."""
        numbers = {self._index_of[key] for key in wanted.keys() & self._index_of.keys()}
        damage = self._damage(numbers - self._listed, self._list)
        near: dict[int, list[IndexSegment]] = defaultdict(list)
        for key, regions in wanted.items():
            for segment in self._unread[key]:
                if any(intersect(segment.entry.box, region) for region in regions):
                    near[segment.number].append(segment)
        damage |= self._damage(near, lambda number: self._read_segments(number, near[number]))
        _raise_damage(damage)

    def _damage(self, numbers: Iterable[int], read: Callable[[int], None]) -> dict[str, list[Problem]]:
        """Read something of each of these indices; return the problems of those that are damaged, by file."""
        damage: dict[str, list[Problem]] = {}
        for number in sorted(numbers):
            try:
                read(number)
            except DamageError as error:
                damage[self.manifest.indices[number].name] = list(error.problems)
        return damage

    def _list(self, number: int) -> None:
        """Read the directory of an index."""
        (text,) = self._read_index(number, [(0, self.manifest.indices[number].directory_bytes)])
        for segment in parse_directory(text, self.manifest, number, source=str(self._index_path(number))):
            self._unread[segment.entry.key].append(segment)
        self._listed.add(number)

    def _read_segments(self, number: int, segments: list[IndexSegment]) -> None:
        """Read segments of an index."""
        entry, source = self.manifest.indices[number], str(self._index_path(number))
        texts = self._read_index(number, [(each.begin, each.entry.num_bytes) for each in segments])
        for text, segment in zip(texts, segments, strict=True):
            key = segment.entry.key
            self._add(parse_segment(text, segment, entry, self._files, self._tensors[key], source=source))
            self._unread[key].remove(segment)

    def _index_path(self, number: int) -> Path:
        return self.folder / self.manifest.indices[number].name

    def _read_index(self, number: int, places: Iterable[tuple[int, int]]) -> list[bytes]:
        """Read bytes of an index file, each given by its first byte and its length."""
        path = self._index_path(number)
        try:
            with open_regular(path, inside=self.folder) as stream:
                return [_read_span(stream, begin, length) for begin, length in places]
        except OSError as error:
            raise DamageError(_unreadable(path, error), files=(path.name,)) from error

    def _index_problems(self, number: int) -> Iterator[Problem]:
        """Read an index file whole, and yield where it is not what the manifest describes; no box is parsed."""
        path = self._index_path(number)
        try:
            content = _read_file(path, MAX_INDEX_BYTES)
        except DamageError as error:
            yield from error.problems
            return
        yield from content_problems(content, self.manifest, number, source=str(path))

    def _content_problems(self, wanted: Mapping[TensorKey, Collection[Box]]) -> Iterator[Problem]:
        """Yield what is wrong with the boxes that overlap these regions, and the holes and overlaps in the regions."""
        try:
            self._load(wanted)
        except DamageError as error:
            yield from error.problems
            return
        for key, regions in wanted.items():
            for region in regions:
                yield from layout_problems(self._tensors[key], region, (each.entry.box for each in self._boxes[key]))

    def _missing(self, name: str, kind: StateKind) -> Iterator[Problem]:
        if (name, kind) in self._tensors:
            return
        given = f"{kind} of {name}"
        kinds = [known for parameter, known in self._tensors if parameter == name]
        if kinds:
            yield Problem(given, f"{self.folder} has no such state of this parameter", ", ".join(kinds))
        else:
            close = difflib.get_close_matches(name, {parameter for parameter, _ in self._tensors})
            yield Problem(given, f"{self.folder} has no such parameter", ", ".join(close))

    def _mismatch(self, fragment: StateFragment) -> Iterator[Problem]:
        name, shape = fragment.spec.name, tuple(fragment.spec.full_shape)
        yield from self._missing(name, fragment.kind)
        entry = self._tensors.get((name, fragment.kind))
        if entry is not None and entry.shape != shape:
            yield Problem(f"{name} of shape {list(shape)}", f"its shape in {self.folder} is {list(entry.shape)}")

    def _check_stored(self, wanted: Mapping[TensorKey, Collection[Box]]) -> None:
        """Raise DamageError where these regions have holes, or their files are missing or of the wrong size."""
        new = {key: set(wanted[key]) - self._complete[key] for key in sorted(wanted)}
        self._load(new)
        files: dict[str, FileEntry] = {}
        holes: dict[TensorKey, list[Problem]] = defaultdict(list)
        for key, region in ((key, region) for key, regions in new.items() for region in regions):
            near = [saved for saved in self._boxes[key] if intersect(saved.entry.box, region)]
            files |= {saved.file.name: saved.file for saved in near}
            if len(holes) < _MAX_PROBLEMS and (
                found := list(layout_problems(self._tensors[key], region, (saved.entry.box for saved in near)))
            ):
                holes[key] += found
        if holes:
            problems = (problem for found in holes.values() for problem in found)
            indices = {self.manifest.indices[self._index_of[key]].name for key in holes if self.manifest.indices}
            raise DamageError(*islice(problems, _MAX_PROBLEMS), files=indices)
        _raise_damage({name: list(self._file_problems(file)) for name, file in sorted(files.items())})
        for key, regions in new.items():
            self._complete[key] |= regions

    def _file_problems(self, file: FileEntry) -> Iterator[Problem]:
        path = self.folder / file.name
        try:
            size = path.stat().st_size
        except OSError as error:
            yield _unreadable(path, error)
            return
        if size != file.num_bytes:
            yield Problem(f"{path}: {size} bytes", "truncated or altered since it was saved", f"{file.num_bytes} bytes")

    def _copy(self, targets: Mapping[TensorKey, list[_Target]]) -> None:
        """Copy values to the targets, file by file in the order of bytes; raise DamageError if data is damaged."""
        plan: dict[str, list[tuple[_StoredBox, list[_Target]]]] = defaultdict(list)
        for key, wanted in targets.items():
            for saved in self._boxes[key]:
                if overlaps := list(_overlaps(saved.entry.box, wanted)):
                    plan[saved.file.name].append((saved, overlaps))
        damage: dict[str, list[Problem]] = {}
        for name in sorted(plan):
            in_order = sorted(plan[name], key=lambda each: each[0].entry.begin)
            damage[name] = list(self._copy_from(in_order[0][0].file, in_order))
        _raise_damage(damage)

    def _copy_from(self, file: FileEntry, plan: list[tuple[_StoredBox, list[_Target]]]) -> Iterator[Problem]:
        """Copy boxes of one file; yield the problems found in it."""
        path = self.folder / file.name
        try:
            with open_regular(path, inside=self.folder) as stream:
                if (known := self._described.get(file.name, 0)) != (read := len(self._in_file[file.name])):
                    found = list(self._header_problems(stream, file, known=max(known, 0)))
                    yield from found
                    self._described[file.name] = -1 if found else read
                for saved, overlaps in plan:
                    yield from self._copy_box(stream, saved, overlaps)
        except OSError as error:
            yield _unreadable(path, error)

    def _copy_box(self, stream: BufferedReader, saved: _StoredBox, overlaps: list[_Target]) -> Iterator[Problem]:
        entry = saved.entry
        raw = _read_bytes(stream, entry.begin, entry.end)
        if not self._is_sound(saved, raw):
            yield self._damaged(saved)
            return
        values = raw.view(DTYPES[self._tensors[entry.parameter, entry.kind].dtype]).view(entry.lengths)
        for target in overlaps:
            target.view().copy_(values[index_within(entry.box, target.box)])

    def _header_problems(self, stream: BufferedReader, file: FileEntry, *, known: int = 0) -> Iterator[Problem]:
        """Yield the problem of a file's header; known: how many boxes, the first ones read, are known to be in it."""
        stream.seek(0)
        header, is_all = stream.read(file.header_bytes), self._num_read == self.num_boxes
        boxes = self._in_file[file.name] if is_all else self._in_file[file.name][known:]
        dtypes = {key: self._tensors[key].dtype for key in {(box.parameter, box.kind) for box in boxes}}
        if rule := header_problem(file, boxes, dtypes, header, is_all=is_all):
            yield Problem(str(self.folder / file.name), rule)

    def _is_sound(self, saved: _StoredBox, raw: Tensor) -> bool:
        """Return True if the bytes match the stored hash; a box that matched once is not hashed again."""
        key = (saved.file.name, saved.entry.begin)
        if len(raw) != saved.entry.end - saved.entry.begin:
            return False
        if key not in self._sound and _digest(raw) == saved.entry.sha256:
            self._sound.add(key)
        return key in self._sound

    def _damaged(self, saved: _StoredBox) -> Problem:
        file, entry = saved
        where = f"bytes {entry.begin} to {entry.end} of {self.folder / file.name}"
        return Problem(
            f"{entry.kind} of {entry.parameter}, region {format_box(entry.box)}",
            f"damaged: {where} do not match the hash in the manifest",
        )

    def _filling_problems(self, file: FileEntry) -> Iterator[Problem]:
        """Yield a problem if the boxes of a file do not fill it, where all boxes are read."""
        if self._num_read == self.num_boxes:
            yield from filling_problems(file, self._boxes_in(file), str(self.folder / file.name))

    def _damage_of(self, file: FileEntry) -> Iterator[Problem]:
        """Check the size of a file, its header, and every box of it against its hash, reading them anew.

        Boxes are those that are read.
        """
        path = self.folder / file.name
        if problems := [*self._file_problems(file), *self._filling_problems(file)]:
            yield from problems
            return
        try:
            with open_regular(path, inside=self.folder) as stream:
                yield from self._header_problems(stream, file)
                for entry in self._boxes_in(file):
                    raw = _read_bytes(stream, entry.begin, entry.end)
                    if _digest(raw) != entry.sha256:
                        yield self._damaged(_StoredBox(file, entry))
        except OSError as error:
            yield _unreadable(path, error)


def _raise_damage(damage: Mapping[str, list[Problem]]) -> None:
    """Raise DamageError with the problems of files, by their names, if there are any."""
    if files := [name for name, problems in damage.items() if problems]:
        raise DamageError(*islice(chain.from_iterable(damage.values()), _MAX_PROBLEMS), files=files)


def _overlaps(saved: Box, targets: Iterable[_Target]) -> Iterator[_Target]:
    """Yield the parts of the targets that a saved box covers."""
    for target in targets:
        shared = intersect(saved, target.box)
        if shared is not None:
            yield _Target(shared, partial(_part_of, target, shared))


def _view_of(fragment: StateFragment, piece: BoxPiece) -> Tensor:
    return piece_view(fragment.tensor.detach(), piece)


def _part_of(target: _Target, box: Box) -> Tensor:
    return target.view()[index_within(target.box, box)]


def _digest(raw: Tensor) -> str:
    return hashlib.sha256(raw.numpy().data).hexdigest()


def _read_bytes(stream: BufferedReader, begin: int, end: int) -> Tensor:
    """Read bytes [begin, end) of a file as a uint8 tensor; shorter when the file ends before."""
    raw = torch.empty(end - begin, dtype=torch.uint8)
    stream.seek(begin)
    return raw[: stream.readinto(raw.numpy().data)]


def _read_span(stream: BufferedReader, begin: int, length: int) -> bytes:
    stream.seek(begin)
    return stream.read(length)


def _read_file(path: Path, limit: int) -> bytes:
    try:
        return read_bounded(path, limit, inside=path.parent)
    except OSError as error:
        raise DamageError(_unreadable(path, error)) from error


def _unreadable(path: Path, error: OSError) -> Problem:
    """Return the problem of a file that is damaged; raise CheckpointError if the checkpoint itself may be sound."""
    problem = Problem(str(path), f"cannot be read: {error.strerror or error}")
    if error.errno in _DAMAGE:
        return problem
    raise CheckpointError(problem) from error
