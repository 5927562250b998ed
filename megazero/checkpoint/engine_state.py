"""The state of an engine in a checkpoint: its fragments, and beside them the class and the numbers of its optimizer.

A run and the library save and restore through these functions.  The progress of a checkpoint has two entries for them:
`optimizer`, the name of the optimizer's class, and `optimizer_numbers`, what the optimizer keeps beside the values of
its elements (a step count): one table of numbers for all param groups, a list with a table for each group where they
differ, null before the optimizer's first step.  Without numbers the entry is left out.  `parameter_numbers` has those
of parameters that steps have left alone, by name, null for one without state.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.reader import Checkpoint
from megazero.checkpoint.restore import check_fits, restore
from megazero.checkpoint.wires import restore_wires, wire_fragments
from megazero.comm.interface import Communicator
from megazero.config.optimizers import in_numbers
from megazero.errors import CheckpointError, Problem
from megazero.optim.inner import NOT_UPDATED, Elementwise
from megazero.parallel.param_spec import StateFragment
from megazero.zero.engine import Engine
from megazero.zero.update import STEP, OptimizerNumbers

OPTIMIZER, _NUMBERS, _BY_PARAMETER = "optimizer", "optimizer_numbers", "parameter_numbers"


def saved_fragments(engine: Engine, *, with_optimizer: bool = True) -> Iterator[StateFragment]:
    """Yield the state that this rank saves."""
    if not with_optimizer:
        return engine.owned_state(with_optimizer=False)
    return chain(engine.owned_state(), wire_fragments(engine))


def numbers_of_all(engine: Engine, *, control: Communicator) -> OptimizerNumbers:
    """Return the numbers of the optimizer's state over all ranks.

    A collective call: a rank has the numbers of those groups and parameters only of which it updates elements.
    """

    def own() -> list[Any]:
        groups, parameters = engine.optimizer_numbers()
        return [[[group, numbers] for group, numbers in groups.items()], dict(parameters)]

    groups: dict[int, Mapping[str, float] | None] = {}
    parameters: dict[str, Mapping[str, float] | None] = {}
    for found, by_name in all_or_none(control, own, doing="reading the optimizer"):
        groups |= dict(found)
        parameters |= by_name
    return OptimizerNumbers(dict(sorted(groups.items())), parameters)


def numbers_entry(numbers: OptimizerNumbers) -> dict[str, Any]:
    """Return the entries of a checkpoint's progress for the numbers of `numbers_of_all`."""
    entry: dict[str, Any] = {}
    distinct = list({str(each): each for each in numbers.groups.values()}.values())
    if len(distinct) > 1:
        entry[_NUMBERS] = [numbers.groups.get(group) for group in range(max(numbers.groups) + 1)]
    elif distinct and distinct[0] != {}:
        entry[_NUMBERS] = distinct[0]
    return entry | ({_BY_PARAMETER: dict(numbers.parameters)} if numbers.parameters else {})


def check_optimizer(checkpoint: Checkpoint, kind: str, *, given: str, otherwise: str) -> None:
    """Raise CheckpointError unless the checkpoint's optimizer is of this class ("AdamW") and its numbers are valid.

    Moments that are stored in 8 bits are numbers in a checkpoint, so "AdamW8bit" counts as "AdamW".
    given: the optimizer, as the user has named it.  otherwise: the way to leave its state out.
    """
    saved, numbers = checkpoint.progress.get(OPTIMIZER, "AdamW"), checkpoint.progress.get(_NUMBERS, {})
    if in_numbers(str(saved)) != in_numbers(kind):
        rule = "a resumed run goes on with the optimizer it began with, whose state the checkpoint has"
        legal = f"{saved}, or {otherwise} to start the optimizer anew"
        raise CheckpointError(Problem(f"{given}; {checkpoint.folder} was saved with {saved}", rule, legal))
    by_parameter = checkpoint.progress.get(_BY_PARAMETER, {})
    tables = numbers if isinstance(numbers, list) else [numbers]
    tables += list(by_parameter.values()) if isinstance(by_parameter, dict) else [by_parameter]
    if not all(table is None or _are_numbers(table) for table in tables):
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
    without: Collection[str] = (),
) -> tuple[str, ...]:
    """Fill the engine's state from a checkpoint of any layout; return a line for each part that begins anew.

    others: further fragments of the checkpoint to fill.  without: names of parameters that stay as they are, which the
    checkpoint has not.
    """
    beside = list(others)
    found = engine.wanted_state(with_optimizer=with_optimizer)
    weights = [piece for piece in found if piece.kind == "weight" and piece.spec.name not in without]
    check_fits(checkpoint, [*weights, *beside], control=control)
    wanted: list[StateFragment] = weights
    if with_optimizer:
        numbers = _saved_numbers(checkpoint, engine)
        engine.start_optimizer(numbers, num_steps=_steps(checkpoint))
        # An optimizer that makes the state of a parameter at its first step has saved none of one that never stepped.
        new = {name for name, own in numbers.parameters.items() if own is None}
        wanted = []
        for piece in engine.wanted_state():
            if piece.kind == "weight" or piece.spec.name not in new:
                wanted.append(piece)
            else:
                piece.tensor.zero_()
    restore(checkpoint, [*wanted, *beside], control=control)
    engine.state_loaded(weights_only=not with_optimizer)
    notice = restore_wires(checkpoint, engine, control=control) if with_optimizer else ""
    return (notice,) if notice else ()


def _saved_numbers(checkpoint: Checkpoint, engine: Engine) -> OptimizerNumbers:
    """Return the checkpoint's numbers for each of the optimizer's groups; raise CheckpointError if they do not fit."""
    saved: Any = checkpoint.progress.get(_NUMBERS, {})
    by_parameter: Any = checkpoint.progress.get(_BY_PARAMETER, {})
    groups = {slot.group for section in engine.layout.sections for slot in section.slots} - {NOT_UPDATED}
    if not isinstance(saved, list):
        of_group = {group: _with_step(saved, checkpoint, engine, group) for group in groups}
        return OptimizerNumbers(of_group, by_parameter)
    if len(saved) <= max(groups):
        given = f"an optimizer of {max(groups) + 1} param groups; {checkpoint.folder} was saved with {len(saved)}"
        raise CheckpointError(Problem(given, "each param group has numbers of its own", "the same param groups"))
    return OptimizerNumbers(dict(enumerate(saved)), by_parameter)


def _with_step(
    saved: Mapping[str, float] | None, checkpoint: Checkpoint, engine: Engine, group: int
) -> Mapping[str, float] | None:
    """Return the numbers with the count of steps, which the fused AdamW leaves to the run's counters."""
    inner = engine.settings.optimizer
    if saved != {} or not isinstance(inner, Elementwise) or inner.optimizer.number_names(group) != (STEP,):
        return saved
    return {STEP: _steps(checkpoint)}


def _steps(checkpoint: Checkpoint) -> float:
    steps: Any = checkpoint.progress.get("optimizer_steps", 0)
    return float(steps)


def _are_numbers(values: object) -> bool:
    return isinstance(values, dict) and all(type(value) in (int, float) for value in values.values())
