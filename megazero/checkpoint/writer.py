"""Saving: every rank writes the boxes it owns to a file of its own; the checkpoint appears at once, or not at all.

    rank 0    lock the root, make           check and merge parts, write the manifest and a new
       |      a hidden folder               `latest`, rename the folder, then `latest`
       v              |                         ^
    --------- agree --+-- every rank writes ----+-- agree ---> the folder is there, everywhere
                          its file and its part

A rank's file is a safetensors file, which any safetensors reader can open; tensors in it are named by kind, parameter
and region, `exp_avg/wte.weight[0:15,0:60]`.  State is copied through a buffer of at most `BOX_BYTES`, whatever the
model's size.  After each step of the drawing the ranks exchange problems, so a full disk on one of them is an error on
all, and the folder is removed; a folder under its final name is complete and has been fsynced.

The hidden folder belongs to rank 0's process and the save has an id, which every rank's part carries: what another job
or an earlier save has written is never merged.  Then older checkpoints of the run go, as far as `Retention` lets them.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain, islice, repeat
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.folder_lock import FolderLock, take_lock
from megazero.checkpoint.folders import (
    CONFIG,
    LATEST,
    MANIFEST,
    free_name,
    hidden_path,
    list_steps,
    part_name,
    remove_hidden,
    remove_step,
    step_name,
)
from megazero.checkpoint.manifest import (
    BOX_BYTES,
    BoxEntry,
    ConfigEntry,
    FileEntry,
    Manifest,
    RankPart,
    TensorEntry,
    box_key,
    dtype_name,
    dump_manifest,
    dump_part,
    layout_problems,
    merge_parts,
    parse_part,
)
from megazero.checkpoint.retention import ALL_STAY, Retention
from megazero.checkpoint.runs import PROGRESS_KEY, TAG_KEY, RunIdentity, run_of, tag_of
from megazero.checkpoint.slices import BoxPiece, fragment_pieces, piece_view
from megazero.comm.interface import Communicator
from megazero.errors import CheckpointError, Problem, raise_problems
from megazero.files import sync_path
from megazero.parallel.param_spec import StateFragment

_ALIGNMENT = 8
_MAX_PROBLEMS = 20


class Draft(NamedTuple):
    """A checkpoint to be saved, without its tensors: its place, counters, and the configuration as YAML text.

    lock: the root's, where the job has taken it (on rank 0); without it, the root is locked for this save.
    retention: the older checkpoints that stay; those of the same `progress["run"]` are of the same run.
    """

    root: Path
    step: int
    progress: Mapping[str, JsonValue]
    config_yaml: str
    lock: FolderLock | None = None
    retention: Retention = ALL_STAY


def save(draft: Draft, fragments: Iterable[StateFragment], *, control: Communicator) -> Path:
    """Write a checkpoint under `draft.root` and return its folder; a collective call over `control`.

    fragments: the state that this rank owns; over all ranks every element of every (parameter, kind) exactly once.
    Without the optimizer's kinds the checkpoint is one of weights only.  Only rank 0's draft is used.

    Raises CheckpointError on all ranks if it fails on any, naming rank and cause; older checkpoints and `latest` are
    then unchanged.
    """
    leads, root = control.rank == 0, draft.root
    with ExitStack() as held:
        try:
            made = all_or_none(
                control, lambda: prepare(draft, held) if leads else None, doing=f"making a folder in {root}"
            )
            saving = Saving(*made[0])
            all_or_none(
                control, lambda: write_part(saving, control.rank, fragments), doing=f"writing to {saving.folder}"
            )
            names = all_or_none(
                control,
                lambda: publish(saving, draft, control.size) if leads else None,
                doing=f"publishing {saving.folder}",
            )
        finally:
            if leads:
                remove_hidden(root)
    return root / str(names[0])


class Saving(NamedTuple):
    """A save that is under way: its hidden folder, and the id that every rank's part carries."""

    folder: str
    save_id: str


class _Item(NamedTuple):
    """A box of a fragment that is about to be written."""

    tensor: TensorEntry
    piece: BoxPiece
    fragment: StateFragment

    @property
    def view(self) -> Tensor:
        """The elements, in the shape of the box; they share the state's memory."""
        state = self.fragment.tensor.detach()
        length = self.fragment.stop - self.fragment.start
        assert state.shape == (length,), f"{self.fragment.spec.name}: {state.shape} is not its range"
        return piece_view(state, self.piece)

    @property
    def nbytes(self) -> int:
        return self.piece.box.numel * self.fragment.dtype.itemsize

    @property
    def key(self) -> str:
        return box_key(self.tensor.kind, self.tensor.parameter, self.piece.box)


def prepare(draft: Draft, held: ExitStack) -> Saving:
    """Make the hidden folder (rank 0), and lock the root until `held` is closed unless the job holds the lock."""
    if draft.lock is None:
        held.callback(take_lock(draft.root).release)
    remove_hidden(draft.root)
    folder = hidden_path(draft.root, step_name(draft.step))
    folder.mkdir()
    return Saving(str(folder), secrets.token_hex(8))


def write_part(saving: Saving, rank: int, fragments: Iterable[StateFragment], *, box_bytes: int = BOX_BYTES) -> None:
    """Write this rank's file and, beside it, the part of the manifest that describes it (every rank)."""
    fragments = list(fragments)
    items = [item for fragment in fragments for item in _items(fragment, box_bytes)]
    # Wide elements first, so that every tensor is aligned to its element size, as safetensors requires.
    items.sort(key=lambda item: -item.fragment.dtype.itemsize)
    path = Path(saving.folder) / part_name(rank)
    file = _write_file(path, items)
    tensors = {(entry.parameter, entry.kind): entry for entry in map(_tensor_entry, fragments)}
    # Not synced: rank 0 reads it within this save, and then deletes it.
    _part_path(path).write_bytes(dump_part(RankPart(saving.save_id, tuple(tensors.values()), file)))


def _part_path(path: Path) -> Path:
    """Return the path of the part that describes a rank's file."""
    return path.with_name(f"{path.name}.json")


def _tensor_entry(fragment: StateFragment) -> TensorEntry:
    spec = fragment.spec
    return TensorEntry(spec.name, fragment.kind, tuple(spec.full_shape), dtype_name(fragment.dtype))


def _items(fragment: StateFragment, box_bytes: int) -> Iterable[_Item]:
    entry = _tensor_entry(fragment)
    limit = max(1, box_bytes // fragment.dtype.itemsize)
    for piece in fragment_pieces(fragment.spec, fragment.start, fragment.stop, limit):
        yield _Item(entry, piece, fragment)


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
        end = position + item.nbytes
        lengths = list(item.piece.box.lengths)
        table[item.key] = {"dtype": item.tensor.dtype, "shape": lengths, "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def publish(saving: Saving, draft: Draft, world_size: int) -> str:
    """Publish the hidden folder with all parts under its final name, and return that name (rank 0)."""
    root, folder, name = draft.root, Path(saving.folder), free_name(draft.root, draft.step)
    _write_durably(folder / CONFIG, draft.config_yaml.encode())
    manifest = _merge(saving, draft, world_size)
    _write_durably(folder / MANIFEST, dump_manifest(manifest))
    # Everything that can fail for want of space comes before the rename.
    temporary = hidden_path(root, LATEST)
    _write_durably(temporary, f"{name}\n".encode())
    sync_path(folder)
    if draft.lock is not None:
        draft.lock.ensure()
    os.rename(folder, root / name)
    sync_path(root)
    os.replace(temporary, root / LATEST)
    sync_path(root)
    _remove_older(draft, name)
    return name


def _merge(saving: Saving, draft: Draft, world_size: int) -> Manifest:
    """Merge all ranks' parts into the manifest and delete their files; raise CheckpointError on holes or overlaps."""
    paths = [Path(saving.folder) / part_name(rank) for rank in range(world_size)]
    config = ConfigEntry(CONFIG, hashlib.sha256(draft.config_yaml.encode()).hexdigest())
    parts = [parse_part(_part_path(path).read_bytes()) for path in paths]
    problems = chain.from_iterable(map(_part_problems, paths, parts, repeat(saving)))
    raise_problems(CheckpointError, islice(problems, _MAX_PROBLEMS))
    manifest = merge_parts(parts, step=draft.step, progress=dict(draft.progress), config=config)
    raise_problems(CheckpointError, islice(layout_problems(manifest), _MAX_PROBLEMS))
    for path in paths:
        _part_path(path).unlink()
    return manifest


def _part_problems(path: Path, part: RankPart, saving: Saving) -> Iterator[Problem]:
    """Yield the reasons why a rank's file and the part that describes it are not those of this save."""
    if part.save_id != saving.save_id:
        yield Problem(f"{_part_path(path)}: save {part.save_id}", "it belongs to another save", saving.save_id)
    if part.file.name != path.name:
        yield Problem(f"{_part_path(path)}: it describes {part.file.name}", "it belongs to another file", path.name)
    size = path.stat().st_size
    if size != part.file.num_bytes:
        yield Problem(f"{path}: {size} bytes", "altered since its rank wrote it", f"{part.file.num_bytes} bytes")


def _remove_older(draft: Draft, name: str) -> None:
    """Remove the checkpoints of the same run that this one replaces, and those that `draft.retention` lets go.

    One with a tag replaces that of the same tag; one without replaces older revisions of its step.
    """
    others = [folder for folder in list_steps(draft.root) if folder.path.name != name]
    run, tag = RunIdentity.from_json(draft.progress.get(PROGRESS_KEY)), draft.progress.get(TAG_KEY)
    if tag is None:
        older = [folder for folder in others if folder.step <= draft.step]
        if draft.retention.lets_go:
            older = [folder for folder in older if tag_of(folder.path) is None]
        expired = draft.retention.expired({folder.step for folder in older} | {draft.step})
        others = [folder for folder in older if folder.step == draft.step or folder.step in expired]
    for folder in others:
        if tag_of(folder.path) == tag and run_of(folder.path) == run:
            remove_step(folder.path)


def _write_durably(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
