"""An index: the boxes of some tensors, in segments that can be read one by one, with a directory of them.  Pure.

    index_00000.jsonl        the directory, then a line for each of its segments, in its order
    {"segments": [{"parameter": "wte.weight", "kind": "weight", "offset": [0, 0], "lengths": [30, 60],
                   "num_boxes": 2, "num_bytes": 400, "sha256": "..."}, ...]}
    {"files": [{"name": "rank_00000.safetensors",
                "boxes": [{"parameter": "wte.weight", "kind": "weight", "offset": [0, 0], "lengths": [15, 60],
                           "begin": 400, "end": 4000, "sha256": "..."}, ...]}, ...]}
    {"files": ...}

A *segment* has neighbouring boxes of one tensor, and the directory their bounds: under ZeRO stage 3 a rank needs a
small region of nearly every tensor, and reads the one or two segments of each that overlap it.  `begin` and `end` are
bytes from the start of the data file.  Segments lie back to back, so the directory has their lengths only.

The manifest has the hash of the directory, and the directory those of the segments, so whatever is read is compared
with a hash before it is parsed.  The index may come from an untrusted source: bounds that are not those of the boxes
are an error of the segment, and a segment that a reader passes over for its bounds leaves a hole that the reader finds.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Annotated, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megazero.checkpoint.manifest import (
    BoxEntry,
    BoxTable,
    Digest,
    Dims,
    FileBoxes,
    FileEntry,
    IndexEntry,
    Kind,
    Manifest,
    Position,
    TensorEntry,
    TensorKey,
    is_inside,
    schema_problems,
    table_problems,
)
from megazero.checkpoint.slices import bounds_of, format_box
from megazero.errors import DamageError, Problem
from megazero.parallel.param_spec import Box

# A reader parses the whole directory, and a segment or two for each region that it needs: of a tensor that a thousand
# ranks have parts of, that is least where a segment has about as many boxes as a tensor has segments.
BOXES_PER_SEGMENT = 64
_MAX_PROBLEMS = 20

_strict = ConfigDict(extra="forbid", strict=True)
_Table = TypeVar("_Table")


@dataclass(frozen=True, config=_strict)
class SegmentEntry:
    """One segment: the bounds of its boxes, which are of one tensor, and what its bytes must be."""

    parameter: str
    kind: Kind
    offset: Dims
    lengths: Dims
    num_boxes: Annotated[int, Field(ge=1)]
    num_bytes: Position
    sha256: Digest

    @property
    def key(self) -> TensorKey:
        return self.parameter, self.kind

    @property
    def box(self) -> Box:
        return Box(self.offset, self.lengths)


@dataclass(frozen=True, config=_strict)
class _Directory:
    segments: tuple[SegmentEntry, ...]


class IndexSegment(NamedTuple):
    """A segment, and the number of its index; begin: its first byte in the file of the index."""

    number: int
    begin: int
    entry: SegmentEntry


_DIRECTORY = TypeAdapter(_Directory)
_TABLE = TypeAdapter(BoxTable)


def cut(boxes: Iterable[tuple[str, BoxEntry]], *, boxes_per_segment: int = BOXES_PER_SEGMENT) -> Iterator[BoxTable]:
    """Cut boxes of one tensor, each with the name of its data file, into the tables of segments."""
    in_order = sorted(boxes, key=lambda each: each[1].offset)
    for first in range(0, len(in_order), boxes_per_segment):
        files: dict[str, list[BoxEntry]] = {}
        for name, box in in_order[first : first + boxes_per_segment]:
            files.setdefault(name, []).append(box)
        yield BoxTable(
            tuple(FileBoxes(name, tuple(sorted(files[name], key=lambda box: box.begin))) for name in sorted(files))
        )


def dump_index(name: str, num_tensors: int, tables: Iterable[BoxTable]) -> tuple[bytes, IndexEntry]:
    """Return the content of an index with these segments, and its entry in the manifest."""
    texts, entries = [], []
    for table in tables:
        boxes = [box for file in table.files for box in file.boxes]
        bounds = bounds_of([box.box for box in boxes])
        texts.append(_TABLE.dump_json(table) + b"\n")
        size, digest = len(texts[-1]), hashlib.sha256(texts[-1]).hexdigest()
        first = boxes[0]
        entries.append(
            SegmentEntry(first.parameter, first.kind, bounds.offset, bounds.lengths, len(boxes), size, digest)
        )
    directory = _DIRECTORY.dump_json(_Directory(tuple(entries))) + b"\n"
    content, digest = b"".join((directory, *texts)), hashlib.sha256(directory).hexdigest()
    count = sum(entry.num_boxes for entry in entries)
    return content, IndexEntry(name, len(content), len(directory), digest, num_tensors, count)


def parse_directory(text: bytes, manifest: Manifest, number: int, *, source: str) -> list[IndexSegment]:
    """Parse the directory of the index of this number; raise DamageError unless it is the manifest's and valid.

    source: the file to name in messages; the error names it by its name in the folder too.
    """
    entry = manifest.indices[number]
    found = _parsed(_DIRECTORY, text, entry.directory_sha256, entry, source=source)
    tensors = {(each.parameter, each.kind): each for each in manifest.tensors_of(number)}
    _raise_damage(entry, _directory_problems(found.segments, tensors, entry, source))
    begins = accumulate((each.num_bytes for each in found.segments), initial=entry.directory_bytes)
    return [IndexSegment(number, begin, each) for begin, each in zip(begins, found.segments, strict=False)]


def parse_segment(
    text: bytes,
    segment: IndexSegment,
    entry: IndexEntry,
    files: Mapping[str, FileEntry],
    tensor: TensorEntry,
    *,
    source: str,
) -> BoxTable:
    """Parse a segment of the index with this entry; raise DamageError unless it is the directory's and valid.

    files: the manifest's.  tensor: that of the segment.  source: as in `parse_directory`.
    """
    where = f"{source}, byte {segment.begin}"
    table = _parsed(_TABLE, text, segment.entry.sha256, entry, source=where)
    _raise_damage(entry, table_problems(table, files, {segment.entry.key: tensor}, where))
    boxes = [box.box for file in table.files for box in file.boxes]
    _raise_damage(entry, _bounds_problems(boxes, segment.entry, where))
    return table


def content_problems(content: bytes, manifest: Manifest, number: int, *, source: str) -> Iterator[Problem]:
    """Yield where the content of an index file is not that which the manifest describes; no box is parsed."""
    entry = manifest.indices[number]
    if len(content) != entry.num_bytes:
        rule = "truncated or altered since it was saved"
        yield Problem(f"{source}: {len(content)} bytes", rule, f"{entry.num_bytes} bytes")
        return
    try:
        segments = parse_directory(content[: entry.directory_bytes], manifest, number, source=source)
    except DamageError as error:
        yield from error.problems
        return
    for segment in segments:
        text = content[segment.begin : segment.begin + segment.entry.num_bytes]
        yield from _hash_problems(text, segment.entry.sha256, f"{source}, byte {segment.begin}")


def _parsed(adapter: TypeAdapter[_Table], text: bytes, digest: str, entry: IndexEntry, *, source: str) -> _Table:
    """Return a table of an index, whose form alone is checked, once its hash has been."""
    _raise_damage(entry, _hash_problems(text, digest, source))
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        raise DamageError(*schema_problems(error, source), files=(entry.name,)) from None


def _raise_damage(entry: IndexEntry, problems: Iterator[Problem]) -> None:
    if found := list(islice(problems, _MAX_PROBLEMS)):
        raise DamageError(*found, files=(entry.name,))


def _hash_problems(text: bytes, digest: str, source: str) -> Iterator[Problem]:
    if hashlib.sha256(text).hexdigest() != digest:
        yield Problem(source, "damaged, or of another checkpoint: it does not match the hash in the manifest")


def _directory_problems(
    segments: Sequence[SegmentEntry], tensors: Mapping[TensorKey, TensorEntry], entry: IndexEntry, source: str
) -> Iterator[Problem]:
    for each in segments:
        given = f"{source}: segment of {each.kind} of {each.parameter} {list(each.offset)} + {list(each.lengths)}"
        if each.key not in tensors:
            yield Problem(given, "the manifest lists no such tensor here")
        elif not is_inside(each.box, shape := tensors[each.key].shape):
            yield Problem(given, f"not a region of a tensor of shape {list(shape)}")
    size = entry.directory_bytes + sum(each.num_bytes for each in segments)
    if size != entry.num_bytes:
        yield Problem(f"{source}: {size} bytes in all", "not those of the manifest", str(entry.num_bytes))
    count = sum(each.num_boxes for each in segments)
    if count != entry.num_boxes:
        yield Problem(f"{source}: {count} boxes", "not those of the manifest", str(entry.num_boxes))


def _bounds_problems(boxes: Sequence[Box], entry: SegmentEntry, source: str) -> Iterator[Problem]:
    if len(boxes) != entry.num_boxes:
        yield Problem(f"{source}: {len(boxes)} boxes", "not those of the directory", str(entry.num_boxes))
    elif bounds_of(boxes) != entry.box:
        given = f"{source}: boxes of region {format_box(bounds_of(boxes))}"
        yield Problem(given, "not the bounds in the directory", format_box(entry.box))
