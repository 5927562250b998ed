"""The kinds of damaged, hostile and misplaced checkpoints that `damaged_checkpoints.py` tries, a function for each.

Every function changes a root with two sound checkpoints, of which the newer one is the *victim*; a file or folder of
the name `elsewhere` beside the root is its to use.  `mended` kinds edit the manifest and store the hash that fits.
"""

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.checkpoint.folders import CONFIG, LATEST, MANIFEST, list_steps, part_name
from megazero.checkpoint.merging import index_name

Damage = Callable[[Path], object]
_DATA = part_name(0)
_INDEX = index_name(0)
_LARGE = 10 << 30


def victim(root: Path) -> Path:
    """Return the newer of the two checkpoints under a root."""
    return list_steps(root)[-1].path


def flip_bit(root: Path, draw: random.Random) -> str:
    """Flip one bit of one file of the victim, every bit as likely as any other; return its place."""
    files = [path for path in sorted(victim(root).iterdir()) if path.stat().st_size]
    path = draw.choices(files, [file.stat().st_size for file in files])[0]
    content = bytearray(path.read_bytes())
    place, bit = draw.randrange(len(content)), draw.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"{path.name}, byte {place}, bit {bit}"


def _edit(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(root: Path) -> None:
        path = victim(root) / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def _replace(name: str, make: Callable[[Path], object], *, of_root: bool = False) -> Damage:
    """Remove a file of the victim, or of the root, and make something else in its place."""

    def damage(root: Path) -> None:
        path = (root if of_root else victim(root)) / name
        path.unlink()
        make(path)

    return damage


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, _LARGE)


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _outside(name: str) -> Damage:
    """Move a file of the victim out of the folder, and leave a link to it."""

    def damage(root: Path) -> None:
        path, outside = victim(root) / name, root.parent / "elsewhere"
        path.rename(outside)
        path.symlink_to(outside)

    return damage


def _of_the_older(name: str) -> Damage:
    return lambda root: shutil.copy(list_steps(root)[0].path / name, victim(root) / name)


def _mended(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Edit the manifest, and give it the hash that fits."""

    def damage(root: Path) -> None:
        path = victim(root) / MANIFEST
        body = json.loads(path.read_bytes())
        del body["sha256"]
        change(body)
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        path.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), **body}))

    return damage


def _field(**values: Any) -> Damage:
    return _mended(lambda body: body.update(values))


def _progress(**values: Any) -> Damage:
    return _mended(lambda body: body["progress"].update(values))


def _tensor(**values: Any) -> Damage:
    return _mended(lambda body: body["tensors"][0].update(values))


def _file(**values: Any) -> Damage:
    return _mended(lambda body: body["files"][0].update(values))


def _indexed(change: Callable[[list[dict[str, Any]], list[dict[str, Any]]], object]) -> Damage:
    """Edit the first index's segments in its directory, and their tables, and mend the sizes and hashes of all."""

    def damage(root: Path) -> None:
        directory, *tables = map(json.loads, (victim(root) / _INDEX).read_bytes().splitlines())
        change(directory["segments"], tables)
        texts = [json.dumps(table).encode() + b"\n" for table in tables]
        for entry, text in zip(directory["segments"], texts, strict=True):
            entry.update(num_bytes=len(text), sha256=hashlib.sha256(text).hexdigest())
        _put_index(root, json.dumps(directory).encode() + b"\n", b"".join(texts))

    return damage


def _put_index(root: Path, directory: bytes, segments: bytes = b"") -> None:
    """Replace the first index, and give the manifest the size and the hash that fit."""
    (victim(root) / _INDEX).write_bytes(directory + segments)
    entry = {"num_bytes": len(directory + segments), "directory_bytes": len(directory)}
    entry |= {"directory_sha256": hashlib.sha256(directory).hexdigest()}
    _mended(lambda body: body["indices"][0].update(entry))(root)


def _loss_scale(**values: Any) -> Damage:
    return _mended(lambda body: body["progress"]["loss_scale"].update(values))


def _all_dtypes(body: dict[str, Any]) -> None:
    same_size = {"F64": "I64", "F32": "I32", "BF16": "I16", "F16": "I16"}
    for entry in body["tensors"]:
        entry["dtype"] = same_size[entry["dtype"]]


def _swap_moments(segments: list[dict[str, Any]], tables: list[dict[str, Any]]) -> None:
    """Let the boxes of one moment be those of the other, in the index alone."""
    other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    for each in (*segments, *(box for table in tables for file in table["files"] for box in file["boxes"])):
        each["kind"] = other.get(each["kind"], each["kind"])


def _hide_a_segment(segments: list[dict[str, Any]], _: list[dict[str, Any]]) -> None:
    """Let the bounds of a segment be a region of one element."""
    segments[0]["lengths"] = [1] * len(segments[0]["lengths"])


def _large_box(root: Path) -> None:
    """Let one tensor be a box of 10 GB, in a file that is sparse."""
    elements = _LARGE // 4
    box: dict[str, Any] = {}

    def change_index(segments: list[dict[str, Any]], tables: list[dict[str, Any]]) -> None:
        file = tables[0]["files"][0]
        box.update(file["boxes"][0])
        begin = json.loads((victim(root) / MANIFEST).read_bytes())["files"][0]["header_bytes"]
        box.update(offset=[0], lengths=[elements], begin=begin, end=begin + 4 * elements)
        segments[:] = [{**segments[0], "offset": [0], "lengths": [elements], "num_boxes": 1}]
        tables[:] = [{"files": [{**file, "boxes": [box]}]}]

    def change_manifest(body: dict[str, Any]) -> None:
        named = {"parameter": box["parameter"], "kind": box["kind"]}
        body["tensors"] = [{**named, "shape": [elements], "dtype": "F32"}]
        body["indices"][0].update(num_tensors=1, num_boxes=1)
        body["files"][0].update(num_bytes=box["end"])

    _indexed(change_index)(root)
    _mended(change_manifest)(root)
    os.truncate(victim(root) / _DATA, box["begin"])
    os.truncate(victim(root) / _DATA, box["end"])


def _deep_index(root: Path) -> None:
    _put_index(root, b'{"segments":' + b"[" * 100_000)


def _many_tensors(body: dict[str, Any]) -> None:
    entry = body["tensors"][0]
    body["tensors"] += [{**entry, "parameter": f"p{number}"} for number in range(10**6)]


def _renamed(root: Path) -> None:
    """Give the victim's folder the name of a later step."""
    folder = victim(root)
    folder.rename(root / "step_0000009")
    (root / LATEST).write_text("step_0000009\n")


def _linked_folder(root: Path) -> None:
    folder = victim(root)
    folder.rename(root.parent / "elsewhere")
    folder.symlink_to(root.parent / "elsewhere")


def _folder_is_file(root: Path) -> None:
    shutil.rmtree(folder := victim(root))
    folder.write_text("a file\n")


def _both(root: Path) -> None:
    for step in list_steps(root):
        (step.path / CONFIG).write_text("seed: 5\n")


def _folder_for_latest(root: Path) -> None:
    (root / LATEST).unlink()
    (root / LATEST).mkdir()


def _latest(content: bytes) -> Damage:
    return lambda root: (root / LATEST).write_bytes(content)


KINDS: Mapping[str, Damage] = MappingProxyType(
    {
        "data cut": _edit(_DATA, lambda content: content[:-100]),
        "data with a byte too many": _edit(_DATA, lambda content: content + b"x"),
        "data that ends in zeros": _edit(_DATA, lambda content: content[:-4096] + bytes(4096)),
        "data missing": lambda root: (victim(root) / _DATA).unlink(),
        "data empty": _edit(_DATA, lambda _: b""),
        "data of an older step": _of_the_older(_DATA),
        "data a FIFO": _replace(_DATA, os.mkfifo),
        "data a link to /dev/zero": _replace(_DATA, _zeros),
        "data a link out of the folder": _outside(_DATA),
        "data a folder": _replace(_DATA, os.mkdir),
        "configuration changed": _edit(CONFIG, lambda content: content.replace(b"seed", b"sead", 1)),
        "configuration missing": lambda root: (victim(root) / CONFIG).unlink(),
        "configuration a FIFO": _replace(CONFIG, os.mkfifo),
        "configuration a link to /dev/zero": _replace(CONFIG, _zeros),
        "configuration of 10 GB, sparse": _replace(CONFIG, _sparse),
        "manifest cut": _edit(MANIFEST, lambda content: content[: len(content) // 2]),
        "manifest empty": _edit(MANIFEST, lambda _: b""),
        "manifest missing": lambda root: (victim(root) / MANIFEST).unlink(),
        "manifest of an older step": _of_the_older(MANIFEST),
        "manifest a FIFO": _replace(MANIFEST, os.mkfifo),
        "manifest a link to /dev/zero": _replace(MANIFEST, _zeros),
        "manifest a link out of the folder": _outside(MANIFEST),
        "manifest of 10 GB, sparse": _replace(MANIFEST, _sparse),
        "manifest 100,000 levels deep": _edit(MANIFEST, lambda _: b'{"progress":' + b"[" * 100_000),
        "manifest with 900 closed levels": _edit(MANIFEST, lambda _: b'{"a":' * 900 + b"1" + b"}" * 900),
        "manifest with a number of 5,000 digits": _edit(MANIFEST, lambda _: b'{"step":' + b"9" * 5000 + b"}"),
        "manifest a pickle": _edit(MANIFEST, lambda _: pickle.dumps(print)),
        "manifest not UTF-8": _edit(MANIFEST, lambda _: b"\xff\xfe\x00"),
        "index cut": _edit(_INDEX, lambda content: content[: len(content) // 2]),
        "index missing": lambda root: (victim(root) / _INDEX).unlink(),
        "index of an older step": _of_the_older(_INDEX),
        "index a FIFO": _replace(_INDEX, os.mkfifo),
        "index a link to /dev/zero": _replace(_INDEX, _zeros),
        "index a link out of the folder": _outside(_INDEX),
        "index of 10 GB, sparse": _replace(_INDEX, _sparse),
        "mended: an index 100,000 levels deep": _deep_index,
        "mended: ../../x as an index": _mended(lambda body: body["indices"][0].update(name="../../x")),
        "mended: a million tensors": _mended(_many_tensors),
        "mended: a box of 10 GB in a sparse file": _large_box,
        "mended: another step": _field(step=7),
        "mended: version true": _field(version=True),
        "mended: version 4": _field(version=4),
        "mended: format of another program": _field(format="torch"),
        "mended: dtypes": _mended(_all_dtypes),
        "mended: moments swapped": _indexed(_swap_moments),
        "mended: a segment with the bounds of one element": _indexed(_hide_a_segment),
        "mended: segments in another order": _indexed(lambda segments, _: segments.reverse()),
        "mended: a shape of 2^60": _tensor(shape=[2**60]),
        "mended: a negative shape": _tensor(shape=[-4, 3]),
        "mended: ../../x as a file": _file(name="../../x"),
        "mended: /etc/passwd as a file": _file(name="/etc/passwd"),
        "mended: a file with a NUL in its name": _file(name="rank\0"),
        "mended: iteration 2^61": _progress(iteration=2**61),
        "mended: consumed_samples 2^61": _progress(consumed_samples=2**61),
        "mended: consumed_samples -1": _progress(consumed_samples=-1),
        "mended: optimizer_steps 2^61": _progress(optimizer_steps=2**61),
        "mended: loss_scale_is_dynamic a text": _progress(loss_scale_is_dynamic="no"),
        "mended: progress 100 levels deep": _progress(note=json.loads("[" * 100 + "]" * 100)),
        "mended: a loss scale of 0": _loss_scale(scale=0.0),
        "mended: good steps -1": _loss_scale(good_steps=-1),
        "`latest` names nothing": _latest(b"step_0000099\n"),
        "`latest` empty": _latest(b""),
        "`latest` noise": _latest(bytes(range(256))),
        "`latest` names a folder outside": _latest(b"../elsewhere\n"),
        "`latest` missing": lambda root: (root / LATEST).unlink(),
        "`latest` a FIFO": _replace(LATEST, os.mkfifo, of_root=True),
        "`latest` a link to /dev/zero": _replace(LATEST, _zeros, of_root=True),
        "`latest` of 10 GB, sparse": _replace(LATEST, _sparse, of_root=True),
        "`latest` a folder": _folder_for_latest,
        "folder under the name of a later step": _renamed,
        "folder a link to another disk": _linked_folder,
        "folder a file": _folder_is_file,
        "both checkpoints damaged": _both,
    }
)
# Kinds after which the newer checkpoint is still sound and must be taken.
HARMLESS = frozenset({"`latest` missing", "folder a link to another disk"})
# Kinds that must end in an error: no checkpoint is sound, or the newest is one of another program or version.
REFUSED = frozenset({"both checkpoints damaged", "mended: version 4", "mended: format of another program"})
