"""Records the passes of a model's blocks as CUDA graphs, which a GPU repeats without the host.

A recorded pass launches all kernels of a block by one call, at the addresses of its recording: the block's input and
output, what it saves for backward, its parameters and their gradients.  So parameters stay where they are (ZeRO stages
0 to 2), a backward pass follows each forward pass before the next one, and a pass has no other effect than its
results.  Each block reads the output of the one before it where that was written.  What lies between blocks, above all
ZeRO's reductions as gradients get ready, is not recorded.

All passes are recorded at the first training pass, in the order in which they run: forward through all blocks, then
backward.  In that order a pass may use memory that only earlier ones need, so all recordings share one pool.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megazero.generators import DefaultGenerators
from megazero.model.gpt import GPT
from megazero.model.sequences import Sequences

T = TypeVar("T")
Forward = Callable[[Tensor, Sequences], Tensor]


class PassRecorder(Protocol):
    """Records what functions do on a device."""

    def warm_up(self, function: Callable[[], object]) -> None:
        """Call a function before it is recorded, so that what is made at the first call is not recorded."""

    def record(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Call a function; return its result, and what computes the result anew at the same addresses."""


class GraphRecorder:
    """Records CUDA graphs, which share a pool of memory and are repeated in the order of their recording."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        make_stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream  # it has no annotations
        self._stream = make_stream()

    def warm_up(self, function: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's and those that copy batches, may go on with calls that a recording forbids.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return result, graph.replay


def record_blocks(model: GPT, make_recorder: Callable[[], PassRecorder] = GraphRecorder) -> None:
    """Let the blocks of a model that is not cut run by recorded passes where it is trained.

    Without gradients, as in evaluation, they run as they are.
    """
    RecordedBlocks(list(model.consumers()), make_recorder)


class RecordedBlocks:
    """The recorded passes of all blocks, or groups of blocks that run as one module."""

    def __init__(
        self, consumers: Sequence[tuple[nn.Module, Sequence[nn.Module]]], make_recorder: Callable[[], PassRecorder]
    ) -> None:
        self._make_recorder = make_recorder
        self._blocks: list[_Block] = []
        for number, (module, held) in enumerate(consumers):
            parameters = [each for block in held for each in block.parameters() if each.requires_grad]
            self._blocks.append(_Block(module.forward, parameters))
            module.forward = partial(self._run, number, module)
        self._is_recorded = False

    def _run(self, number: int, module: nn.Module, x: Tensor, sequences: Sequences) -> Tensor:
        block = self._blocks[number]
        if not (module.training and torch.is_grad_enabled()):
            return block.forward(x, sequences)
        if not self._is_recorded:
            self._record(x, sequences)
        return _apply(block, x, *block.parameters)

    def _record(self, x: Tensor, sequences: Sequences) -> None:
        """Record all passes, for inputs like that of the first block; random numbers are drawn as without this."""
        recorder, generators = self._make_recorder(), DefaultGenerators(x.device)
        state = generators.get_state()
        first = given = torch.zeros_like(x).requires_grad_(x.requires_grad)
        for block in self._blocks:
            block.place(given, sequences)
            recorder.warm_up(block.both_passes)
            given = block.output
        for block in self._blocks:
            block.place(first, sequences)
            block.record_forward(recorder)
            first = block.output
        gradient = torch.empty_like(first)
        for block in reversed(self._blocks):
            gradient = block.record_backward(recorder, gradient)
        generators.set_state(state)
        self._is_recorded = True


class _Block:
    """The passes of one block, or of several that run as one module.

    input, output: [n, h], where each forward pass reads and writes.  incoming: [n, h], where each backward pass reads
    the output's gradient.  gradients: those of the input, None if it needs none, and of the parameters, where each
    backward pass writes them.
    """

    def __init__(self, forward: Forward, parameters: list[nn.Parameter]) -> None:
        self.forward = forward
        self.parameters = parameters

    def place(self, x: Tensor, sequences: Sequences) -> None:
        """Set where forward passes read their input; sequences: those of every micro-batch."""
        self.input = x.detach().requires_grad_(x.requires_grad)
        self._sequences = sequences
        self._inputs = [*([self.input] if x.requires_grad else []), *self.parameters]

    def both_passes(self) -> None:
        """Run a forward and a backward pass."""
        self.output = self._forward_pass().detach().requires_grad_()
        self.incoming = torch.zeros_like(self.output)
        self._backward_pass()

    def record_forward(self, recorder: PassRecorder) -> None:
        """Record the forward pass."""
        output, self.repeat_forward = recorder.record(self._forward_pass)
        self.output = output.detach().requires_grad_()

    def record_backward(self, recorder: PassRecorder, gradient: Tensor) -> Tensor:
        """Record the backward pass, and return its input's gradient, or the output's where the input needs none."""
        self.incoming = gradient
        found, self._repeat_backward = recorder.record(self._backward_pass)
        self.gradients = found if self.input.requires_grad else (None, *found)
        return gradient if self.gradients[0] is None else self.gradients[0]

    def repeat_backward(self) -> None:
        """Compute the gradients anew; what a parameter's `.grad` still holds of the last ones stays as it is."""
        for parameter, gradient in zip(self.parameters, self.gradients[1:], strict=True):
            kept = parameter.grad
            if kept is not None and gradient is not None and kept.data_ptr() == gradient.data_ptr():
                parameter.grad = kept.clone()
        self._repeat_backward()

    def _forward_pass(self) -> Tensor:
        with torch.enable_grad():
            self._result = self.forward(self.input, self._sequences)
        return self._result

    def _backward_pass(self) -> tuple[Tensor | None, ...]:
        result = self._result
        del self._result  # with what it has saved, whose memory later recordings may use
        return torch.autograd.grad(result, self._inputs, self.incoming, allow_unused=True)


class _Repeated(torch.autograd.Function):
    """A block's recorded passes, as an operation of its input and its parameters."""

    @staticmethod
    def forward(ctx: Any, block: _Block, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.block = block
        _bring(x, block.input)
        block.repeat_forward()
        return block.output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        block: _Block = ctx.block
        _bring(gradient, block.incoming)
        block.repeat_backward()
        return (None, *(each if each is None else each.detach() for each in block.gradients))


# torch's method has no annotations.
_apply: Callable[..., Tensor] = _Repeated.apply


def _bring(x: Tensor, place: Tensor) -> None:
    """Copy a tensor to the place where a recorded pass reads it, unless it is there: the pass before wrote it."""
    if x.data_ptr() != place.data_ptr():
        place.detach().copy_(x)
