"""Manifests and indices edited by hand, and checkpoints of the first version of the format, as plain JSON."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any


def signed(body: dict[str, Any]) -> bytes:
    """Return a manifest with the right hash for any content, as a hostile manifest would have."""
    body = {key: value for key, value in body.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), **body}).encode()


def read_index(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the directory of an index, and the tables of its segments."""
    directory, *tables = map(json.loads, path.read_bytes().splitlines())
    return directory, tables


def segment_entry(table: dict[str, Any], text: bytes) -> dict[str, Any]:
    """Return what a directory has of a segment with this table, which is of one tensor, in this text."""
    boxes = [box for file in table["files"] for box in file["boxes"]]
    dims = range(len(boxes[0]["offset"]))
    begins = [min(box["offset"][dim] for box in boxes) for dim in dims]
    ends = [max(box["offset"][dim] + box["lengths"][dim] for box in boxes) for dim in dims]
    return {
        "parameter": boxes[0]["parameter"],
        "kind": boxes[0]["kind"],
        "offset": begins,
        "lengths": [end - begin for begin, end in zip(begins, ends, strict=True)],
        "num_boxes": len(boxes),
        "num_bytes": len(text),
        "sha256": hashlib.sha256(text).hexdigest(),
    }


def index_texts(
    tables: list[dict[str, Any]], change: Callable[[dict[str, Any]], object] = lambda _: None
) -> tuple[bytes, bytes]:
    """Return the directory of an index with these segments, after a change, and the rest of the index."""
    texts = [json.dumps(table).encode() + b"\n" for table in tables]
    directory = {"segments": [segment_entry(table, text) for table, text in zip(tables, texts, strict=True)]}
    change(directory)
    return json.dumps(directory).encode() + b"\n", b"".join(texts)


def index_entry(directory: bytes, segments: bytes) -> dict[str, Any]:
    """Return what a manifest has of the content of an index, besides the numbers of tensors and boxes."""
    digest = hashlib.sha256(directory).hexdigest()
    return {
        "num_bytes": len(directory) + len(segments),
        "directory_bytes": len(directory),
        "directory_sha256": digest,
    }


def edit_index(
    folder: Path,
    change: Callable[[list[dict[str, Any]]], object] = lambda _: None,
    number: int = 0,
    *,
    directory: Callable[[dict[str, Any]], object] = lambda _: None,
) -> None:
    """Change the tables of an index, mend its directory, change that too, and mend what the manifest has of it.

    The manifest has the number of boxes then that the tables have.
    """
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    entry = manifest["indices"][number]
    _, tables = read_index(folder / entry["name"])
    change(tables)
    texts = index_texts(tables, directory)
    (folder / entry["name"]).write_bytes(b"".join(texts))
    entry.update(index_entry(*texts), num_boxes=sum(len(file["boxes"]) for table in tables for file in table["files"]))
    path.write_bytes(signed(manifest))


def version_1(manifest: dict[str, Any], tables: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest that the first version of the format has for these files and boxes."""
    boxes = defaultdict(list)
    for table in tables:
        for file in table["files"]:
            boxes[file["name"]] += file["boxes"]
    files = [{**file, "boxes": sorted(boxes[file["name"]], key=lambda box: box["begin"])} for file in manifest["files"]]
    kept = {key: value for key, value in manifest.items() if key not in ("indices", "files", "sha256")}
    return {**kept, "version": 1, "files": files}


def make_version_1(folder: Path) -> None:
    """Make a step folder one of the first version: no indices, and a manifest with the boxes of all files."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    paths = [folder / entry["name"] for entry in manifest["indices"]]
    tables = [table for path in paths for table in read_index(path)[1]]
    (folder / "manifest.json").write_bytes(signed(version_1(manifest, tables)))
    for path in paths:
        path.unlink()
