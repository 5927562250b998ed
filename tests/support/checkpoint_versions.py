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


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object], number: int = 0) -> None:
    """Change an index of a checkpoint, and mend the hashes and sizes that the manifest has of it."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    entry = manifest["indices"][number]
    index = json.loads((folder / entry["name"]).read_bytes())
    change(index)
    text = json.dumps(index).encode()
    (folder / entry["name"]).write_bytes(text)
    entry.update(sha256=hashlib.sha256(text).hexdigest(), num_bytes=len(text))
    path.write_bytes(signed(manifest))


def version_1(manifest: dict[str, Any], indices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest that the first version of the format has for these files and boxes."""
    boxes = defaultdict(list)
    for index in indices:
        for file in index["files"]:
            boxes[file["name"]] += file["boxes"]
    files = [{**file, "boxes": sorted(boxes[file["name"]], key=lambda box: box["begin"])} for file in manifest["files"]]
    kept = {key: value for key, value in manifest.items() if key not in ("indices", "files", "sha256")}
    return {**kept, "version": 1, "files": files}


def make_version_1(folder: Path) -> None:
    """Make a step folder one of the first version: no indices, and a manifest with the boxes of all files."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    paths = [folder / entry["name"] for entry in manifest["indices"]]
    (folder / "manifest.json").write_bytes(signed(version_1(manifest, [json.loads(p.read_bytes()) for p in paths])))
    for path in paths:
        path.unlink()
