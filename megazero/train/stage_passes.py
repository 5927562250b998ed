"""The actions of a pipeline schedule on one rank: forward and backward passes of its chunks of the model.

After a forward pass a rank retains the graph of the micro-batch, the graph's root for backward, and only the
activations that the graph has saved: the output is freed when it has been sent, the received input unless it was saved.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.data.loader import MicroBatch
from megazero.model.sequences import Sequences
from megazero.pipeline.exchange import Cut, Exchange, ReceivedInput
from megazero.pipeline.schedule import Action, Kind
from megazero.pipeline.stage_plan import StepActions
from megazero.tensor_parallel.deferred import PassGradients
from megazero.train.context import StepContext

_Key = tuple[int, int]  # micro-batch and chunk
# {kind of action: the part of a step that its time belongs to}
_PART_OF = MappingProxyType(
    {
        Kind.FORWARD: "forward-compute",
        Kind.BACKWARD: "backward-compute",
        Kind.INPUT_GRADIENT: "backward-input-compute",
        Kind.WEIGHT_GRADIENT: "backward-weight-compute",
        Kind.RECEIVE_ACTIVATION: "forward-recv",
        Kind.RECEIVE_GRADIENT: "backward-recv",
        Kind.SEND_ACTIVATION: "forward-send",
        Kind.SEND_GRADIENT: "backward-send",
    }
)


class StagePasses:
    """The passes of one step on one rank.

    Losses and tokens are summed on the stage that has the head; on the others both sums stay 0.
    multiplier: the factor of the losses before backward.
    """

    def __init__(
        self, context: StepContext, micro_batches: Sequence[MicroBatch], step: StepActions, *, multiplier: float = 1.0
    ) -> None:
        self._context = context
        self._model = context.model
        self._micro_batches = micro_batches
        self._multiplier = multiplier
        device = context.mesh.device
        cut = Cut(context.model.activation_shape(micro_batches[0].tokens.numel()), context.model.dtype)
        self._exchange = Exchange(context.mesh, cut, step.receipts)
        self._inputs: dict[_Key, ReceivedInput] = {}
        self._roots: dict[_Key, GradientEdge | Tensor] = {}
        self._outgoing: dict[Action, Tensor] = {}
        self._deferred: dict[_Key, PassGradients] = {}
        self._sequences: dict[int, Sequences] = {}
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.num_tokens = torch.zeros((), dtype=torch.float64, device=device)

    def forward(self, action: Action) -> None:
        """Run the forward pass of a chunk on a micro-batch."""
        self._note(action, "forward")
        self._context.ledger.phase("forward")
        batch, chunk = self._micro_batches[action.micro_batch], self._model.chunks[action.chunk]
        received = None if chunk.is_first else self._wait(action._replace(kind=Kind.RECEIVE_ACTIVATION))
        with self._context.trace.computing(action), self._timed(action):
            self._context.dropout.begin_micro_batch(batch.first_sample, 0 if chunk.is_first else 1 + chunk.layers.start)
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
        """Run the backward pass of a chunk on a micro-batch; gradients reach their parameters."""
        self._note(action, "backward")
        engine, gradient = self._context.engine, self._output_gradient(action)
        with self._context.trace.computing(action), self._timed(action):
            engine.begin_backward(is_last=is_last, part=action.chunk)
            self._run_backward(action, gradient)
            engine.end_backward(ends_pass=self._is_idle)

    def input_gradient(self, action: Action) -> None:
        """Run the backward pass to the input only; the gradients of weights are deferred."""
        self._note(action, "backward")
        assert self._context.deferred is not None, "a schedule that splits backward has a store for deferred gradients"
        gradient = self._output_gradient(action)
        with self._context.trace.computing(action), self._timed(action):
            self._run_backward(action, gradient)
            self._deferred[_key(action)] = self._context.deferred.collect()
            self._context.engine.end_walk(ends_pass=False)

    def weight_gradient(self, action: Action, *, is_last: bool) -> None:
        """Compute the deferred gradients of weights, which reach their parameters."""
        self._note(action, "backward")
        engine = self._context.engine
        with self._context.trace.computing(action), self._timed(action):
            engine.begin_backward(is_last=is_last, part=action.chunk)
            self._deferred.pop(_key(action)).accumulate()
            engine.end_backward(ends_pass=self._is_idle)

    def receive(self, action: Action) -> None:
        self._exchange.receive(action)

    def send(self, action: Action) -> None:
        with self._timed(action):
            self._exchange.send(action, self._outgoing.pop(action))

    def retain(self, chunk: int) -> None:
        self._context.engine.retain_part(chunk)

    def release(self, chunk: int) -> None:
        self._context.engine.release_part(chunk)

    def finish(self) -> None:
        """Wait until every message has been sent."""
        self._exchange.finish()

    def _timed(self, action: Action) -> AbstractContextManager[None]:
        """Return a context whose time is that of the action's kind."""
        return self._context.timers.measure(_PART_OF[action.kind])

    def _wait(self, action: Action) -> Tensor:
        """Wait for a posted receive and return its tensor."""
        with self._timed(action):
            return self._exchange.wait(action)

    def _note(self, action: Action, activity: str) -> None:
        """Write to the flight record where this rank is."""
        flight = self._context.mesh.meter.flight
        flight.activity, flight.micro_batch = activity, action.micro_batch

    @property
    def _is_idle(self) -> bool:
        return not (self._roots or self._deferred)

    def _sequences_of(self, action: Action, batch: MicroBatch) -> Sequences:
        """Return the positions and documents of a micro-batch, made once for all chunks of this rank.

        Chunks take a micro-batch in model order, so the last one removes the entry; graphs retain what they need.
        """
        last_chunk = len(self._model.chunks) - 1
        sequences = self._sequences.pop(action.micro_batch, None) or self._made_sequences(batch)
        if action.chunk < last_chunk:
            self._sequences[action.micro_batch] = sequences
        return sequences

    def _made_sequences(self, batch: MicroBatch) -> Sequences:
        device = self._context.mesh.device
        positions, documents = (
            None if part is None else _to_device(part, device) for part in (batch.positions, batch.documents)
        )
        return self._model.sequences(batch.tokens.shape[1], positions=positions, documents=documents)

    def _enter(self, action: Action, batch: MicroBatch, sequences: Sequences, received: Tensor | None) -> Tensor:
        if received is None:
            return self._model.embed(_to_device(batch.tokens, self._context.mesh.device), sequences)
        self._inputs[_key(action)] = ReceivedInput()
        return self._inputs[_key(action)].enter(received)

    def _losses(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """Return the loss, multiplied for backward, after adding loss and tokens to the sums."""
        device = self._context.mesh.device
        labels = _to_device(batch.labels, device)
        mask = None if batch.loss_mask is None else _to_device(batch.loss_mask, device)
        loss = self._model.loss(x, labels, mask)
        self.loss_sum += loss.detach()
        self.num_tokens += labels.numel() if mask is None else mask.sum()
        return loss * self._multiplier

    def _output_gradient(self, action: Action) -> Tensor | None:
        """Return the received gradient of the chunk's output; None for a loss, whose gradient is 1."""
        if self._model.chunks[action.chunk].is_last:
            return None
        return self._wait(action._replace(kind=Kind.RECEIVE_GRADIENT))

    def _run_backward(self, action: Action, gradient: Tensor | None) -> None:
        self._context.ledger.phase("backward")
        root = self._roots.pop(_key(action), None)
        if root is not None:  # a stage whose parameters are all frozen may have nothing to differentiate
            torch.autograd.backward(root, gradient)
        entered = self._inputs.pop(_key(action), None)
        if entered is not None:
            assert entered.gradient is not None, f"{action} has come to the input"
            self._outgoing[action._replace(kind=Kind.SEND_GRADIENT)] = entered.gradient


def _key(action: Action) -> _Key:
    return action.micro_batch, action.chunk


def _to_device(part: Tensor, device: torch.device) -> Tensor:
    """Copy a part of a batch to the device; asynchronous on a GPU for pinned memory, no copy on a CPU."""
    return part.to(device, non_blocking=True)
