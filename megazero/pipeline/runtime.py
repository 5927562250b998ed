"""The loop that executes a schedule: actions are independent of models, callbacks independent of schedules."""

from collections.abc import Callable
from typing import Protocol

from megazero.pipeline.schedule import Action, Kind
from megazero.pipeline.stage_plan import StepActions


class Callbacks(Protocol):
    """The functions that carry out the actions of a schedule."""

    def forward(self, action: Action) -> None:
        """Compute a chunk on a micro-batch and retain its graph."""

    def backward(self, action: Action, *, is_last: bool) -> None:
        """Run backward through the retained graph; is_last: no other gradients of the chunk's parameters follow."""

    def input_gradient(self, action: Action) -> None:
        """Run backward as far as activations need it; gradients of parameters are deferred."""

    def weight_gradient(self, action: Action, *, is_last: bool) -> None:
        """Compute the deferred gradients of parameters; is_last as in `backward`."""

    def receive(self, action: Action) -> None:
        """Post a receive."""

    def send(self, action: Action) -> None:
        """Send the output of a computation."""

    def retain(self, chunk: int) -> None:
        """Retain a chunk's gathered parameters until `release`."""

    def release(self, chunk: int) -> None:
        """Release a chunk's gathered parameters, at their next use's end at the latest."""


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
        Kind.GATHER: lambda action: callbacks.retain(action.chunk),
        Kind.RELEASE: lambda action: callbacks.release(action.chunk),
    }
    for action in step.actions:
        do[action.kind](action)
