"""The one interface through which tensors are sent between ranks.

A *communicator* belongs to one axis of the mesh; `rank` and `size` are positions on that axis, not in the world.
Every collective returns a `Work`: the result may be read after `wait()`.  Tensors must be dense (gloo sums only the
first numel places of a strided one, without an error), and equal in size on all ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from torch import Tensor

_LEAST_SLICE_BYTES = 1 << 18  # of a rank's slice of a message, below which latency takes most of its time
ReduceKind = Literal["sum", "max", "min"]
Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "scalars", "send"]
# Copies from the device to host memory and back, which a meter counts beside collectives, on an axis of its own, and
# what is written to files of states and read from them, on another.
HostTransfer = Literal["store", "load"]
HOST = "host"
FileTransfer = Literal["write", "read"]
FILE = "file"


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Wait until the result may be read (on CUDA: by work that is queued on the current stream afterwards)."""


class LabelMismatch(RuntimeError):
    """The error of a gather to which a rank has given another label than its neighbour; rank: that neighbour's."""

    def __init__(self, rank: int, theirs: int, mine: int) -> None:
        super().__init__(f"rank {rank} of the axis gathers number {theirs} where this rank gathers number {mine}")
        self.rank, self.label, self.mine = rank, theirs, mine


class Communicator(Protocol):
    """The collectives over the ranks of one axis."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        """Gather output [size * n] from every rank's input [n], in rank order; input may be its slice of output.

        label: a number for what is gathered, where ranks may come to different gathers by mistake.  A communicator that
        sends messages (gloo's) compares it with the neighbour's, and its `wait` raises LabelMismatch.
        """

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        """Gather each output as `all_gather_into` does, all of them by one call, which NCCL makes one kernel of."""

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        """Sum all inputs [size * n]; output [n] is this rank's slice of the sum, and may alias that of input.

        key: a number for what is summed, the same at each of its sums.  A communicator that rounds what it sends keeps
        the error of each key apart (`error_feedback.py`); the others ignore it.
        """

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        """Sum up each input as `reduce_scatter_into` does, all of them by one call, which NCCL makes one kernel of."""

    def all_to_all_into(self, output: Tensor, input: Tensor) -> Work:
        """Send slice r of input [size * n] to rank r; slice r of output [size * n] comes from it.  They don't alias."""

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        """Reduce over ranks, in place."""

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        """Reduce a handful of figures (norm, loss, flags) in place; traffic counts list them apart."""

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Copy the tensor of rank `source` of this axis to all ranks, in place."""

    def send(self, tensor: Tensor, to: int) -> Work:
        """Send `tensor` to rank `to` of this axis; after `wait()` it may be written to."""

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        """Receive the next tensor from rank `source` of this axis; messages between two ranks keep their order."""

    def barrier(self) -> None:
        """Wait until every rank of the axis has called this."""


class JoinedWork:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class CompletedWork:
    """A Work that has completed."""

    def wait(self) -> None:
        return None


def gather_together(
    communicator: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
) -> Work:
    """Gather one tensor, or several by one call."""
    if len(outputs) == 1:
        return communicator.all_gather_into(outputs[0], inputs[0], label)
    return communicator.all_gather_coalesced(outputs, inputs, label)


def reduce_together(
    communicator: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
) -> Work:
    """Sum up one tensor, or several by one call."""
    if len(outputs) == 1:
        return communicator.reduce_scatter_into(outputs[0], inputs[0], key=None if keys is None else keys[0])
    return communicator.reduce_scatter_coalesced(outputs, inputs, keys)


def reduce_in_turn(
    communicator: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None
) -> Work:
    """Sum up tensors by a call for each."""
    of_each: Sequence[int | None] = keys or [None] * len(outputs)
    return JoinedWork(list(map(communicator.reduce_scatter_into, outputs, inputs, of_each)))


def gather_in_turn(
    communicator: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None
) -> Work:
    """Gather tensors by a call for each; the first one has the label."""
    works = [
        communicator.all_gather_into(output, input, None if index else label)
        for index, (output, input) in enumerate(zip(outputs, inputs, strict=True))
    ]
    return JoinedWork(works)


def in_runs(inputs: Sequence[Tensor], leased: Sequence[int], most: int) -> Iterator[slice]:
    """Group tensors to gather by calls whose slices are no latency alone, as far as one buffer has room for a call.

    leased: the bytes that each tensor takes of a buffer.  most: those of a buffer, which has room for each by itself.
    """
    start = nbytes = taken = 0
    for place, (input, needed) in enumerate(zip(inputs, leased, strict=True)):
        if place > start and (nbytes >= _LEAST_SLICE_BYTES or taken + needed > most):
            yield slice(start, place)
            start, nbytes, taken = place, 0, 0
        nbytes, taken = nbytes + input.nbytes, taken + needed
    yield slice(start, len(inputs))
