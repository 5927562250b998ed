"""Executes a schedule: the actions know nothing of models, the callbacks nothing of schedules."""

from collections.abc import Sequence
from typing import Protocol

from megazero.pipeline.schedule import Action, Kind


class Callbacks(Protocol):
    """What the actions of a schedule mean."""

    def forward(self, micro_batch: int) -> None:
        """Compute the loss of a micro-batch and keep its graph."""

    def backward(self, micro_batch: int, *, is_last: bool) -> None:
        """Backward through the kept graph; is_last: no other backward of this step follows."""


def execute(actions: Sequence[Action], callbacks: Callbacks) -> None:
    """Run the actions in order."""
    remaining = sum(action.kind is Kind.BACKWARD for action in actions)
    for action in actions:
        if action.kind is Kind.FORWARD:
            callbacks.forward(action.micro_batch)
        else:
            remaining -= 1
            callbacks.backward(action.micro_batch, is_last=remaining == 0)
