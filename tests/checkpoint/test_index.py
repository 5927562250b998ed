"""Tests of indices: segments come back as they were, a region is in few of them, and any other content is refused."""

import copy
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain, pairwise, product
from typing import Any

import pytest
from support.checkpoint_versions import index_entry, index_texts
from support.each import each

from megazero.checkpoint.index import content_problems, cut, dump_index, parse_directory, parse_segment
from megazero.checkpoint.manifest import (
    BoxEntry,
    BoxTable,
    ConfigEntry,
    FileEntry,
    IndexEntry,
    Manifest,
    TensorEntry,
)
from megazero.errors import DamageError

HASH = "0" * 64
NAME = "index_00000.jsonl"
TENSORS = (TensorEntry("w", "weight", (24, 40), "F32"), TensorEntry("v", "weight", (), "F32"))


def grid(rows: int, columns: int) -> list[tuple[str, BoxEntry]]:
    """Return boxes of one row each, 40 / columns wide, shuffled; a file has some neighbouring rows of a column."""
    width = 40 // columns
    boxes = []
    for column, row in product(range(columns), range(24)):
        begin = 80 + row % rows * 4 * width
        entry = BoxEntry("w", "weight", (row, column * width), (1, width), begin, begin + 4 * width, HASH)
        boxes.append((f"rank_{column}_{row // rows}.safetensors", entry))
    random.Random(3).shuffle(boxes)
    return boxes


def made(*, per_segment: int = 16) -> tuple[list[BoxTable], Manifest, bytes]:
    """Return the segments, the manifest and the content of an index with a tensor of 96 boxes, and one of one box."""
    boxes = grid(4, 4)
    scalar = BoxEntry("v", "weight", (), (), 80 + 160, 80 + 164, HASH)
    tables = [*cut(boxes, boxes_per_segment=per_segment), *cut([("rank_0_0.safetensors", scalar)])]
    content, entry = dump_index(NAME, 2, tables)
    return tables, manifest_of(entry, sorted({name for name, _ in boxes})), content


def manifest_of(entry: IndexEntry, files: list[str]) -> Manifest:
    entries = tuple(FileEntry(name, 1000, 80, HASH) for name in files)
    return Manifest(1, {}, ConfigEntry("config.yaml", HASH), TENSORS, entries, (entry,))


def parse(content: bytes, manifest: Manifest) -> list[BoxTable]:
    """Parse all segments."""
    entry = manifest.indices[0]
    files = {file.name: file for file in manifest.files}
    tensors = {(tensor.parameter, tensor.kind): tensor for tensor in manifest.tensors}
    segments = parse_directory(content[: entry.directory_bytes], manifest, 0, source="i")
    spans = [content[each.begin : each.begin + each.entry.num_bytes] for each in segments]
    return [
        parse_segment(text, each, entry, files, tensors[each.entry.key], source="i")
        for text, each in zip(spans, segments, strict=True)
    ]


def test_segments_come_back_as_they_were() -> None:
    tables, manifest, content = made()
    assert parse(content, manifest) == tables
    assert len(tables) == 7
    assert list(content_problems(content, manifest, 0, source="i")) == []


def test_the_documented_form_can_be_made_by_others() -> None:
    tables, manifest, content = made()
    texts = index_texts([json.loads(json.dumps(asdict(table))) for table in tables])
    assert [json.loads(line) for line in content.splitlines()[1:]] == list(map(json.loads, texts[1].splitlines()))
    entry = manifest.indices[0]
    assert hashlib.sha256(content.splitlines(keepends=True)[0]).hexdigest() == entry.directory_sha256
    segments = json.loads(content.splitlines()[0])["segments"]
    for line, given, expected in zip(
        content.splitlines(keepends=True)[1:], segments, json.loads(texts[0])["segments"], strict=True
    ):
        assert (given.pop("num_bytes"), given.pop("sha256")) == (len(line), hashlib.sha256(line).hexdigest())
        assert given.items() <= expected.items()
    assert (entry.num_tensors, entry.num_boxes, entry.num_bytes) == (2, 97, len(content))


@each("per_segment", [1, 7, 16, 1000])
def test_every_box_is_in_one_segment_and_those_of_some_rows_are_in_few(per_segment: int) -> None:
    boxes = grid(3, 5)
    tables = list(cut(boxes, boxes_per_segment=per_segment))
    found = [[(file.name, box) for file in table.files for box in file.boxes] for table in tables]
    assert sorted(map(repr, chain.from_iterable(found))) == sorted(map(repr, boxes))
    assert [len(segment) for segment in found[:-1]] == [per_segment] * (len(found) - 1)
    assert 0 < len(found[-1]) <= per_segment
    for table in tables:
        assert all(a.begin < b.begin for file in table.files for a, b in pairwise(file.boxes))
    for row in range(24):
        # The 5 boxes of a row are neighbours in the order.
        near = [segment for segment in found if any(box.offset[0] == row for _, box in segment)]
        assert len(near) <= 2 + 4 // per_segment


def test_every_flipped_byte_is_noticed() -> None:
    _, manifest, content = made(per_segment=64)
    for place in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[place] ^= 1
        with pytest.raises(DamageError, match="does not match the hash") as caught:
            parse(bytes(damaged), manifest)
        assert caught.value.files == {NAME}
        assert len(list(content_problems(bytes(damaged), manifest, 0, source="i"))) == 1


@each("size", [0, 1, 500, -1, None])
def test_an_index_that_is_cut_or_longer_is_noticed(size: int | None) -> None:
    _, manifest, content = made()
    changed = content[:size] if size is not None else content + b"\n"
    (problem,) = content_problems(changed, manifest, 0, source="i")
    assert f"{len(changed)} bytes" in problem.given and problem.legal == f"{len(content)} bytes"


Change = Callable[[list[dict[str, Any]]], object]


def _segment(**changes: Any) -> Change:
    return lambda segments: segments[1].update(changes)


def _grow(by: int) -> Change:
    return lambda segments: segments[1].update(num_bytes=segments[1]["num_bytes"] + by)


def _shift(segments: list[dict[str, Any]]) -> None:
    """Let a segment begin before the end of the one before it, and nothing else lie elsewhere."""
    segments[0]["num_bytes"] -= 30
    segments[1]["num_bytes"] += 30


def _other_box(**changes: Any) -> Change:
    return lambda tables: tables[1]["files"][0]["boxes"][0].update(changes)


def _large_bounds(segments: list[dict[str, Any]]) -> None:
    segments[1].update(offset=[0, 0], lengths=[24, 40])


HOSTILE_DIRECTORIES: dict[str, tuple[Change, str]] = {
    "segment past the end of the file": (_grow(10**6), r"bytes in all\n.*not those of the manifest"),
    "segment of 4 exabytes": (_segment(num_bytes=2**62), r"bytes in all\n.*not those of the manifest"),
    "more than can be": (_segment(num_bytes=2**70), "less than or equal"),
    "negative length": (_segment(num_bytes=-1), "greater than or equal"),
    "overlapping segments": (_shift, "does not match the hash"),
    "wrong hash": (_segment(sha256=HASH), "does not match the hash"),
    "no hash": (_segment(sha256=""), "match pattern"),
    "missing segment": (lambda segments: segments.pop(), "bytes in all\n(.|\n)*96 boxes\n.*not those of the manifest"),
    "segment twice": (lambda segments: segments.append(segments[0]), "bytes in all"),
    "no segments": (lambda segments: segments.clear(), "bytes in all"),
    "segments of each other": (lambda segments: segments.reverse(), "does not match the hash"),
    "tensor that is not here": (_segment(parameter="x"), "lists no such tensor here"),
    "kind that is not here": (_segment(kind="exp_avg"), "lists no such tensor here"),
    "kind that is no kind": (_segment(kind="../x"), "match pattern"),
    "segment of another tensor": (_segment(parameter="v", offset=[], lengths=[]), "lists no such tensor here"),
    "bounds outside": (_segment(offset=[24, 0]), "not a region of a tensor"),
    "bounds too large for the tensor": (_segment(lengths=[25, 40]), "not a region of a tensor"),
    "bounds without elements": (_segment(lengths=[0, 40]), "not a region of a tensor"),
    "bounds of other dims": (_segment(offset=[0], lengths=[4]), "not a region of a tensor"),
    "bounds of two counts of dims": (_segment(lengths=[4]), "not a region of a tensor"),
    "bounds smaller than the boxes": (_segment(offset=[4, 0], lengths=[1, 1]), "not the bounds in the directory"),
    "bounds larger than the boxes": (_large_bounds, "not the bounds in the directory"),
    "too few boxes": (_segment(num_boxes=15), "96 boxes"),
    "no boxes": (_segment(num_boxes=0), "greater than or equal"),
    "boxes of another segment": (
        lambda segments: (segments[0].update(num_boxes=17), segments[1].update(num_boxes=15)),
        "16 boxes\n.*not those of the directory",
    ),
    "unknown field": (_segment(run_me="rm"), "Unexpected"),
    "missing field": (lambda segments: segments[1].pop("num_bytes"), "required"),
    "length as text": (_segment(num_bytes="12"), "valid integer"),
    "length a boolean": (_segment(num_boxes=True), "valid integer"),
}
HOSTILE_SEGMENTS: dict[str, tuple[Change, str]] = {
    "box outside its tensor": (_other_box(offset=[24, 0]), "not a region of a tensor"),
    "box of another tensor": (_other_box(parameter="v", offset=[], lengths=[]), "lists no such tensor here"),
    "box of no tensor": (_other_box(parameter="x"), "lists no such tensor here"),
    "box of too few bytes": (_other_box(end=100), "back to back"),
    "box inside the header": (_other_box(begin=0, end=40), "back to back"),
    "box outside its file": (_other_box(begin=10**6, end=10**6 + 40), "back to back"),
    "file that is not there": (lambda tables: tables[1]["files"][0].update(name="x"), "lists no such file"),
    "file twice": (lambda tables: tables[1]["files"].append(tables[1]["files"][0]), "listed more than once"),
    "unknown field": (lambda tables: tables[1].update(run_me="rm"), "Unexpected"),
    "no table": (lambda tables: tables[1].update(files=5), "valid (array|tuple)"),
}


def index_after(change: Change, *, of_directory: bool) -> tuple[Manifest, bytes]:
    """Return an index whose directory or segments were changed, with all hashes and sizes that can be mended mended."""
    tables, manifest, _ = made()
    plain = [json.loads(json.dumps(asdict(table))) for table in tables]
    _, before = index_texts(plain)
    if of_directory:
        directory, segments = index_texts(plain, lambda found: change(found["segments"]))
        return _manifest_of(directory, before, manifest), directory + segments
    changed = copy.deepcopy(plain)
    change(changed)
    lines = [json.dumps(table).encode() + b"\n" for table in changed]

    def mend(found: dict[str, Any]) -> None:
        for entry, line in zip(found["segments"], lines, strict=True):
            entry.update(num_bytes=len(line), sha256=hashlib.sha256(line).hexdigest())

    directory, _ = index_texts(plain, mend)
    return _manifest_of(directory, b"".join(lines), manifest), directory + b"".join(lines)


def _manifest_of(directory: bytes, segments: bytes, like: Manifest) -> Manifest:
    entry = IndexEntry(NAME, num_tensors=2, num_boxes=97, **index_entry(directory, segments))
    return manifest_of(entry, [file.name for file in like.files])


@each("name", HOSTILE_DIRECTORIES)
def test_a_hostile_directory_is_refused(name: str) -> None:
    change, message = HOSTILE_DIRECTORIES[name]
    manifest, content = index_after(change, of_directory=True)
    with pytest.raises(DamageError, match=message) as caught:
        parse(content, manifest)
    assert caught.value.files == {NAME}


@each("name", HOSTILE_SEGMENTS)
def test_a_hostile_segment_is_refused(name: str) -> None:
    change, message = HOSTILE_SEGMENTS[name]
    manifest, content = index_after(change, of_directory=False)
    assert list(content_problems(content, manifest, 0, source="i")) == []
    with pytest.raises(DamageError, match=message) as caught:
        parse(content, manifest)
    assert caught.value.files == {NAME}


NOT_TABLES = (b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"files": NaN}', b"[" * 100_000, b'{"files":' * 10_000)


@each("text", (*NOT_TABLES, b"\x80\x04K\x01."))
def test_what_is_not_an_index_is_refused_by_name(text: bytes) -> None:
    _, manifest, content = made()
    for hostile in (_manifest_of(text, b"", manifest), manifest):
        with pytest.raises(DamageError, match=r"^checkpoint error: i|\ni: ") as caught:
            parse(text, hostile)
        assert caught.value.files == {NAME}
    table = {"num_bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    directory = json.loads(content.splitlines()[0])
    directory["segments"][0].update(table)
    head = json.dumps(directory).encode()
    rest = b"".join(content.splitlines(keepends=True)[2:])
    with pytest.raises(DamageError, match=r"checkpoint errors?:? i, byte|\ni, byte") as caught:
        parse(head + text + rest, _manifest_of(head, text + rest, manifest))
    assert caught.value.files == {NAME}


def test_an_index_has_as_many_boxes_as_the_manifest_says() -> None:
    _, manifest, content = made()
    entry = manifest.indices[0]
    other = IndexEntry(NAME, entry.num_bytes, entry.directory_bytes, entry.directory_sha256, 2, 98)
    with pytest.raises(DamageError, match=r"97 boxes\n.*not those of the manifest\n.*98"):
        parse(content, manifest_of(other, [file.name for file in manifest.files]))
