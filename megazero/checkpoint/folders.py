"""The folders of checkpoints: one *step folder* each under a root, and a small text file that names the newest.

    runs/demo/                      the root
        latest                      "step_0000020"
        run.json                    the run that the checkpoints belong to (`runs.py`)
        journal.jsonl               what has become of it (`journal.py`)
        step_0000010/               manifest.json, config.yaml, rank_00000.safetensors, ...
        step_0000020/
        .saving_step_0000030/       being written, or left by a run that was killed; the next save removes it

A step folder gets its name by one rename when it is complete, and is never written to again.  A step that is saved a
second time goes to `step_0000020_2` (a *revision*), and the older folder is removed once `latest` names the new one, so
a complete copy exists at every moment.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from megazero.errors import CheckpointError, Problem

MANIFEST = "manifest.json"
CONFIG = "config.yaml"
LATEST = "latest"
TEMPORARY_PREFIX = ".saving_"

_STEP_FOLDER = re.compile(r"step_(\d{7,15})(?:_(\d{1,6}))?")


class StepFolder(NamedTuple):
    """A published checkpoint; sorts by step, then by revision."""

    step: int
    revision: int
    path: Path


def part_name(rank: int) -> str:
    """Return the name of the file with the bytes that a rank saved."""
    return f"rank_{rank:05d}.safetensors"


def list_steps(root: Path) -> list[StepFolder]:
    """Return the published checkpoints under `root`, oldest step first; none when there is no such folder."""
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = ((name, _STEP_FOLDER.fullmatch(name)) for name in names)
    found = (StepFolder(int(m[1]), int(m[2] or 1), root / name) for name, m in matches if m)
    return sorted(folder for folder in found if (folder.path / MANIFEST).is_file())


def holds_checkpoint(path: Path) -> bool:
    """Return True if `path` means a checkpoint: a step folder, or a root that has one or had one.

    A step folder may have been renamed or copied; one that is named as such and is missing is an error of `resolve`.
    """
    is_one = path.name.startswith("step_") or (path / MANIFEST).exists()
    return is_one or (path / LATEST).exists() or bool(list_steps(path))


def free_name(root: Path, step: int) -> str:
    """Return the name of a new step folder: that of the step, with the next revision when the step is there already."""
    revision = max((folder.revision for folder in list_steps(root) if folder.step == step), default=0) + 1
    while (root / _name(step, revision)).exists():  # something that is no checkpoint
        revision += 1
    return _name(step, revision)


def _name(step: int, revision: int) -> str:
    return f"step_{step:07d}" + (f"_{revision}" if revision > 1 else "")


def newest(root: Path) -> Path | None:
    """Return the folder that `latest` names; without such a file the highest step; None when there is no checkpoint.

    A run killed between publishing its first checkpoint and writing `latest` leaves a complete folder and no `latest`.
    Raises CheckpointError when `latest` names something that is not there.
    """
    steps = list_steps(root)
    try:
        name = (root / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return steps[-1].path if steps else None
    except OSError as error:
        raise CheckpointError(Problem(str(root / LATEST), f"cannot be read: {error.strerror}")) from error
    for folder in steps:
        if folder.path.name == name:
            return folder.path
    raise CheckpointError(
        Problem(
            f"{root / LATEST} names {name[:80]!r}",
            "it must name a complete checkpoint in the same folder",
            _existing(steps) or "there is no checkpoint in this folder",
        )
    )


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
        if path.exists():
            rule = "there is no such step" if steps else "there is no checkpoint in this folder"
        # A step folder that isn't there: its neighbours may be.
        raise CheckpointError(Problem(wanted, rule, _existing(steps or list_steps(path.parent))))
    return found


def _existing(steps: list[StepFolder]) -> str:
    shown = ", ".join(folder.path.name for folder in steps[-10:])
    more = f" and {len(steps) - 10} older" if len(steps) > 10 else ""
    return f"complete checkpoints here: {shown}{more}" if steps else ""
