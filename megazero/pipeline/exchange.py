"""Point-to-point exchange between neighbouring pipeline stages in one step.

Every message has one shape and dtype, which both sides know: the activations at a cut, or their gradients.  Receives
are posted ahead and waited for by `take`; a send returns at once, and its tensor is let go when a message proves that
it has been taken (`plan.proofs`), at the step's end at the latest.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.comm.interface import Communicator, Work
from megazero.comm.mesh import ACTIVATIONS, GRADIENTS, Mesh
from megazero.pipeline.schedule import Action, Kind
from megazero.pipeline.stage_plan import Taken


class Cut(NamedTuple):
    """What passes between stages: the shape and dtype of activations."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Arriving(NamedTuple):
    work: Work
    tensor: Tensor


class Route(NamedTuple):
    """Which way messages of one kind go: the mesh's key, the link (named by the stage before it), the other stage."""

    key: str
    link: int
    stage: int


def routes(stage: int, num_stages: int) -> dict[Kind, Route]:
    """Of a stage's messages, by kind; none where there is no other stage."""
    if num_stages == 1:
        return {}
    before, after = (stage - 1) % num_stages, (stage + 1) % num_stages
    return {
        Kind.SEND_ACTIVATION: Route(ACTIVATIONS, stage, after),
        Kind.RECEIVE_ACTIVATION: Route(ACTIVATIONS, before, before),
        Kind.SEND_GRADIENT: Route(GRADIENTS, before, before),
        Kind.RECEIVE_GRADIENT: Route(GRADIENTS, stage, after),
    }


class _Way(NamedTuple):
    """Where messages of one kind go, or come from: the communicator, the stage there."""

    communicator: Communicator
    stage: int


class Exchange:
    """Messages of one rank in one step."""

    def __init__(self, mesh: Mesh, cut: Cut, taken: Mapping[Action, Taken]) -> None:
        self._cut = cut
        self._taken = taken
        self._device = mesh.device
        self._ways = {
            kind: _Way(mesh.channel(route.key, link=route.link), route.stage)
            for kind, route in routes(mesh.coordinate("pp"), mesh.topology.pp).items()
        }
        self._arriving: dict[Action, _Arriving] = {}
        self._sent: dict[Kind, deque[_Arriving]] = {Kind.SEND_ACTIVATION: deque(), Kind.SEND_GRADIENT: deque()}
        self._num_over = dict.fromkeys(self._sent, 0)

    def receive(self, action: Action) -> None:
        """Post a receive."""
        way = self._ways[action.kind]
        tensor = torch.empty(self._cut.shape, dtype=self._cut.dtype, device=self._device)
        self._arriving[action] = _Arriving(way.communicator.receive_into(tensor, way.stage), tensor)

    def take(self, action: Action) -> Tensor:
        """What a receive has brought, when it is there."""
        arriving = self._arriving.pop(action)
        arriving.work.wait()
        taken = self._taken[action]
        self._let_go(Kind.SEND_ACTIVATION, taken.activations)
        self._let_go(Kind.SEND_GRADIENT, taken.gradients)
        return arriving.tensor

    def send(self, action: Action, tensor: Tensor) -> None:
        """Send a tensor, which must not be written to any more."""
        found = Cut(tuple(tensor.shape), tensor.dtype)
        assert found == self._cut, f"{action} sends {found}, the stages have agreed on {self._cut}"
        way = self._ways[action.kind]
        dense = tensor.contiguous()
        self._sent[action.kind].append(_Arriving(way.communicator.send(dense, way.stage), dense))

    def finish(self) -> None:
        """Return when every message has gone."""
        assert not self._arriving, f"nobody has taken {[str(action) for action in self._arriving]}"
        for sent in self._sent.values():
            while sent:
                sent.popleft().work.wait()

    def _let_go(self, kind: Kind, number: int) -> None:
        """The first `number` messages of a kind have been taken."""
        while self._num_over[kind] < number:
            self._sent[kind].popleft().work.wait()
            self._num_over[kind] += 1


class ReceivedInput:
    """A received activation as the beginning of a graph; `gradient` is there after backward.

    The graph refers to its memory only where something saves it, so that a checkpoint kept in another form frees it.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """x as a part of a graph."""
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
