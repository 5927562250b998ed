"""What the actions of a schedule do on one rank: forwards and backwards of its chunks of the model.

Of a micro-batch that has gone forward a rank holds its graph, the way into it for backward, and no activation but those
that the graph needs: the output goes once it has been sent, the received input once nothing has saved it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.data.loader import MicroBatch
from megazero.model.sequences import Sequences
from megazero.pipeline.exchange import Cut, Exchange, ReceivedInput
from megazero.pipeline.schedule import Action, Kind
from megazero.pipeline.stage_plan import StepActions
from megazero.tensor_parallel.deferred import PassGradients
from megazero.train.context import StepParts

_Key = tuple[int, int]  # micro-batch and chunk


class StagePasses:
    """The passes of one step; the loss and its tokens add up on the stage that has the head, elsewhere they stay 0.

    multiplier: of the losses, before backward.
    """

    def __init__(
        self, parts: StepParts, micro_batches: Sequence[MicroBatch], step: StepActions, *, multiplier: float = 1.0
    ) -> None:
        self._parts = parts
        self._model = parts.model
        self._micro_batches = micro_batches
        self._multiplier = multiplier
        device = parts.mesh.device
        cut = Cut(parts.model.activation_shape(micro_batches[0].tokens.numel()), parts.model.dtype)
        self._exchange = Exchange(parts.mesh, cut, step.receipts)
        self._inputs: dict[_Key, ReceivedInput] = {}
        self._roots: dict[_Key, GradientEdge | Tensor] = {}
        self._outgoing: dict[Action, Tensor] = {}
        self._held: dict[_Key, PassGradients] = {}
        self._sequences: dict[int, Sequences] = {}
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.num_tokens = torch.zeros((), dtype=torch.float64, device=device)

    def forward(self, action: Action) -> None:
        """A chunk on a micro-batch."""
        self._parts.ledger.phase("forward")
        batch, chunk = self._micro_batches[action.micro_batch], self._model.chunks[action.chunk]
        received = None if chunk.is_first else self._exchange.wait(action._replace(kind=Kind.RECEIVE_ACTIVATION))
        with self._parts.trace.computing(action):
            self._parts.dropout.begin_micro_batch(batch.first_sample, 0 if chunk.is_first else 1 + chunk.layers.start)
            sequences = self._sequences_of(action, batch)
            entered = [self._enter(action, batch, sequences, received)]
            received = None
            output = self._model.through(action.chunk, entered.pop(), sequences)
            if chunk.is_last:
                output = self._losses(output, batch)
        if output.requires_grad:
            self._roots[_key(action)] = output if chunk.is_last else get_gradient_edge(output)
        if not chunk.is_last:
            self._outgoing[action._replace(kind=Kind.SEND_ACTIVATION)] = output.detach()

    def backward(self, action: Action, *, is_last: bool) -> None:
        """Through a graph; gradients go to their parameters."""
        engine, gradient = self._parts.engine, self._output_gradient(action)
        with self._parts.trace.computing(action):
            engine.begin_backward(is_last=is_last, part=action.chunk)
            self._walk(action, gradient)
            engine.end_backward(ends_pass=self._is_idle)

    def input_gradient(self, action: Action) -> None:
        """Through a graph; gradients of parameters are set aside."""
        assert self._parts.deferred is not None, "a schedule that splits backward comes with a place for gradients"
        gradient = self._output_gradient(action)
        with self._parts.trace.computing(action):
            self._walk(action, gradient)
            self._held[_key(action)] = self._parts.deferred.collect()
            self._parts.engine.end_walk(ends_pass=False)

    def weight_gradient(self, action: Action, *, is_last: bool) -> None:
        """What was set aside goes to the parameters."""
        engine = self._parts.engine
        with self._parts.trace.computing(action):
            engine.begin_backward(is_last=is_last, part=action.chunk)
            self._held.pop(_key(action)).accumulate()
            engine.end_backward(ends_pass=self._is_idle)

    def receive(self, action: Action) -> None:
        self._exchange.receive(action)

    def send(self, action: Action) -> None:
        self._exchange.send(action, self._outgoing.pop(action))

    def retain(self, chunk: int) -> None:
        self._parts.engine.retain_part(chunk)

    def release(self, chunk: int) -> None:
        self._parts.engine.release_part(chunk)

    def finish(self) -> None:
        """Return when every message has gone."""
        self._exchange.finish()

    @property
    def _is_idle(self) -> bool:
        return not (self._roots or self._held)

    def _sequences_of(self, action: Action, batch: MicroBatch) -> Sequences:
        """Made once for all chunks of this rank, which take a micro-batch in their order; then the graphs hold it."""
        last_chunk = len(self._model.chunks) - 1
        sequences = self._sequences.pop(action.micro_batch, None) or _sequences(
            batch, self._parts.mesh.device, self._model.dtype
        )
        if action.chunk < last_chunk:
            self._sequences[action.micro_batch] = sequences
        return sequences

    def _enter(self, action: Action, batch: MicroBatch, sequences: Sequences, received: Tensor | None) -> Tensor:
        if received is None:
            return self._model.embed(_to_device(batch.tokens, self._parts.mesh.device), sequences)
        self._inputs[_key(action)] = ReceivedInput()
        return self._inputs[_key(action)].enter(received)

    def _losses(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """What backward starts from, when the figures have been counted."""
        device = self._parts.mesh.device
        labels = _to_device(batch.labels, device)
        mask = None if batch.loss_mask is None else _to_device(batch.loss_mask, device)
        loss = self._model.loss(x, labels, mask)
        self.loss_sum += loss.detach()
        self.num_tokens += labels.numel() if mask is None else mask.sum()
        return loss * self._multiplier

    def _output_gradient(self, action: Action) -> Tensor | None:
        """The gradient of what the chunk has put out; None of a loss, whose is 1."""
        if self._model.chunks[action.chunk].is_last:
            return None
        return self._exchange.wait(action._replace(kind=Kind.RECEIVE_GRADIENT))

    def _walk(self, action: Action, gradient: Tensor | None) -> None:
        self._parts.ledger.phase("backward")
        torch.autograd.backward(self._roots.pop(_key(action)), gradient)
        entered = self._inputs.pop(_key(action), None)
        if entered is not None:
            assert entered.gradient is not None, f"{action} has come to the input"
            self._outgoing[action._replace(kind=Kind.SEND_GRADIENT)] = entered.gradient


def _key(action: Action) -> _Key:
    return action.micro_batch, action.chunk


def _sequences(batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> Sequences:
    """What the model is told of a micro-batch besides its tokens."""
    positions, documents = (
        None if part is None else _to_device(part, device) for part in (batch.positions, batch.documents)
    )
    return Sequences.of(batch.tokens.shape[1], positions=positions, documents=documents, dtype=dtype)


def _to_device(part: Tensor, device: torch.device) -> Tensor:
    """A GPU copies by itself what the loader has pinned; on the CPU nothing is copied."""
    return part.to(device, non_blocking=True)
