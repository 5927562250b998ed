"""Resuming from the newest sound checkpoint: one that is damaged is passed over, by all ranks alike.

    latest -> step_0000006     rank 1 finds damage while it reads its boxes, and rank 0 confirms it
              step_0000004     the state is filled from this one, over what the other has left
              step_0000002

Damage can be found before any data is read (the manifest, sizes of files), by every process by itself, or only in the
data, by one rank.  Rank 0 must find it too: the memory or the file system of one node may be what is broken, and then
every checkpoint would look damaged.  A step folder that is named by the user is never replaced by another one.
"""

from collections.abc import Callable, Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.folders import choices, set_aside
from megazero.checkpoint.reader import Checkpoint, open_folder
from megazero.comm.interface import Communicator
from megazero.errors import CheckpointError, DamageError, DataError, Problem, raise_problems

Check = Callable[[Checkpoint], None]


class PassedOver(NamedTuple):
    """A damaged checkpoint, and what is wrong with it."""

    folder: Path
    problems: tuple[Problem, ...]


class Taken(NamedTuple):
    """The checkpoint that the state was filled from, and what was passed over on the way to it.

    latest: the problem of the file `latest`, None if it is right.
    """

    checkpoint: Checkpoint
    damaged: tuple[PassedOver, ...]
    latest: Problem | None

    @property
    def is_newest(self) -> bool:
        return not self.damaged and self.latest is None


def first_complete(path: Path, check: Check) -> Taken | None:
    """Return the first checkpoint without damage that shows before its data is read; None if there is none at all.

    check: raises DamageError for damage that the reader does not see.  Raises DamageError if all are damaged.
    """
    found = choices(path)
    damaged: list[PassedOver] = []
    for folder in found.folders:
        try:
            return Taken(_opened(folder, check), tuple(damaged), found.problem)
        except DamageError as error:
            damaged.append(PassedOver(folder, error.problems))
    raise_problems(DamageError, _problems(damaged, found.problem))
    return None


def restore_first_sound(
    path: Path, check: Check, restore: Check, fits: Check, *, control: Communicator
) -> Taken | None:
    """Fill the state of every rank from the first sound checkpoint, the same on all; a collective call over `control`.

    check: as in `first_complete`.  restore: fills the state, collectively; raises DamageError on all ranks or on none.
    fits: raises if a checkpoint is of another run or model; called before one other than the first is restored.

    Returns None if there is no checkpoint at all; raises DamageError with all problems if none is sound.
    """
    lists = all_or_none(control, lambda: _listed(path), doing=f"listing {path}")
    _check_same_view(path, [bool(each["folders"]) for each in lists])
    latest = Problem(*lists[0]["latest"]) if lists[0]["latest"] else None
    damaged: list[PassedOver] = []
    for folder in map(Path, lists[0]["folders"]):
        attempt = _Attempt(folder, check, restore, fits if damaged else None)
        try:
            return Taken(attempt.run(control), tuple(damaged), latest)
        except DamageError as error:
            _confirm(error, attempt, control)
            damaged.append(PassedOver(folder, error.problems))
    raise_problems(DamageError, _problems(damaged, latest))
    return None


def _problems(damaged: Iterable[PassedOver], latest: Problem | None) -> list[Problem]:
    """Return what is wrong with `latest` and with every checkpoint that was passed over."""
    return [*([] if latest is None else [latest]), *(problem for each in damaged for problem in each.problems)]


def _listed(path: Path) -> dict[str, Any]:
    found = choices(path)
    latest = None if found.problem is None else astuple(found.problem)
    return {"folders": [str(folder) for folder in found.folders], "latest": latest}


class _Attempt:
    """An attempt to restore from one folder; `checkpoint` is None while it is not open on this rank."""

    def __init__(self, folder: Path, check: Check, restore: Check, fits: Check | None) -> None:
        self.folder = folder
        self.checkpoint: Checkpoint | None = None
        self._check, self._restore, self._fits = check, restore, fits

    def run(self, control: Communicator) -> Checkpoint:
        all_or_none(control, lambda: self._open(control), doing=f"opening {self.folder}")
        assert self.checkpoint is not None
        self._restore(self.checkpoint)
        return self.checkpoint

    def _open(self, control: Communicator) -> None:
        self.checkpoint = _opened(self.folder, self._check, control.rank, control.size)
        if self._fits is not None:
            self._fits(self.checkpoint)


def _opened(folder: Path, check: Check, rank: int = 0, size: int = 1) -> Checkpoint:
    """Open a checkpoint; of `size` ranks that do, each checks its share of the files."""
    checkpoint = open_folder(folder)
    checkpoint.check_files(rank=rank, size=size)
    check(checkpoint)
    return checkpoint


def _check_same_view(path: Path, finds_some: list[bool]) -> None:
    if finds_some[0] != any(finds_some):
        given = f"{path}: rank 0 finds no checkpoint there, rank {finds_some.index(True)} does"
        raise CheckpointError(Problem(given, "all ranks read the same folder", "a file system that all nodes share"))


def _confirm(error: DamageError, attempt: _Attempt, control: Communicator) -> None:
    """Raise CheckpointError, on all ranks, unless rank 0 finds damage too, in the files that others name."""

    def finds_damage() -> bool:
        if control.rank != 0 or isinstance(error.__cause__, DamageError):
            return True
        return attempt.checkpoint is not None and bool(attempt.checkpoint.damage_in(error.files))

    if not all_or_none(control, finds_damage, doing=f"reading {attempt.folder} again")[0]:
        rule = "rank 0 reads the same files and finds no damage, so the fault is not in the checkpoint"
        legal = "look at the memory and the file system of the nodes with these ranks"
        raise CheckpointError(*error.problems, Problem(str(attempt.folder), rule, legal)) from error


def report(taken: Taken, *, is_read: bool = True) -> Iterable[str]:
    """Yield a line for everything that was passed over, and one on the checkpoint that was taken instead.

    is_read: the data of `taken` has been read.
    """
    if taken.latest is not None:
        yield f"WARNING: {taken.latest.given}: {taken.latest.rule}"
    for folder, problems in taken.damaged:
        more = f" (and {len(problems) - 1} problems more)" if len(problems) > 1 else ""
        yield f"WARNING: {folder} is damaged: {problems[0].given}: {problems[0].rule}{more}"
    state, found = "sound" if is_read else "complete", taken.checkpoint
    yield f"WARNING: {found.folder} is {state} and taken instead; steps after {found.step} are trained again"


def refusal(taken: Taken, path: Path, *, is_read: bool) -> CheckpointError:
    """Return the error of a run that takes the newest checkpoint only; is_read: the data of `taken` has been read."""
    rule = "with --strict-load only the newest checkpoint is taken, which is damaged"
    state = "sound" if is_read else "complete; megazero checkpoint verify reads its data"
    legal = f"no --strict-load, or --load {taken.checkpoint.folder}, which is {state}"
    problem = Problem(f"--strict-load with --load {path}", rule, legal)
    return CheckpointError(*_problems(taken.damaged, taken.latest), problem)


def set_damaged_aside(taken: Taken) -> Iterable[str]:
    """Rename what was passed over, in a run's own folder, and yield a line for each (one rank); failing is no error."""
    try:
        renamed = set_aside([each.folder for each in taken.damaged], taken.checkpoint.folder)
    except (OSError, DataError) as error:
        yield f"WARNING: what is damaged could not be set aside: {error}"
        return
    for each, path in zip(taken.damaged, renamed, strict=True):
        yield f"WARNING: {each.folder.name} is set aside as {path}; remove it when it is not needed"
