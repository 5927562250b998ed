"""The state of wires that round, in a checkpoint: errors that are fed back, and how far generators have drawn.

Unlike all else in a checkpoint it is of ranks, not of parameters: three tensors a rank (errors, calls, draws), of the
kind "wires", whose names end in a hash of what decides how messages are divided and rounded.  So a rank of another
layout finds none with its name, and all ranks begin without.
"""

import hashlib
import json
from collections.abc import Iterator

import torch

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.manifest import WIRES
from megazero.checkpoint.reader import Checkpoint
from megazero.comm.interface import Communicator
from megazero.errors import DamageError, Problem
from megazero.parallel.param_spec import ParamSpec, StateFragment
from megazero.zero.engine import Engine

_ERRORS, _CALLS, _DRAWS = "errors", "calls", "draws"


def wire_fragments(engine: Engine) -> Iterator[StateFragment]:
    """Yield the state of this rank's wires, as far as there is any and it is to be saved."""
    state = engine.mesh.wire_state
    if state.generators:
        draws = state.draws()
        yield StateFragment(_spec(engine, _DRAWS, draws.numel()), WIRES, 0, draws.numel(), draws)
    if not _saves_errors(engine) or state.feedback is None:
        return
    calls = state.feedback.calls()
    if calls.numel():
        yield StateFragment(_spec(engine, _CALLS, calls.numel()), WIRES, 0, calls.numel(), calls.view(-1))
        yield from _error_fragments(engine)


def largest_wire_bytes(engine: Engine) -> int:
    """Return the bytes of errors that this rank saves once every bucket has been reduced."""
    slices = [bucket.numel // bucket.partitions for bucket in engine.layout.trainable_buckets]
    return engine.mesh.wire_state.largest_error_bytes(slices) if _saves_errors(engine) else 0


def restore_wires(checkpoint: Checkpoint, engine: Engine, *, control: Communicator) -> str:
    """Take over the state of the wires where the checkpoint has that of every rank of this layout; collective.

    Returns a notice where it has not, "" if nothing is missing.
    """
    state = engine.mesh.wire_state
    wanted = [*([_DRAWS] if state.generators else []), *([_CALLS, _ERRORS] if state.feedback is not None else [])]
    saved = {entry.parameter: entry.shape[0] for entry in checkpoint.manifest.tensors if entry.kind == WIRES}
    is_there = [_name(engine, what) in saved for what in wanted]
    found = all_or_none(control, lambda: [len(is_there), sum(is_there)], doing="comparing layouts")
    if not any(num_wanted for num_wanted, _ in found):
        return ""
    if any(num_wanted != num_found for num_wanted, num_found in found):
        lost = "was saved at another layout" if saved else "has none"
        return (
            f"{checkpoint.folder}: the state of quantized messages {lost}; errors that are fed back begin at zero,"
            " and rounding at random anew"
        )

    def restore() -> None:
        if state.generators:
            state.restore_draws(checkpoint.read_full(_name(engine, _DRAWS), WIRES))
        if state.feedback is None:
            return
        calls = checkpoint.read_full(_name(engine, _CALLS), WIRES).view(-1, 4).tolist()
        total, has = sum(nbytes for *_, nbytes in calls), saved[_name(engine, _ERRORS)]
        if total != has or any(min(row) < 0 for row in calls):
            given = f"{_name(engine, _CALLS)} in {checkpoint.folder}"
            raise DamageError(Problem(given, f"it describes {total} bytes of errors, of which there are {has}"))
        state.feedback.restore(calls)
        checkpoint.fill(_error_fragments(engine))

    all_or_none(control, restore, doing=f"reading {checkpoint.folder}")
    return ""


def _saves_errors(engine: Engine) -> bool:
    return engine.settings.zero.zero_error_feedback_saved


def _error_fragments(engine: Engine) -> Iterator[StateFragment]:
    """Yield the errors as parts of one tensor, bucket by bucket and exchange by exchange."""
    feedback = engine.mesh.wire_state.feedback
    assert feedback is not None, "the wires feed errors back"
    every = list(feedback.errors())
    spec, start = _spec(engine, _ERRORS, sum(map(torch.Tensor.numel, every))), 0
    for errors in every:
        yield StateFragment(spec, WIRES, start, start + errors.numel(), errors)
        start += errors.numel()


def _spec(engine: Engine, what: str, numel: int) -> ParamSpec:
    return ParamSpec(_name(engine, what), (numel,), (numel,), (0,), trainable=False)


def _name(engine: Engine, what: str) -> str:
    """Return the name of this rank's tensor: `wires.3.errors.0f3a...`."""
    buckets = [
        (bucket.start, bucket.stop, bucket.partitions, [(each.spec.name, *each.within) for each in fragments.values()])
        for bucket in engine.layout.trainable_buckets
        for fragments in [bucket.fragments]
    ]
    layout = [engine.mesh.topology.describe(), engine.mesh.wire_state.layout, buckets]
    digest = hashlib.sha256(json.dumps(layout).encode()).hexdigest()
    return f"wires.{engine.mesh.rank}.{what}.{digest[:32]}"
