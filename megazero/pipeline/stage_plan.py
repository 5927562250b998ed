"""What one pipeline stage does in a step, made from its schedule.  Pure.

A *plan* is chosen once for a run; `StagePlan.step` gives the actions for a number of micro-batches, and what else
follows from the order of actions alone: which backward is the last of its chunk, and which messages are over when.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megazero.pipeline.passes import final_backwards, with_exchanges, with_windows
from megazero.pipeline.schedule import Action, Kind, Shape, forward_only, schedule


class Taken(NamedTuple):
    """How many of the activations, and of the gradients, that a stage has sent have been taken by their receivers."""

    activations: int = 0
    gradients: int = 0


class StepActions(NamedTuple):
    """One stage's step.

    finals: the last BACKWARD or WEIGHT_GRADIENT of every chunk.  taken: by RECEIVE action, what its arrival proves.
    """

    actions: tuple[Action, ...]
    finals: frozenset[Action]
    taken: Mapping[Action, Taken]


@dataclass(frozen=True)
class StagePlan:
    """A stage of a pipeline: the schedule's name, degrees, which stage.

    keeps_gathered: whether parameters that are gathered for use stay for a window of the schedule.  made: the steps
    asked for so far.
    """

    schedule: str = "1f1b"
    num_stages: int = 1
    num_chunks: int = 1
    stage: int = 0
    keeps_gathered: bool = False
    made: dict[tuple[int, bool], StepActions] = field(default_factory=dict, compare=False, repr=False)

    def step(self, num_micro_batches: int) -> StepActions:
        """Forwards and backwards of a training step."""
        return self._made(num_micro_batches, trains=True)

    def evaluation(self, num_micro_batches: int) -> StepActions:
        """Forwards only."""
        return self._made(num_micro_batches, trains=False)

    def _made(self, num_micro_batches: int, *, trains: bool) -> StepActions:
        key = num_micro_batches, trains
        if key not in self.made:
            self.made[key] = _step(self, num_micro_batches, trains=trains)
        return self.made[key]


def _step(plan: StagePlan, num_micro_batches: int, *, trains: bool) -> StepActions:
    shape = Shape(plan.num_stages, num_micro_batches, plan.num_chunks)

    def actions_of(stage: int) -> tuple[Action, ...]:
        computations = schedule(plan.schedule, shape, stage) if trains else forward_only(shape, stage)
        return with_exchanges(computations, shape, stage)

    mine = actions_of(plan.stage)
    around = {(plan.stage + step) % plan.num_stages for step in (-1, 1)} - {plan.stage}
    taken = proofs(mine, {stage: actions_of(stage) for stage in around}, shape, plan.stage)
    finals = final_backwards(mine)
    return StepActions(with_windows(mine) if plan.keeps_gathered and trains else mine, finals, taken)


def proofs(
    mine: Sequence[Action], around: Mapping[int, Sequence[Action]], shape: Shape, stage: int
) -> dict[Action, Taken]:
    """By RECEIVE action of `stage`: which of its sends are over when the message is there.

    A neighbour that has sent something has taken, before that, what its computations had needed until then.  Where a
    send may not be asked whether it is over, this is how its memory goes in time.
    """
    found: dict[Action, Taken] = {}
    for neighbour, actions in around.items():
        is_next, is_previous = ((stage + step) % shape.num_stages == neighbour for step in (1, -1))
        activations, gradients = _counts_at_sends(actions, shape, neighbour, is_next=is_next, is_previous=is_previous)
        receives = {kind: [action for action in mine if action.kind is kind] for kind in _RECEIVES}
        if is_previous:
            found |= dict(zip(receives[Kind.RECEIVE_ACTIVATION], activations, strict=True))
        if is_next:
            found |= dict(zip(receives[Kind.RECEIVE_GRADIENT], gradients, strict=True))
    return found


_RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)


def _counts_at_sends(
    actions: Sequence[Action], shape: Shape, stage: int, *, is_next: bool, is_previous: bool
) -> tuple[list[Taken], list[Taken]]:
    """What `stage`, our next or previous one, has taken of us when it sends activations, and when gradients."""
    taken: Counter[Kind] = Counter()
    at: dict[Kind, list[Taken]] = {Kind.SEND_ACTIVATION: [], Kind.SEND_GRADIENT: []}
    for action in actions:
        if action.kind is Kind.FORWARD and is_next and not shape.is_first(stage, action.chunk):
            taken[Kind.SEND_ACTIVATION] += 1
        elif action.kind in _BACKWARDS and is_previous and not shape.is_last(stage, action.chunk):
            taken[Kind.SEND_GRADIENT] += 1
        elif action.kind in at:
            at[action.kind].append(Taken(taken[Kind.SEND_ACTIVATION], taken[Kind.SEND_GRADIENT]))
    return at[Kind.SEND_ACTIVATION], at[Kind.SEND_GRADIENT]


_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
