"""The room that the checkpoints of a run need, compared with what is free before the run starts."""

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.folders import list_steps
from megazero.checkpoint.retention import Retention
from megazero.checkpoint.runs import RunIdentity, run_of
from megazero.comm.interface import Communicator
from megazero.errors import CheckpointError, Problem
from megazero.parallel.param_spec import StateFragment, StateKind
from megazero.units import format_bytes

_MAX_SAVES = 1000  # saves that are looked at ahead
_BYTES_PER_FRAGMENT = 600  # in a header and in an index, where a fragment is at least one box
_BYTES_PER_RANK = 4096


def saved_bytes(fragments: Iterable[StateFragment], kinds: Sequence[StateKind]) -> int:
    """Return the bytes that a rank with these fragments adds to a checkpoint.

    kinds: the optimizer's kinds of state in a checkpoint; those not made yet will be as large as the weights.
    """
    sizes: dict[StateKind, int] = {"weight": 0}
    total = _BYTES_PER_RANK
    for fragment in fragments:
        sizes[fragment.kind] = sizes.get(fragment.kind, 0) + fragment.nbytes
        total += fragment.nbytes + _BYTES_PER_FRAGMENT
    return total + sizes["weight"] * sum(kind not in sizes for kind in kinds)


def steps_to_save(iteration: int, train_iters: int, save_interval: int | None) -> list[int]:
    """Return the steps after `iteration` at which a run saves, at most the first _MAX_SAVES."""
    interval = save_interval or max(1, train_iters)
    found = list(islice(range((iteration // interval + 1) * interval, train_iters + 1, interval), _MAX_SAVES))
    return found if train_iters in found or train_iters <= iteration else [*found, train_iters]


def peak_growth(size: int, steps: Iterable[int], there: Mapping[int, int], retention: Retention) -> int:
    """Return by how many bytes a folder grows at the most while a run saves these steps.

    size: bytes of a checkpoint.  there: {step: bytes} of the run's checkpoints that are there.
    A new checkpoint and those that it replaces exist at the same time.
    """
    kept, growth, peak = dict(there), 0, 0
    for step in steps:
        growth += size
        peak = max(peak, growth)
        growth -= kept.get(step, 0)
        kept[step] = size
        for expired in retention.expired([each for each in kept if each <= step]):
            growth -= kept.pop(expired)
    return peak


def check_space(
    root: Path,
    own_bytes: int,
    steps: Sequence[int],
    *,
    retention: Retention,
    run: RunIdentity | None,
    control: Communicator,
) -> str:
    """Compare what is free under `root` with what this run will save; a collective call.

    own_bytes: what this rank adds to each checkpoint.  run: the run that saves.
    Raises CheckpointError on all ranks if the checkpoints that exist at the same time do not fit: one, or with a
    retention those that it keeps and a new one.  Returns a notice on rank 0 if those of the whole run do not fit.
    """
    sizes = all_or_none(control, lambda: own_bytes, doing="counting")
    notices = all_or_none(
        control,
        lambda: _compare(root, sum(sizes), steps, retention, run) if control.rank == 0 else "",
        doing=f"looking at the file system of {root}",
    )
    return str(notices[0])


def _compare(root: Path, size: int, steps: Sequence[int], retention: Retention, run: RunIdentity | None) -> str:
    system = os.statvfs(root)
    free = system.f_bavail * system.f_frsize
    if not system.f_blocks:  # a file system that has no figures
        return ""
    there = {}
    if retention.lets_go:
        there = {each.step: _bytes_in(each.path) for each in list_steps(root) if run_of(each.path) == run}
    first = (retention.keep_last or 1) + 1 if retention.lets_go else 1
    needed = peak_growth(size, steps[:first], there, retention)
    if needed > free:
        together = f"; the folder grows by {format_bytes(needed)} before older ones go" if needed > size else ""
        raise CheckpointError(
            Problem(
                f"--save {root}: {format_bytes(free)} free",
                f"a checkpoint of this run takes {format_bytes(size)}{together}",
                f"{format_bytes(needed)} free there, or another --save",
            )
        )
    whole = peak_growth(size, steps, there, retention)
    if whole <= free:
        return ""
    return (
        f"--save {root}: {format_bytes(free)} free; this run's checkpoints, {format_bytes(size)} each, take up to"
        f" {format_bytes(whole)} and fill the file system before the end; --keep-last N lets older ones go"
    )


def _bytes_in(folder: Path) -> int:
    return sum((Path(top) / name).lstat().st_size for top, _, names in os.walk(folder) for name in names)
