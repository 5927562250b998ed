"""Executes a schedule: the actions know nothing of models, the callbacks nothing of schedules."""

from collections.abc import Callable
from typing import Protocol

from megazero.pipeline.schedule import Action, Kind
from megazero.pipeline.stage_plan import StepActions


class Callbacks(Protocol):
    """What the actions of a schedule mean."""

    def forward(self, action: Action) -> None:
        """Compute a chunk on a micro-batch and keep its graph."""

    def backward(self, action: Action, *, is_last: bool) -> None:
        """Backward through the kept graph; is_last: no other gradients of the chunk's parameters follow."""

    def input_gradient(self, action: Action) -> None:
        """Backward as far as activations need it; gradients of parameters are set aside."""

    def weight_gradient(self, action: Action, *, is_last: bool) -> None:
        """The gradients that were set aside; is_last as in `backward`."""

    def receive(self, action: Action) -> None:
        """Post a receive."""

    def send(self, action: Action) -> None:
        """Send what a computation has made."""

    def keep(self, chunk: int) -> None:
        """A chunk's gathered parameters may stay from now on."""

    def let_go(self, chunk: int) -> None:
        """They needn't stay."""


def execute(step: StepActions, callbacks: Callbacks) -> None:
    """Run a stage's actions in order."""
    do: dict[Kind, Callable[[Action], None]] = {
        Kind.FORWARD: callbacks.forward,
        Kind.BACKWARD: lambda action: callbacks.backward(action, is_last=action in step.finals),
        Kind.INPUT_GRADIENT: callbacks.input_gradient,
        Kind.WEIGHT_GRADIENT: lambda action: callbacks.weight_gradient(action, is_last=action in step.finals),
        Kind.RECEIVE_ACTIVATION: callbacks.receive,
        Kind.RECEIVE_GRADIENT: callbacks.receive,
        Kind.SEND_ACTIVATION: callbacks.send,
        Kind.SEND_GRADIENT: callbacks.send,
        Kind.GATHER: lambda action: callbacks.keep(action.chunk),
        Kind.RELEASE: lambda action: callbacks.let_go(action.chunk),
    }
    for action in step.actions:
        do[action.kind](action)
