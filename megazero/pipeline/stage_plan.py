"""The actions of one pipeline stage in a step, made from its schedule.  Pure.

A *plan* is chosen once for a run; `StagePlan.step` gives the actions for a number of micro-batches, and two facts that
follow from the order of actions alone: which backward is the last of its chunk, and when a sent message is known to be
received.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megazero.pipeline.passes import final_backwards, with_exchanges, with_windows
from megazero.pipeline.schedule import Action, Kind, Shape, forward_only, schedule


class Receipts(NamedTuple):
    """The numbers of the activations, and of the gradients, that a stage has sent and that are sure to be received."""

    activations: int = 0
    gradients: int = 0


class StepActions(NamedTuple):
    """The actions of one stage in one step.

    finals: the last BACKWARD or WEIGHT_GRADIENT of every chunk.  receipts: what each RECEIVE proves to be received.
    """

    actions: tuple[Action, ...]
    finals: frozenset[Action]
    receipts: Mapping[Action, Receipts]


@dataclass(frozen=True)
class StagePlan:
    """A stage of a pipeline: the schedule's name, the degrees, the stage's number.

    retains_gathered: whether gathered parameters are retained for a window of the schedule.  steps: the steps made so
    far, by number of micro-batches and whether they train.
    """

    schedule: str = "1f1b"
    num_stages: int = 1
    num_chunks: int = 1
    stage: int = 0
    retains_gathered: bool = False
    steps: dict[tuple[int, bool], StepActions] = field(default_factory=dict, compare=False, repr=False)

    def step(self, num_micro_batches: int) -> StepActions:
        """Return the forwards and backwards of a training step."""
        return self._cached(num_micro_batches, trains=True)

    def evaluation(self, num_micro_batches: int) -> StepActions:
        """Return the forwards of an evaluation step."""
        return self._cached(num_micro_batches, trains=False)

    def _cached(self, num_micro_batches: int, *, trains: bool) -> StepActions:
        key = num_micro_batches, trains
        if key not in self.steps:
            self.steps[key] = _step(self, num_micro_batches, trains=trains)
        return self.steps[key]


def _step(plan: StagePlan, num_micro_batches: int, *, trains: bool) -> StepActions:
    shape = Shape(plan.num_stages, num_micro_batches, plan.num_chunks)

    def actions_of(stage: int) -> tuple[Action, ...]:
        computations = schedule(plan.schedule, shape, stage) if trains else forward_only(shape, stage)
        return with_exchanges(computations, shape, stage)

    mine = actions_of(plan.stage)
    around = {(plan.stage + step) % plan.num_stages for step in (-1, 1)} - {plan.stage}
    receipts = proven_receipts(mine, {stage: actions_of(stage) for stage in around}, shape, plan.stage)
    finals = final_backwards(mine)
    return StepActions(with_windows(mine) if plan.retains_gathered and trains else mine, finals, receipts)


def proven_receipts(
    mine: Sequence[Action], around: Mapping[int, Sequence[Action]], shape: Shape, stage: int
) -> dict[Action, Receipts]:
    """Return by RECEIVE action of `stage` how many of its sends are known to be received when that message arrives.

    A neighbour that sends a message has received everything that its computations needed until then.  Some backends
    don't report whether a send has completed; with these counts its memory is released all the same.
    """
    found: dict[Action, Receipts] = {}
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
) -> tuple[list[Receipts], list[Receipts]]:
    """Return what the neighbour `stage` has received from this one when it sends each activation, and each gradient."""
    received: Counter[Kind] = Counter()
    at: dict[Kind, list[Receipts]] = {Kind.SEND_ACTIVATION: [], Kind.SEND_GRADIENT: []}
    for action in actions:
        if action.kind is Kind.FORWARD and is_next and not shape.is_first(stage, action.chunk):
            received[Kind.SEND_ACTIVATION] += 1
        elif action.kind in _BACKWARDS and is_previous and not shape.is_last(stage, action.chunk):
            received[Kind.SEND_GRADIENT] += 1
        elif action.kind in at:
            at[action.kind].append(Receipts(received[Kind.SEND_ACTIVATION], received[Kind.SEND_GRADIENT]))
    return at[Kind.SEND_ACTIVATION], at[Kind.SEND_GRADIENT]


_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
