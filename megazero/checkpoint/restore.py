"""Collective loading: every rank fills its state from one checkpoint, or all ranks fail.

Whether a checkpoint holds *more* than the model only shows over all ranks: each reads its own slice of it.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.reader import Checkpoint
from megazero.comm.interface import Communicator
from megazero.errors import CheckpointError, Problem, raise_problems
from megazero.parallel.param_spec import StateFragment

_MAX_PROBLEMS = 20


def restore(checkpoint: Checkpoint, fragments: Iterable[StateFragment], *, control: Communicator) -> None:
    """Fill every rank's fragments, or fail on all ranks; a collective call over `control`.

    Besides what `Checkpoint.fill` checks, every parameter of the checkpoint must be among some rank's fragments: a
    checkpoint with more layers than the model is refused.
    """
    wanted = list(fragments)
    check_fits(checkpoint, wanted, control=control)
    all_or_none(control, lambda: checkpoint.fill(wanted), doing=f"reading {checkpoint.folder}")


def check_fits(checkpoint: Checkpoint, wanted: Sequence[StateFragment], *, control: Communicator) -> None:
    """Raise CheckpointError on all ranks if `restore` of these fragments would before it changes anything."""
    all_or_none(control, lambda: checkpoint.check(wanted), doing=f"reading {checkpoint.folder}")
    names = list(checkpoint.parameters)
    mine = {fragment.spec.name for fragment in wanted}
    seen = torch.tensor([name in mine for name in names], dtype=torch.int64)
    control.all_reduce_scalars(seen, "max").wait()
    unused = (name for name, found in zip(names, seen.tolist(), strict=True) if not found)
    problems = (Problem(f"{name} in {checkpoint.folder}", "the model has no such parameter") for name in unused)
    raise_problems(CheckpointError, islice(problems, _MAX_PROBLEMS))
