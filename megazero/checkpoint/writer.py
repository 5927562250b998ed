"""Saving: every rank writes the boxes it owns to a file of its own; the checkpoint appears at once, or not at all.

    rank 0    lock the root, make                                                         write the manifest, a new
       |      a hidden folder                                                             `latest`, rename the folder,
       |                                                                                  then `latest`
       v             |                                                                       ^
    ---------- agree +-- every rank writes -- its part -- merges indices, -- deletes its ----+-- agree ---> the folder
                         its file                         if any are its own part                           is there

A rank's file is a safetensors file, which any safetensors reader can open; tensors in it are named by kind, parameter
and region, `exp_avg/wte.weight[0:15,0:60]`.  State is copied through a buffer of at most `BOX_BYTES`, whatever the
model's size.  After each step of the drawing the ranks exchange problems, so a full disk on one of them is an error on
all, and the folder is removed; a folder under its final name is complete and has been fsynced.

More than `RANKS_IN_FOLDER` files lie in sub-folders.  Parts and indices are those of `merging.py`.

The hidden folder belongs to rank 0's process and the save has an id, which every rank's part carries: what another job
or an earlier save has written is never merged.  Then older checkpoints of the run go, as far as `Retention` lets them.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.folder_lock import FolderLock, take_lock
from megazero.checkpoint.folders import (
    CONFIG,
    LATEST,
    MANIFEST,
    RANKS_IN_FOLDER,
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
    TensorEntry,
    box_key,
    dtype_name,
    dump_manifest,
)
from megazero.checkpoint.merging import (
    IndexPlan,
    Written,
    merge,
    part_path,
    plan_indices,
    read_merged,
    write_durably,
    write_part,
)
from megazero.checkpoint.retention import ALL_STAY, Retention
from megazero.checkpoint.runs import PROGRESS_KEY, TAG_KEY, RunIdentity, run_of, tag_of
from megazero.checkpoint.slices import BoxPiece, fragment_pieces, piece_view
from megazero.comm.interface import Communicator
from megazero.files import sync_path
from megazero.parallel.param_spec import StateFragment

_ALIGNMENT = 8


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
                control,
                lambda: prepare(draft, held, control.size) if leads else None,
                doing=f"making a folder in {root}",
            )
            saving = Saving(*made[0])
            names = _write_and_publish(saving, draft, fragments, control)
        finally:
            if leads:
                remove_hidden(root)
    return root / str(names[0])


class Saving(NamedTuple):
    """A save that is under way: its hidden folder, the id that every rank's part carries, and where files lie in it.

    ranks_in_folder: the data files that lie in one folder; above, they lie in sub-folders of as many.
    """

    folder: str
    save_id: str
    world_size: int
    ranks_in_folder: int = RANKS_IN_FOLDER

    def data_name(self, rank: int) -> str:
        """Return the name of a rank's data file, below the folder."""
        return part_name(rank, self.world_size, self.ranks_in_folder)


def _write_and_publish(
    saving: Saving, draft: Draft, fragments: Iterable[StateFragment], control: Communicator
) -> list[Any]:
    """Take the steps of a save, each on all ranks or on none; return the name of the folder as the first item."""
    rank, kept = control.rank, list[Written]()

    def write() -> dict[str, Any]:
        kept.append(write_data(saving, rank, fragments))
        return kept[0].report(rank, control.size)

    writing, folder = f"writing to {saving.folder}", Path(saving.folder)
    plan = plan_indices(all_or_none(control, write, doing=writing))
    all_or_none(control, lambda: write_part(folder, saving.save_id, kept[0], plan), doing=writing)
    all_or_none(control, lambda: merge_own(saving, plan, rank), doing=f"merging what is in {saving.folder}")
    all_or_none(control, lambda: part_path(folder / saving.data_name(rank)).unlink(), doing=writing)
    return all_or_none(
        control,
        lambda: publish(saving, draft, plan) if rank == 0 else None,
        doing=f"publishing {saving.folder}",
    )


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


def prepare(draft: Draft, held: ExitStack, world_size: int, *, ranks_in_folder: int = RANKS_IN_FOLDER) -> Saving:
    """Make the hidden folder (rank 0), and lock the root until `held` is closed unless the job holds the lock."""
    if draft.lock is None:
        held.callback(take_lock(draft.root).release)
    remove_hidden(draft.root)
    folder = hidden_path(draft.root, step_name(draft.step))
    folder.mkdir()
    saving = Saving(str(folder), secrets.token_hex(8), world_size, ranks_in_folder)
    for first in range(0, world_size, ranks_in_folder):
        (folder / saving.data_name(first)).parent.mkdir(exist_ok=True)
    return saving


def write_data(saving: Saving, rank: int, fragments: Iterable[StateFragment], *, box_bytes: int = BOX_BYTES) -> Written:
    """Write this rank's file, and return what the other ranks must have of it (every rank)."""
    fragments = list(fragments)
    items = [item for fragment in fragments for item in _items(fragment, box_bytes)]
    # Wide elements first, so that every tensor is aligned to its element size, as safetensors requires.
    items.sort(key=lambda item: -item.fragment.dtype.itemsize)
    tensors = {(entry.parameter, entry.kind): entry for entry in map(_tensor_entry, fragments)}
    name = saving.data_name(rank)
    file, boxes = _write_file(Path(saving.folder) / name, name, items)
    return Written(file, boxes, tuple(tensors.values()))


def merge_own(saving: Saving, plan: IndexPlan, rank: int) -> None:
    """Merge those indices that are this rank's (every rank)."""
    for number in range(rank, plan.num_indices, saving.world_size):
        merge(Path(saving.folder), saving.save_id, plan, number)


def _tensor_entry(fragment: StateFragment) -> TensorEntry:
    spec = fragment.spec
    return TensorEntry(spec.name, fragment.kind, tuple(spec.full_shape), dtype_name(fragment.dtype))


def _items(fragment: StateFragment, box_bytes: int) -> Iterable[_Item]:
    entry = _tensor_entry(fragment)
    limit = max(1, box_bytes // fragment.dtype.itemsize)
    for piece in fragment_pieces(fragment.spec, fragment.start, fragment.stop, limit):
        yield _Item(entry, piece, fragment)


def _write_file(path: Path, name: str, items: list[_Item]) -> tuple[FileEntry, tuple[BoxEntry, ...]]:
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
    return FileEntry(name, position, len(header), hashlib.sha256(header).hexdigest()), tuple(boxes)


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


def publish(saving: Saving, draft: Draft, plan: IndexPlan) -> str:
    """Publish the hidden folder with all files and indices under its final name, and return that name (rank 0)."""
    root, folder, name = draft.root, Path(saving.folder), free_name(draft.root, draft.step)
    write_durably(folder / CONFIG, draft.config_yaml.encode())
    write_durably(folder / MANIFEST, dump_manifest(_manifest(folder, draft, plan)))
    # Everything that can fail for want of space comes before the rename.
    temporary = hidden_path(root, LATEST)
    write_durably(temporary, f"{name}\n".encode())
    for path in sorted({(folder / file.name).parent for file in plan.files} - {folder}):
        sync_path(path)
    sync_path(folder)
    if draft.lock is not None:
        draft.lock.ensure()
    os.rename(folder, root / name)
    sync_path(root)
    os.replace(temporary, root / LATEST)
    sync_path(root)
    _remove_older(draft, name)
    return name


def _manifest(folder: Path, draft: Draft, plan: IndexPlan) -> Manifest:
    """Put the manifest together from what is known of files and indices."""
    merged = [read_merged(folder, number) for number in range(plan.num_indices)]
    return Manifest(
        step=draft.step,
        progress=dict(draft.progress),
        config=ConfigEntry(CONFIG, hashlib.sha256(draft.config_yaml.encode()).hexdigest()),
        tensors=tuple(entry for each in merged for entry in each.tensors),
        files=plan.files,
        indices=tuple(each.index for each in merged),
    )


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
