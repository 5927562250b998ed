"""Saving: every rank writes the boxes it owns to a file of its own; the checkpoint appears at once, or not at all.

    rank 0    make the hidden folder        merge parts, write the manifest and a new `latest`,
       |      `.saving_step_0000020`        rename the folder, then `latest`
       v              |                         ^
    --------- agree --+-- every rank writes ----+-- agree ---> the folder is there, everywhere
                          its file and its part

A rank's file is a safetensors file, which any safetensors reader can open; tensors in it are named by kind, parameter
and region, `exp_avg/wte.weight[0:15,0:60]`.  State is copied through a buffer of at most `BOX_BYTES`, whatever the
model's size.  After each step of the drawing the ranks exchange problems, so a full disk on one of them is an error on
all, and the folder is removed; a folder under its final name is complete and has been fsynced.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.folders import CONFIG, LATEST, MANIFEST, TEMPORARY_PREFIX, free_name, list_steps, part_name
from megazero.checkpoint.manifest import (
    BoxEntry,
    ConfigEntry,
    FileEntry,
    Manifest,
    RankPart,
    TensorEntry,
    dtype_name,
    dump_manifest,
    dump_part,
    layout_problems,
    merge_parts,
    parse_part,
)
from megazero.checkpoint.runs import PROGRESS_KEY, RunIdentity, run_of
from megazero.checkpoint.slices import BoxPiece, format_box, fragment_pieces, piece_view
from megazero.comm.interface import Communicator
from megazero.errors import CheckpointError, raise_problems
from megazero.files import sync_path
from megazero.parallel.param_spec import StateFragment

BOX_BYTES = 64 << 20
_ALIGNMENT = 8
_MAX_PROBLEMS = 20


class Draft(NamedTuple):
    """A checkpoint to be saved, without its tensors: its place, counters, and the configuration as YAML text."""

    root: Path
    step: int
    progress: Mapping[str, JsonValue]
    config_yaml: str


def save(draft: Draft, fragments: Iterable[StateFragment], *, world: Communicator, device: torch.device) -> Path:
    """Write a checkpoint under `draft.root` and return its folder; a collective call over `world`.

    fragments: the state that this rank owns; over all ranks every element of every (parameter, kind) exactly once.
    Without the optimizer's kinds the checkpoint is one of weights only.  Only rank 0's draft is used.  One job at a
    time may save under a root.

    Raises CheckpointError on all ranks if it fails on any, naming rank and cause; older checkpoints and `latest` are
    then unchanged.
    """
    leads = world.rank == 0
    folder = draft.root / f"{TEMPORARY_PREFIX}step_{draft.step:07d}"
    try:
        all_or_none(world, device, lambda: prepare(folder) if leads else None, doing=f"making {folder}")
        all_or_none(world, device, lambda: write_part(folder, world.rank, fragments), doing=f"writing to {folder}")
        names = all_or_none(
            world, device, lambda: publish(folder, draft, world.size) if leads else None, doing=f"publishing {folder}"
        )
    finally:
        if leads:
            remove_stale(draft.root)
    return draft.root / str(names[0])


class _Item(NamedTuple):
    """A box about to be written; `view` has the shape of the box and shares the state's memory."""

    tensor: TensorEntry
    piece: BoxPiece
    view: Tensor

    @property
    def key(self) -> str:
        return f"{self.tensor.kind}/{self.tensor.parameter}{format_box(self.piece.box)}"


def prepare(folder: Path) -> None:
    """Remove what killed runs left behind, and make the hidden folder (rank 0)."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(folder.parent)
    folder.mkdir()


def remove_stale(root: Path) -> None:
    """Remove everything under a temporary name; leave what cannot be removed."""
    with suppress(OSError):
        for path in root.glob(f"{TEMPORARY_PREFIX}*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def write_part(folder: Path, rank: int, fragments: Iterable[StateFragment], *, box_bytes: int = BOX_BYTES) -> None:
    """Write this rank's file and, beside it, the part of the manifest that describes it (every rank)."""
    fragments = list(fragments)
    items = [item for fragment in fragments for item in _items(fragment, box_bytes)]
    # Wide elements first, so that every tensor is aligned to its element size, as safetensors requires.
    items.sort(key=lambda item: -item.view.element_size())
    file = _write_file(folder / part_name(rank), items)
    tensors = {(entry.parameter, entry.kind): entry for entry in map(_tensor_entry, fragments)}
    # Not synced: rank 0 reads it within this save, and then deletes it.
    (folder / f"{part_name(rank)}.json").write_bytes(dump_part(RankPart(tuple(tensors.values()), file)))


def _tensor_entry(fragment: StateFragment) -> TensorEntry:
    spec = fragment.spec
    return TensorEntry(spec.name, fragment.kind, tuple(spec.full_shape), dtype_name(fragment.tensor.dtype))


def _items(fragment: StateFragment, box_bytes: int) -> Iterable[_Item]:
    state = fragment.tensor.detach()
    assert state.shape == (fragment.stop - fragment.start,), f"{fragment.spec.name}: {state.shape} is not its range"
    entry = _tensor_entry(fragment)
    limit = max(1, box_bytes // state.element_size())
    for piece in fragment_pieces(fragment.spec, fragment.start, fragment.stop, limit):
        yield _Item(entry, piece, piece_view(state, piece))


def _write_file(path: Path, items: list[_Item]) -> FileEntry:
    """Stream the boxes to a safetensors file, hashing the bytes as they are written."""
    header = _safetensors_header(items)
    position = len(header)
    boxes: list[BoxEntry] = []
    with open(path, "wb") as file:
        file.write(header)
        for item in items:
            raw = _raw_bytes(item.view)
            file.write(raw)
            boxes.append(_box_entry(item, position, raw))
            position += len(raw)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, position, len(header), hashlib.sha256(header).hexdigest(), tuple(boxes))


def _box_entry(item: _Item, begin: int, raw: memoryview) -> BoxEntry:
    box, digest = item.piece.box, hashlib.sha256(raw).hexdigest()
    return BoxEntry(item.tensor.parameter, item.tensor.kind, box.offset, box.lengths, begin, begin + len(raw), digest)


def _raw_bytes(view: Tensor) -> memoryview:
    """Return a tensor's elements in row-major order; copies them only if they are not dense or not in host memory."""
    dense = view.to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return dense.numpy().data


def _safetensors_header(items: list[_Item]) -> bytes:
    """Return the header: the JSON's length in 8 bytes, little-endian; JSON with every box's dtype, shape and bytes."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for item in items:
        end = position + item.view.numel() * item.view.element_size()
        lengths = list(item.piece.box.lengths)
        table[item.key] = {"dtype": item.tensor.dtype, "shape": lengths, "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def publish(folder: Path, draft: Draft, world_size: int) -> str:
    """Publish the hidden folder with all parts under its final name, and return that name (rank 0)."""
    root, name = draft.root, free_name(draft.root, draft.step)
    _write_durably(folder / CONFIG, draft.config_yaml.encode())
    manifest = _merge(folder, draft, world_size)
    _write_durably(folder / MANIFEST, dump_manifest(manifest))
    # Everything that can fail for want of space comes before the rename.
    temporary = root / f"{TEMPORARY_PREFIX}{LATEST}"
    _write_durably(temporary, f"{name}\n".encode())
    sync_path(folder)
    os.rename(folder, root / name)
    sync_path(root)
    os.replace(temporary, root / LATEST)
    sync_path(root)
    _remove_older_revisions(draft, name)
    return name


def _merge(folder: Path, draft: Draft, world_size: int) -> Manifest:
    """Merge all ranks' parts into the manifest and delete their files; raise CheckpointError on holes or overlaps."""
    paths = [folder / f"{part_name(rank)}.json" for rank in range(world_size)]
    config = ConfigEntry(CONFIG, hashlib.sha256(draft.config_yaml.encode()).hexdigest())
    parts = [parse_part(path.read_bytes()) for path in paths]
    manifest = merge_parts(parts, step=draft.step, progress=dict(draft.progress), config=config)
    raise_problems(CheckpointError, islice(layout_problems(manifest), _MAX_PROBLEMS))
    for path in paths:
        path.unlink()
    return manifest


def _remove_older_revisions(draft: Draft, name: str) -> None:
    """Remove the step's older revisions of the same run; leave what cannot be removed."""
    run = RunIdentity.from_json(draft.progress.get(PROGRESS_KEY))
    for old in list_steps(draft.root):
        if old.step == draft.step and old.path.name != name and run_of(old.path) == run:
            # Renamed before it is removed: a folder half removed must not look like a checkpoint.
            with suppress(OSError):
                os.rename(old.path, draft.root / f"{TEMPORARY_PREFIX}{old.path.name}")
    remove_stale(draft.root)


def _write_durably(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
