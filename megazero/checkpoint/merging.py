"""Merging: what the ranks have written becomes the indices of a checkpoint, on as many ranks as there are indices.

    rank 0    boxes  aaa|bbbb|cc          its part: a section for each index
    rank 1    boxes  a|bbb|cccc                            |
    rank 2    boxes  aaaa|b|c                              v
                                     index 0: all a,  index 1: all b,  index 2: all c      (rank 0, 1, 2)

Tensors have one order for all ranks (weights first, then by kind; each by name, with numbers as numbers), and an index
covers a contiguous share of it.  No rank has the list of all tensors before indices are cut, so each offers a sample of
its own, and the bounds between indices are taken from all samples: shares of about as many boxes, whatever the layout.
A rank then writes its *part*, a section for each index, and the rank that merges an index reads one of every part.
The ranks exchange names of files, numbers and samples only.
"""

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from megazero.checkpoint.index import cut, dump_index
from megazero.checkpoint.manifest import (
    MAX_INDICES,
    BoxEntry,
    FileEntry,
    IndexEntry,
    TensorEntry,
    TensorKey,
    describe,
    layout_problems,
)
from megazero.checkpoint.slices import whole
from megazero.errors import CheckpointError, Problem, raise_problems

BOXES_PER_INDEX = 8192
_SAMPLES = 2048  # of all ranks together, at least
_SAMPLES_OF_RANK = 8  # at least
_MAX_PROBLEMS = 20
_GOLDEN = 0.618033988749895  # multiples of it, modulo 1, lie evenly, so that ranks with the same tensors offer others
_NUMBER = re.compile(r"\d+")

_strict = ConfigDict(extra="forbid", strict=True)


class Written(NamedTuple):
    """A rank's data file, its boxes in the order of their bytes, and the tensors that it has a part of.

    tensors: includes those of which the rank has nothing but padding.
    """

    file: FileEntry
    boxes: tuple[BoxEntry, ...]
    tensors: tuple[TensorEntry, ...]

    def report(self, rank: int, world_size: int) -> dict[str, Any]:
        """Return what all ranks need of this one to cut indices, as JSON-able values."""
        places = sorted(map(order_of_box, self.boxes))
        count = max(_SAMPLES_OF_RANK, _SAMPLES // world_size)
        shift = rank * _GOLDEN % 1
        chosen: Iterable[int] = range(len(places))
        if len(places) > count:
            chosen = sorted({int((number + shift) * len(places) / count) for number in range(count)})
        return {
            "file": [self.file.name, self.file.num_bytes, self.file.header_bytes, self.file.header_sha256],
            "boxes": len(places),
            "samples": [places[index] for index in chosen],
        }


class IndexPlan(NamedTuple):
    """The data files of all ranks, in rank order, and the places in the tensors' order at which indices begin.

    bounds: where all indices but the first begin; ascending.
    """

    files: tuple[FileEntry, ...]
    bounds: tuple[str, ...]

    @property
    def num_indices(self) -> int:
        return len(self.bounds) + 1

    def index_of(self, place: str) -> int:
        """Return the number of the index that a place in the order falls into."""
        return bisect_right(self.bounds, place)


@dataclass(frozen=True, config=_strict)
class _Section:
    """The boxes that one rank has for one index."""

    tensors: tuple[TensorEntry, ...]
    boxes: tuple[BoxEntry, ...]


@dataclass(frozen=True, config=_strict)
class _PartHead:
    """The first line of a part; sections: their bytes, counted from the end of this line."""

    save_id: str
    file: str
    sections: tuple[tuple[int, int], ...]


@dataclass(frozen=True, config=_strict)
class MergedIndex:
    """A merged index, for the manifest."""

    index: IndexEntry
    tensors: tuple[TensorEntry, ...]


_SECTION = TypeAdapter(_Section)
_HEAD = TypeAdapter(_PartHead)
_MERGED = TypeAdapter(MergedIndex)


def order_of(parameter: str, kind: str) -> str:
    """Return a text by which tensors are sorted: weights, then other kinds; by name, with numbers in it as numbers."""
    first = "" if kind == "weight" else kind
    return f"{first} {_NUMBER.sub(lambda found: found[0].zfill(9), parameter)} {parameter}"


def order_of_box(box: BoxEntry) -> str:
    """Return the place of a box's tensor in the order."""
    return order_of(box.parameter, box.kind)


def plan_indices(reports: Sequence[dict[str, Any]], *, boxes_per_index: int = BOXES_PER_INDEX) -> IndexPlan:
    """Cut the order of tensors into indices; the same on all ranks, whose `reports` these are."""
    files = tuple(FileEntry(*report["file"]) for report in reports)
    boxes = sum(report["boxes"] for report in reports)
    samples = sorted(sample for report in reports for sample in report["samples"])
    count = min(MAX_INDICES, max(1, -(-boxes // boxes_per_index)))
    bounds = {samples[number * len(samples) // count] for number in range(1, count)} - {samples[0] if samples else ""}
    return IndexPlan(files, tuple(sorted(bounds)))


def index_name(number: int) -> str:
    """Return the name of an index file."""
    return f"index_{number:05d}.jsonl"


def part_path(data: Path) -> Path:
    """Return the path of the part that describes a rank's data file."""
    return data.with_name(f"{data.name}.json")


def write_part(folder: Path, save_id: str, written: Written, plan: IndexPlan) -> None:
    """Write a rank's part beside its data file; not synced, as it is read within this save, and then deleted."""
    tensors: list[list[TensorEntry]] = [[] for _ in range(plan.num_indices)]
    boxes: list[list[BoxEntry]] = [[] for _ in range(plan.num_indices)]
    for entry in written.tensors:
        tensors[plan.index_of(order_of(entry.parameter, entry.kind))].append(entry)
    for box in written.boxes:
        boxes[plan.index_of(order_of_box(box))].append(box)
    sections = [_SECTION.dump_json(_Section(tuple(a), tuple(b))) for a, b in zip(tensors, boxes, strict=True)]
    ends = [sum(map(len, sections[: number + 1])) for number in range(len(sections))]
    places = tuple((end - len(section), end) for end, section in zip(ends, sections, strict=True))
    with open(part_path(folder / written.file.name), "wb") as file:
        file.write(_HEAD.dump_json(_PartHead(save_id, written.file.name, places)) + b"\n")
        file.writelines(sections)


def merge(folder: Path, save_id: str, plan: IndexPlan, number: int) -> None:
    """Merge an index of all parts, check it, and write it durably, with a summary beside it for `read_merged`.

    Raises CheckpointError when ranks disagree on a tensor's shape or dtype, when a region of a tensor is stored nowhere
    or more than once, and when a part or a data file is not as its rank wrote it.  Of the data files each merging rank
    looks at a share.
    """
    files = plan.files
    altered = chain.from_iterable(_file_problems(folder, file) for file in files[number :: plan.num_indices])
    raise_problems(CheckpointError, islice(altered, _MAX_PROBLEMS))
    sections = [_read_section(folder, save_id, file, number) for file in files]
    tensors = _merged_tensors(section.tensors for section in sections)
    boxes: dict[TensorKey, list[tuple[str, BoxEntry]]] = {(entry.parameter, entry.kind): [] for entry in tensors}
    for file, section in zip(files, sections, strict=True):
        for box in section.boxes:
            boxes[box.parameter, box.kind].append((file.name, box))
    problems = (
        layout_problems(entry, whole(entry.shape), (box.box for _, box in boxes[entry.parameter, entry.kind]))
        for entry in tensors
    )
    raise_problems(CheckpointError, islice(chain.from_iterable(problems), _MAX_PROBLEMS))
    content, entry = dump_index(index_name(number), len(tensors), chain.from_iterable(map(cut, boxes.values())))
    write_durably(folder / entry.name, content)
    _summary_path(folder, number).write_bytes(_MERGED.dump_json(MergedIndex(entry, tensors)))


def read_merged(folder: Path, number: int) -> MergedIndex:
    """Return what `merge` has made of an index, and delete its summary."""
    path = _summary_path(folder, number)
    merged = _MERGED.validate_json(path.read_bytes())
    path.unlink()
    return merged


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _summary_path(folder: Path, number: int) -> Path:
    return folder / f"{index_name(number)}.merged"


def _file_problems(folder: Path, file: FileEntry) -> Iterator[Problem]:
    path = folder / file.name
    size = path.stat().st_size
    if size != file.num_bytes:
        yield Problem(f"{path}: {size} bytes", "altered since its rank wrote it", f"{file.num_bytes} bytes")


def _read_section(folder: Path, save_id: str, file: FileEntry, number: int) -> _Section:
    """Return one section of the part of a data file; raise CheckpointError if the part is not that of this save."""
    path = part_path(folder / file.name)
    with open(path, "rb") as stream:
        line = stream.readline()
        # megazero wrote it within this save, so a fault in it is a bug (pydantic.ValidationError).
        head = _HEAD.validate_json(line)
        if head.save_id != save_id:
            raise CheckpointError(Problem(f"{path}: save {head.save_id}", "it belongs to another save", save_id))
        if head.file != file.name:
            raise CheckpointError(Problem(f"{path}: it describes {head.file}", "it belongs to another file", file.name))
        begin, end = head.sections[number]
        stream.seek(len(line) + begin)
        return _SECTION.validate_json(stream.read(end - begin))


def _merged_tensors(found: Iterable[Sequence[TensorEntry]]) -> tuple[TensorEntry, ...]:
    """Return the tensors of all ranks in order, each once; raise CheckpointError where ranks disagree on one."""
    tensors: dict[TensorKey, TensorEntry] = {}
    problems: list[Problem] = []
    for rank, entries in enumerate(found):
        for entry in entries:
            known = tensors.setdefault((entry.parameter, entry.kind), entry)
            if known != entry:
                problems.append(Problem(f"rank {rank}: {describe(entry)}", f"other ranks have {describe(known)}"))
    raise_problems(CheckpointError, problems[:_MAX_PROBLEMS])
    return tuple(sorted(tensors.values(), key=lambda entry: order_of(entry.parameter, entry.kind)))
