"""The state of an engine in a checkpoint: its fragments, and beside them the class and the numbers of its optimizer.

A run and the library save and restore through these functions.  The progress of a checkpoint has two entries for them:
`optimizer`, the name of the optimizer's class, and `optimizer_numbers`, what the optimizer keeps beside the values of
its elements (a step count): one table of numbers for all param groups, a list with a table for each group where they
differ, null before the optimizer's first step.  Without numbers the entry is left out.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.reader import Checkpoint
from megazero.checkpoint.restore import restore
from megazero.comm.interface import Communicator
from megazero.errors import CheckpointError, Problem
from megazero.optim.inner import NOT_UPDATED, Elementwise
from megazero.parallel.param_spec import StateFragment
from megazero.zero.engine import Engine

OPTIMIZER, _NUMBERS = "optimizer", "optimizer_numbers"

GroupNumbers = Mapping[int, Mapping[str, float]]


def saved_fragments(engine: Engine, *, with_optimizer: bool = True) -> Iterator[StateFragment]:
    """Yield the state that this rank saves."""
    return (piece for piece in engine.owned_state() if with_optimizer or piece.kind == "weight")


def numbers_of_all(engine: Engine, *, control: Communicator) -> GroupNumbers | None:
    """Return the numbers of the optimizer's state by group, over all ranks; None before its first step.

    A collective call: a rank has the numbers of those groups only of which it updates elements.
    """

    def own() -> list[Any] | None:
        found = engine.settings.optimizer.numbers()
        return None if found is None else [[group, dict(numbers)] for group, numbers in found.items()]

    reports = [report for report in all_or_none(control, own, doing="reading the optimizer") if report is not None]
    return {group: numbers for report in reports for group, numbers in report} if reports else None


def numbers_entry(numbers: GroupNumbers | None) -> dict[str, Any]:
    """Return the entry of a checkpoint's progress for the numbers of `numbers_of_all`."""
    if numbers is None:
        return {_NUMBERS: None}
    distinct = list({str(sorted(each.items())): dict(each) for each in numbers.values()}.values())
    if len(distinct) > 1:
        return {_NUMBERS: [dict(numbers.get(group, {})) for group in range(max(numbers) + 1)]}
    return {_NUMBERS: distinct[0]} if distinct and distinct[0] else {}


def check_optimizer(checkpoint: Checkpoint, kind: str, *, given: str, otherwise: str) -> None:
    """Raise CheckpointError unless the checkpoint's optimizer is of this class ("AdamW") and its numbers are valid.

    given: the optimizer, as the user has named it.  otherwise: the way to leave its state out.
    """
    saved, numbers = checkpoint.progress.get(OPTIMIZER, "AdamW"), checkpoint.progress.get(_NUMBERS, {})
    if saved != kind:
        rule = "a resumed run goes on with the optimizer it began with, whose state the checkpoint has"
        legal = f"{saved}, or {otherwise} to start the optimizer anew"
        raise CheckpointError(Problem(f"{given}; {checkpoint.folder} was saved with {saved}", rule, legal))
    if numbers is not None and not all(map(_are_numbers, numbers if isinstance(numbers, list) else [numbers])):
        given = f"the checkpoint's {_NUMBERS} {numbers}"
        raise CheckpointError(Problem(given, "what an optimizer keeps beside its elements' state is numbers"))


def has_stepped(checkpoint: Checkpoint) -> bool:
    """Return True if the checkpoint's optimizer has state; AdamW's exists before the first step."""
    return checkpoint.progress.get(_NUMBERS, {}) is not None


def restore_engine(
    checkpoint: Checkpoint,
    engine: Engine,
    control: Communicator,
    *,
    with_optimizer: bool,
    others: Iterable[StateFragment] = (),
) -> None:
    """Fill the engine's state from a checkpoint of any layout.

    others: further fragments of the checkpoint to fill.
    """
    if with_optimizer:
        engine.settings.optimizer.start(_saved_numbers(checkpoint, engine))
    wanted = (piece for piece in engine.wanted_state() if with_optimizer or piece.kind == "weight")
    restore(checkpoint, chain(wanted, others), control=control)
    engine.state_loaded(weights_only=not with_optimizer)


def _saved_numbers(checkpoint: Checkpoint, engine: Engine) -> GroupNumbers | None:
    """Return the checkpoint's numbers for each of the optimizer's groups; raise CheckpointError if they do not fit."""
    saved: Any = checkpoint.progress.get(_NUMBERS, {})
    if saved is None:
        return None
    groups = {slot.group for section in engine.layout.sections for slot in section.slots}
    if not isinstance(saved, list):
        return {group: _with_step(saved, checkpoint, engine, group) for group in groups if group != NOT_UPDATED}
    if len(saved) <= max(groups):
        given = f"an optimizer of {max(groups) + 1} param groups; {checkpoint.folder} was saved with {len(saved)}"
        raise CheckpointError(Problem(given, "each param group has numbers of its own", "the same param groups"))
    return dict(enumerate(saved))


def _with_step(saved: Mapping[str, float], checkpoint: Checkpoint, engine: Engine, group: int) -> Mapping[str, float]:
    """Return the numbers with the count of steps, which the fused AdamW leaves to the run's counters."""
    inner = engine.settings.optimizer
    if saved or not isinstance(inner, Elementwise) or inner.optimizer.number_names(group) != ("step",):
        return saved
    steps: Any = checkpoint.progress.get("optimizer_steps", 0)
    return {"step": float(steps)}


def _are_numbers(values: object) -> bool:
    return isinstance(values, dict) and all(type(value) in (int, float) for value in values.values())
