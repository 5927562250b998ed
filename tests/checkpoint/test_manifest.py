"""Tests of the manifest: a dumped one is read back the same, and any other text is refused with all its problems."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.checkpoint_versions import index_entry, index_texts, signed, version_1
from support.each import each

from megazero.checkpoint.index import dump_index
from megazero.checkpoint.manifest import (
    BOX_BYTES,
    DTYPES,
    BoxEntry,
    BoxTable,
    ConfigEntry,
    DtypeName,
    FileBoxes,
    FileEntry,
    Manifest,
    TensorEntry,
    dtype_bytes,
    dtype_name,
    dump_manifest,
    parse_manifest,
)
from megazero.checkpoint.reader import Checkpoint
from megazero.errors import CheckpointError, DamageError

HASH = "0" * 64
WEIGHT = TensorEntry("w", "weight", (4, 3), "F32")


def boxes_of(rank: int, rows: tuple[int, int]) -> FileBoxes:
    first, last = rows
    end = 80 + (last - first) * 3 * 4
    return FileBoxes(
        f"rank_{rank}.safetensors", (BoxEntry("w", "weight", (first, 0), (last - first, 3), 80, end, HASH),)
    )


TABLE = BoxTable((boxes_of(0, (0, 1)), boxes_of(1, (1, 4))))
INDEX, ENTRY = dump_index("index_00000.jsonl", 1, [TABLE])


def manifest(*, progress: Any = None) -> Manifest:
    config = ConfigEntry("config.yaml", HASH)
    files = tuple(FileEntry(each.name, each.boxes[-1].end, 80, HASH) for each in TABLE.files)
    return Manifest(7, {} if progress is None else progress, config, (WEIGHT,), files, (ENTRY,))


def test_a_manifest_comes_back_as_it_was() -> None:
    progress = {"samples": 2**70, "scale": 65536.0, "lr": 0.1 + 0.2, "name": "ü\n", "nested": [None, True, {"a": []}]}
    original = manifest(progress=progress)
    again, boxes = parse_manifest(dump_manifest(original), source="m")
    assert again == original
    assert boxes is None
    assert again.progress == progress
    assert (again.step, again.format, again.version) == (7, "megazero-checkpoint", 3)


def test_the_documented_hash_can_be_computed_by_others() -> None:
    text = dump_manifest(manifest())
    assert signed(json.loads(text)) == json.dumps(json.loads(text)).encode()


def test_the_first_version_is_read_into_the_same_tables() -> None:
    old = old_body()
    found, boxes = parse_manifest(signed(old), source="m")
    assert boxes == TABLE
    assert (found.version, found.indices, found.files) == (1, (), manifest().files)


def test_progress_must_be_json() -> None:
    with pytest.raises(ValueError):
        dump_manifest(manifest(progress={"best": float("inf")}))
    with pytest.raises(ValueError):
        manifest(progress={"state": object()})


def test_every_flipped_byte_is_noticed() -> None:
    text = dump_manifest(manifest(progress={"samples": 12, "text": "abc"}))
    original, _ = parse_manifest(text, source="m")
    for place in range(len(text) - 1):
        damaged = bytearray(text)
        damaged[place] ^= 1
        try:
            got, _ = parse_manifest(bytes(damaged), source="m")
        except CheckpointError:
            continue
        assert got == original, f"byte {place}"


@each("cut", [0, 1, 50, -2])
def test_a_truncated_manifest_is_refused(cut: int) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint's manifest"):
        parse_manifest(dump_manifest(manifest())[:cut], source="m")


@each(
    "text",
    [b"", b"null", b"[]", b'"x"', b"{", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b"}"],
)
def test_what_is_not_a_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^checkpoint error: m"):
        parse_manifest(text, source="m")


def test_another_format_or_version_is_told_before_anything_else() -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint of megazero"):
        parse_manifest(b'{"format": "torch"}', source="m")
    body = json.loads(dump_manifest(manifest()))
    for version in (2, 4):
        with pytest.raises(CheckpointError, match=rf"version {version}\n.*cannot read(.|\n)*legal: 1 or 3"):
            parse_manifest(signed({**body, "version": version, "unheard": 1}), source="m")


def test_an_edited_manifest_is_refused() -> None:
    body = json.loads(dump_manifest(manifest()))
    with pytest.raises(CheckpointError, match="does not match the hash"):
        parse_manifest(json.dumps({**body, "step": 8}).encode(), source="m")


def _file_name(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["files"][0].update(name=name)


def _box(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["files"][0]["boxes"][0].update(changes)


def _tensor(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["tensors"][0].update(changes)


def _large_box(body: dict[str, Any]) -> None:
    """Make a file's only box larger than BOX_BYTES, and everything else right for it."""
    rows = BOX_BYTES // 12 + 1
    body["tensors"][0]["shape"] = [rows, 3]
    box = {**body["files"][0]["boxes"][0], "offset": [0, 0], "lengths": [rows, 3], "end": 80 + 12 * rows}
    body["files"] = [{**body["files"][0], "num_bytes": box["end"], "boxes": [box]}]


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "parent folder": (_file_name("../../etc/passwd"), "plain file name"),
    "absolute path": (_file_name("/etc/passwd"), "plain file name"),
    "hidden file": (_file_name(".bashrc"), "plain file name"),
    "folder": (_file_name("a/b"), "plain file name"),
    "backslash": (_file_name("..\\b"), "plain file name"),
    "line end": (_file_name("rank\n"), "plain file name"),
    "empty name": (_file_name(""), "plain file name"),
    "same file twice": (_file_name("rank_1.safetensors"), "named more than once"),
    "config elsewhere": (lambda body: body["config"].update(name="../x"), "plain file name"),
    "name that is no text": (_file_name(5), "string"),
    "missing field": (lambda body: body["files"][0].pop("header_bytes"), "required"),
    "missing step": (lambda body: body.pop("step"), "required"),
    "unknown field": (lambda body: body.update(run_me="rm"), "Unexpected"),
    "number as text": (lambda body: body.update(step="7"), "valid integer"),
    "boolean as number": (lambda body: body.update(step=True), "valid integer"),
    "negative step": (lambda body: body.update(step=-1), "greater than or equal"),
    "huge dim": (_tensor(shape=[10**30, 3]), "integer|less than"),
    "huge tensor": (_tensor(shape=[2**40, 2**40]), "larger than any tensor can be"),
    "huge tensor without elements": (_tensor(shape=[2**40, 2**40, 0]), "larger than any tensor can be"),
    "many dims": (_tensor(shape=[1] * 17), "at most 16"),
    "negative dim": (_tensor(shape=[-4, 3]), "greater than or equal"),
    "unknown dtype": (_tensor(dtype="F32; rm"), "Input should be"),
    "no kind": (_tensor(kind="../pickle"), "String should match pattern"),
    "tensor twice": (lambda body: body["tensors"].append(body["tensors"][0]), "listed more than once"),
    "two shapes": (
        lambda body: body["tensors"].append({**body["tensors"][0], "kind": "exp_avg", "shape": [4, 4]}),
        "its other state has shape",
    ),
    "box of an unlisted tensor": (_box(parameter="v"), "no such tensor"),
    "box outside": (_box(offset=[4, 0]), "not a region"),
    "box too long": (_box(lengths=[5, 3]), "not a region"),
    "box without elements": (_box(lengths=[0, 3]), "not a region"),
    "box with other dims": (_box(lengths=[1, 3, 1]), "not a region"),
    "bytes outside the file": (_box(begin=10**9, end=10**9 + 12), "back to back"),
    "bytes inside the header": (_box(begin=0, end=12), "back to back"),
    "too few bytes": (_box(end=91), "back to back"),
    "file longer than its boxes": (lambda body: body["files"][0].update(num_bytes=10**6), "end at byte"),
    "no hash": (_box(sha256=""), "match pattern"),
    "version that is true": (lambda body: body.update(version=True), "cannot read that version"),
    "header shorter than its length": (lambda body: body["files"][0].update(header_bytes=4), "greater than or equal"),
    "header of a gigabyte": (lambda body: body["files"][0].update(header_bytes=2**30), "less than or equal"),
    "box of more bytes than are written": (_large_box, "a box has at most"),
}


def old_body() -> dict[str, Any]:
    """Return a manifest of the first version, with the boxes in it."""
    return version_1(json.loads(dump_manifest(manifest())), [json.loads(INDEX.splitlines()[1])])


@each("name", HOSTILE)
def test_a_hostile_manifest_of_the_first_version_is_refused(name: str) -> None:
    change, message = HOSTILE[name]
    body = copy.deepcopy(old_body())
    change(body)
    with pytest.raises(CheckpointError, match=message):
        parse_manifest(signed(body), source="m")


@each("name", HOSTILE)
def test_a_hostile_manifest_or_index_is_refused(name: str, tmp_path: Path) -> None:
    """What the first version has in its manifest lies in the manifest or in the index; either one is refused."""
    change, message = HOSTILE[name]
    body = old_body()
    change(body)
    rows = body["files"]
    texts = index_texts([{"files": [{"name": row["name"], "boxes": row["boxes"]} for row in rows]}])
    (tmp_path / "index_00000.jsonl").write_bytes(b"".join(texts))
    entry = {"name": "index_00000.jsonl", **index_entry(*texts)}
    entry.update(num_tensors=len(body["tensors"]), num_boxes=sum(len(row["boxes"]) for row in rows))
    files = [{key: value for key, value in row.items() if key != "boxes"} for row in rows]
    version = 3 if body["version"] == 1 and type(body["version"]) is int else body["version"]
    given = signed({**body, "version": version, "files": files, "indices": [entry]})
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path, parse_manifest(given, source="m")[0], "").check_files()


def _entry(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["indices"][0].update(changes)


HOSTILE_INDICES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "index elsewhere": (_entry(name="../index.jsonl"), "plain file name"),
    "index in a sub-folder": (_entry(name="ranks_00000/index.jsonl"), "plain file name"),
    "index that is a data file": (_entry(name="rank_0.safetensors"), "named more than once"),
    "more tensors than there are": (_entry(num_tensors=2), "1 tensors\n.*its indices have 2"),
    "no index": (lambda body: body.update(indices=[]), "1 tensors\n.*its indices have 0"),
    "many indices": (lambda body: body.update(indices=body["indices"] * 200), "at most 120"),
    "index of a terabyte": (_entry(num_bytes=2**40), "less than or equal"),
    "directory of a terabyte": (_entry(directory_bytes=2**40), "less than or equal"),
    "directory without a hash": (_entry(directory_sha256=""), "match pattern"),
    "other folder": (_file_name("other/rank_0.safetensors"), "plain file name"),
    "two folders": (_file_name("ranks_00000/ranks_00000/a"), "plain file name"),
    "hidden file in a folder": (_file_name("ranks_00000/.a"), "plain file name"),
    "parent of a folder": (_file_name("ranks_00000/../a"), "plain file name"),
    "folder without a file": (_file_name("ranks_00000/"), "plain file name"),
}


@each("name", HOSTILE_INDICES)
def test_a_hostile_table_of_indices_is_refused(name: str) -> None:
    change, message = HOSTILE_INDICES[name]
    body = json.loads(dump_manifest(manifest()))
    change(body)
    with pytest.raises(DamageError, match=message):
        parse_manifest(signed(body), source="m")


def test_files_of_large_jobs_lie_in_folders_but_not_in_the_first_version() -> None:
    body = json.loads(dump_manifest(manifest()))
    body["files"][0]["name"] = "ranks_00012/rank_01536.safetensors"
    assert parse_manifest(signed(body), source="m")[0].files[0].name == "ranks_00012/rank_01536.safetensors"
    old = version_1(body, [{"files": [{"name": file["name"], "boxes": []} for file in body["files"]]}])
    with pytest.raises(DamageError, match="plain file name"):
        parse_manifest(signed(old), source="m")


def test_a_checkpoint_of_another_version_is_refused_but_not_damaged() -> None:
    """A run passes over a damaged checkpoint; one that a newer megazero has saved must stay where it is."""
    body = json.loads(dump_manifest(manifest()))
    intact = [{"version": 2}, {"version": 4}, {"format": "torch"}]
    for change, damaged in (*((other, False) for other in intact), ({"version": True}, True)):
        for text, is_damaged in (
            (signed({**body, **change}), damaged),
            (json.dumps({**body, **change}).encode(), True),
        ):
            with pytest.raises(CheckpointError) as caught:
                parse_manifest(text, source="m")
            assert isinstance(caught.value, DamageError) == is_damaged, change


def test_a_million_tensors_are_refused_at_once() -> None:
    entry = b'{"parameter":"w","kind":"weight","shape":[4],"dtype":"F32"},'
    with pytest.raises(DamageError, match="lists more than 500000 tensors"):
        parse_manifest(b'{"tensors":[' + entry * 10**6 + b"]}", source="m")


def test_all_problems_come_at_once_but_not_thousands() -> None:
    body = old_body()
    body["files"][0]["name"] = "../x"
    body["files"][1]["boxes"][0]["parameter"] = "v"
    with pytest.raises(CheckpointError) as caught:
        parse_manifest(signed(body), source="m")
    assert len(caught.value.problems) == 2
    body["tensors"] = [{"bad": 1}] * 500
    with pytest.raises(CheckpointError) as caught:
        parse_manifest(signed(body), source="m")
    assert len(caught.value.problems) == 20


def test_dtype_names_are_those_of_torch_and_back() -> None:
    assert set(DTYPES) == set(get_args(DtypeName))
    for name, dtype in DTYPES.items():
        assert dtype_name(dtype) == name
        assert dtype_bytes(name) == torch.empty(1, dtype=dtype).element_size()
    with pytest.raises(CheckpointError, match=r"complex64.*\n.*cannot be stored"):
        dtype_name(torch.complex64)
