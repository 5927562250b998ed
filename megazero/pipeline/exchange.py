"""Point-to-point exchange between neighbouring pipeline stages in one step.

Every message has one shape and dtype, on which both sides have agreed: the activations at a cut, or their gradients.
Receives are posted ahead and waited for by `wait`; a send returns at once, and its tensor is released when a message
proves that it has been received (`stage_plan.proven_receipts`), at the step's end at the latest.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.comm.interface import Communicator, Work
from megazero.comm.mesh import ACTIVATIONS, GRADIENTS, Mesh
from megazero.pipeline.schedule import Action, Kind
from megazero.pipeline.stage_plan import Receipts


class Cut(NamedTuple):
    """The shape and dtype of the activations that pass between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _InFlight(NamedTuple):
    work: Work
    tensor: Tensor


class Route(NamedTuple):
    """The route of one kind of message: the mesh's key, the link (named by the stage before it), the other stage."""

    key: str
    link: int
    stage: int


def routes(stage: int, num_stages: int) -> dict[Kind, Route]:
    """Return a stage's route for every kind of message; none where there is no other stage."""
    if num_stages == 1:
        return {}
    before, after = (stage - 1) % num_stages, (stage + 1) % num_stages
    return {
        Kind.SEND_ACTIVATION: Route(ACTIVATIONS, stage, after),
        Kind.RECEIVE_ACTIVATION: Route(ACTIVATIONS, before, before),
        Kind.SEND_GRADIENT: Route(GRADIENTS, before, before),
        Kind.RECEIVE_GRADIENT: Route(GRADIENTS, stage, after),
    }


class _Channel(NamedTuple):
    """The communicator for one kind of message, and the stage at its other end."""

    communicator: Communicator
    stage: int


class Exchange:
    """The messages of one rank in one step."""

    def __init__(self, mesh: Mesh, cut: Cut, receipts: Mapping[Action, Receipts]) -> None:
        self._cut = cut
        self._receipts = receipts
        self._device = mesh.device
        self._channels = {
            kind: _Channel(mesh.channel(route.key, link=route.link), route.stage)
            for kind, route in routes(mesh.coordinate("pp"), mesh.topology.pp).items()
        }
        self._arriving: dict[Action, _InFlight] = {}
        self._sent: dict[Kind, deque[_InFlight]] = {Kind.SEND_ACTIVATION: deque(), Kind.SEND_GRADIENT: deque()}
        self._num_released = dict.fromkeys(self._sent, 0)

    def receive(self, action: Action) -> None:
        """Post a receive."""
        channel = self._channels[action.kind]
        tensor = torch.empty(self._cut.shape, dtype=self._cut.dtype, device=self._device)
        self._arriving[action] = _InFlight(channel.communicator.receive_into(tensor, channel.stage), tensor)

    def wait(self, action: Action) -> Tensor:
        """Wait for a posted receive and return its tensor."""
        arriving = self._arriving.pop(action)
        arriving.work.wait()
        receipts = self._receipts[action]
        self._release_sends(Kind.SEND_ACTIVATION, receipts.activations)
        self._release_sends(Kind.SEND_GRADIENT, receipts.gradients)
        return arriving.tensor

    def send(self, action: Action, tensor: Tensor) -> None:
        """Begin to send a tensor, which must not be written to any more."""
        found = Cut(tuple(tensor.shape), tensor.dtype)
        assert found == self._cut, f"{action} sends {found}, the stages have agreed on {self._cut}"
        channel = self._channels[action.kind]
        dense = tensor.contiguous()
        self._sent[action.kind].append(_InFlight(channel.communicator.send(dense, channel.stage), dense))

    def finish(self) -> None:
        """Wait until every send has completed."""
        assert not self._arriving, f"received but not used: {[str(action) for action in self._arriving]}"
        for sent in self._sent.values():
            while sent:
                sent.popleft().work.wait()

    def _release_sends(self, kind: Kind, number: int) -> None:
        """Release the first `number` sent tensors of a kind, which their receiver is known to have."""
        while self._num_released[kind] < number:
            self._sent[kind].popleft().work.wait()
            self._num_released[kind] += 1


class ReceivedInput:
    """The beginning of the graph of a received activation; `gradient` is set by backward.

    The graph refers to the activation only where it is saved, so that an activation checkpoint in a copy frees it.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Return x as the beginning of a graph."""
        if not torch.is_grad_enabled():
            return x
        anchor = torch.zeros((), device=x.device, requires_grad=True)
        return _enter(anchor, x, self)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, received: ReceivedInput) -> Tensor:
        ctx.received = received
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.received.gradient = grad
        return None, None, None


_enter: Callable[..., Tensor] = _Enter.apply
