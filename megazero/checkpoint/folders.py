"""The folders of checkpoints: one *step folder* each under a root, and a small text file that names the newest.

    runs/demo/                      the root
        latest                      "step_0000020"
        run.json                    the run that the checkpoints belong to (`runs.py`)
        journal.jsonl               what has become of it (`journal.py`)
        curves.jsonl, run.html      its figures, and its page (`report/curves_file.py`, `train/leaving.py`)
        step_0000010/               manifest.json, config.yaml, index_00000.jsonl, rank_00000.safetensors, ...
        step_0000020/
            ranks_00000/            rank_00000.safetensors, ...: the data files of large jobs
        .lock                       the process that may write here (`folder_lock.py`)
        .saving_step_0000030.TAG/   being written by the owner that TAG names, or left by it when it was killed
        damaged_step_0000015/       set aside by a run that found it damaged and took the next sound one

A step folder gets its name by one rename when it is complete, and is never written to again.  A step that is saved a
second time goes to `step_0000020_2` (a *revision*), and the older folder is removed once `latest` names the new one, so
a complete copy exists at every moment.  What has a hidden name is removed by its owner, or once that is gone.
"""

import difflib
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from megazero.errors import CheckpointError, Problem
from megazero.files import read_bounded, sync_path, written_aside
from megazero.owner import Owner

MANIFEST = "manifest.json"
CONFIG = "config.yaml"
LATEST = "latest"
# Data files that lie in one folder; large jobs have sub-folders of as many.
RANKS_IN_FOLDER = 128

_HIDDEN = ".saving_"
DAMAGED_PREFIX = "damaged_"

_MAX_LATEST_BYTES = 1 << 20
_STEP_FOLDER = re.compile(r"step_(\d{7,15})(?:_(\d{1,6}))?")


class StepFolder(NamedTuple):
    """A published checkpoint; sorts by step, then by revision."""

    step: int
    revision: int
    path: Path


def hidden_path(root: Path, name: str) -> Path:
    """Return the path under `root` at which this process prepares what will be called `name`."""
    return root / f"{_HIDDEN}{name}.{Owner.of_this_process().tag}"


def remove_hidden(root: Path) -> list[Path]:
    """Remove what has a hidden name and belongs to this process, or to one that is gone; leave what cannot be removed.

    Returns the hidden paths of processes that may live.
    """
    here, kept = Owner.of_this_process(), []
    with suppress(OSError):
        for path in sorted(root.glob(f"{_HIDDEN}*")):
            owner = Owner.from_tag(path.name.rpartition(".")[2])
            if owner is None or not (owner == here or owner.is_gone(here)):
                kept.append(path)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return kept


def remove_step(folder: Path) -> None:
    """Remove a published checkpoint; a folder half removed has a hidden name, so that it is no checkpoint.

    Leaves what cannot be removed.
    """
    with suppress(OSError):
        hidden = hidden_path(folder.parent, folder.name)
        os.rename(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


class Candidates(NamedTuple):
    """The checkpoints that a run may resume from, in the order of preference.

    problem: the reason why `latest` names none of them, None if it does or if there is no such file.
    """

    folders: tuple[Path, ...]
    problem: Problem | None = None


def part_name(rank: int, world_size: int = 1, ranks_in_folder: int = RANKS_IN_FOLDER) -> str:
    """Return the name of the file with the bytes that a rank saved, with its sub-folder in a large world."""
    name = f"rank_{rank:05d}.safetensors"
    return name if world_size <= ranks_in_folder else f"ranks_{rank // ranks_in_folder:05d}/{name}"


def step_of(name: str) -> int | None:
    """Return the step that the name of a step folder gives; None for any other name."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def list_steps(root: Path) -> list[StepFolder]:
    """Return the published checkpoints under `root`, oldest step first; none when there is no such folder."""
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = ((name, _STEP_FOLDER.fullmatch(name)) for name in names)
    found = (StepFolder(int(m[1]), int(m[2] or 1), root / name) for name, m in matches if m)
    return sorted(folder for folder in found if (folder.path / MANIFEST).is_file())


def free_name(root: Path, step: int) -> str:
    """Return the name of a new step folder: that of the step, with the next revision when the step is there already."""
    revision = max((folder.revision for folder in list_steps(root) if folder.step == step), default=0) + 1
    while (root / step_name(step, revision)).exists():  # something that is no checkpoint
        revision += 1
    return step_name(step, revision)


def step_name(step: int, revision: int = 1) -> str:
    """Return the name of a step folder."""
    return f"step_{step:07d}" + (f"_{revision}" if revision > 1 else "")


def candidates(root: Path) -> Candidates:
    """Return the checkpoint that `latest` names, which may be damaged, then those older than it, the newest first.

    Without such a file, or if it names none, all are returned.  A run killed between publishing its first checkpoint
    and writing `latest` leaves a complete folder and no `latest`.
    """
    steps = list_steps(root)
    downwards = tuple(folder.path for folder in reversed(steps))
    try:
        name = read_bounded(root / LATEST, _MAX_LATEST_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return Candidates(downwards)
    except OSError as error:
        given, rule = str(root / LATEST), f"cannot be read: {error.strerror}"
        return Candidates(downwards, Problem(given, rule, _existing(steps)))
    match = _STEP_FOLDER.fullmatch(name)
    if match is None or not (root / name).is_dir():
        return Candidates(downwards, _names_none(root, name, steps))
    place = (int(match[1]), int(match[2] or 1))
    older = tuple(folder.path for folder in reversed(steps) if (folder.step, folder.revision) < place)
    return Candidates((root / name, *older))


def newest(root: Path) -> Path | None:
    """Return the folder that `latest` names; without such a file the highest step; None when there is no checkpoint.

    Raises CheckpointError when `latest` names something that is not there.
    """
    found = candidates(root)
    if found.problem is not None:
        raise CheckpointError(found.problem)
    if found.folders and not (found.folders[0] / MANIFEST).is_file():
        raise CheckpointError(_names_none(root, found.folders[0].name, list_steps(root)))
    return found.folders[0] if found.folders else None


def _names_none(root: Path, name: str, steps: list[StepFolder]) -> Problem:
    rule = "it must name a complete checkpoint in the same folder"
    return Problem(
        f"{root / LATEST} names {name[:80]!r}", rule, _existing(steps) or "there is no checkpoint in this folder"
    )


def set_aside(folders: Iterable[Path], sound: Path) -> list[Path]:
    """Rename damaged step folders of a root and make `latest` name the sound one; return the folders' new names.

    A crash in between leaves a `latest` that is right.  Raises OSError or DataError.
    """
    latest = sound.parent / LATEST
    if latest.is_dir():
        os.rename(latest, _free(sound.parent, f"{DAMAGED_PREFIX}{LATEST}"))
    with written_aside(latest) as stream:
        stream.write(f"{sound.name}\n".encode())
    renamed = []
    for folder in folders:
        renamed.append(_free(folder.parent, f"{DAMAGED_PREFIX}{folder.name}"))
        os.rename(folder, renamed[-1])
    sync_path(sound.parent)
    return renamed


def _free(root: Path, name: str) -> Path:
    """Return a path under `root` that is not taken: `name`, or `name` with a number behind it."""
    numbered = (root / (name if number == 1 else f"{name}.{number}") for number in count(1))
    return next(path for path in numbered if not os.path.lexists(path))


def holds_checkpoint(path: Path) -> bool:
    """Return True if `path` means a checkpoint: a step folder, or a root that has one or had one.

    A step folder may have been renamed or copied; one that is named as such and is missing is an error of `resolve`.
    """
    is_one = path.name.startswith("step_") or (path / MANIFEST).exists()
    return is_one or (path / LATEST).exists() or bool(list_steps(path))


def resolve(path: Path, step: int | None = None) -> Path:
    """Return the step folder meant by `path`: a step folder itself, or a root (then `step`, or the newest).

    Raises CheckpointError when there is none.
    """
    if (path / MANIFEST).is_file():
        match = _STEP_FOLDER.fullmatch(path.name)
        if step is not None and (match is None or int(match[1]) != step):
            raise CheckpointError(
                Problem(f"{path}, step {step}", "a step is chosen in a run's folder; this is one checkpoint")
            )
        return path
    steps = list_steps(path)
    if step is None:
        found = newest(path)
    else:
        found = next((folder.path for folder in reversed(steps) if folder.step == step), None)
    if found is None:
        wanted = str(path) if step is None else f"{path}, step {step}"
        rule = "there is no such folder"
        if not path.exists() and (near := neighbours(path)):
            raise CheckpointError(Problem(wanted, rule, ", ".join(map(str, near))))
        if path.exists():
            rule = "there is no such step" if steps else "there is no checkpoint in this folder"
        # A step folder that isn't there: its neighbours may be.
        raise CheckpointError(Problem(wanted, rule, _existing(steps or list_steps(path.parent))))
    return found


def neighbours(path: Path) -> list[Path]:
    """Return the folders beside `path` that hold checkpoints and have the most similar names."""
    try:
        names = [name for name in os.listdir(path.parent) if list_steps(path.parent / name)]
    except OSError:
        return []
    return [path.parent / name for name in difflib.get_close_matches(path.name, names, n=2)]


def choices(path: Path) -> Candidates:
    """Return the checkpoints that `path` stands for: those of a root, or the one that is a step folder itself.

    A step folder may have been renamed or copied.  Raises CheckpointError if a step folder is not there.
    """
    is_one = path.name.startswith("step_") or (path / MANIFEST).exists()
    return Candidates((resolve(path),)) if is_one else candidates(path)


def _existing(steps: list[StepFolder]) -> str:
    shown = ", ".join(folder.path.name for folder in steps[-10:])
    more = f" and {len(steps) - 10} older" if len(steps) > 10 else ""
    return f"complete checkpoints here: {shown}{more}" if steps else ""
