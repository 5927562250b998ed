"""The one interface through which bytes move between ranks.

A *communicator* belongs to one axis of the mesh; `rank` and `size` are positions on that axis, not in the world.
Every collective returns a `Work`: the result may be read after `wait()`.  Tensors must be dense (gloo sums only the
first numel places of a strided one, without an error), and equal in size on all ranks.
"""

from typing import Literal, Protocol

from torch import Tensor

ReduceKind = Literal["sum", "max", "min"]
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "scalars", "send"]


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when the result may be read (on CUDA: by work queued on the current stream from here on)."""


class Communicator(Protocol):
    """Collectives over the ranks of one axis."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_gather_into(self, output: Tensor, input: Tensor) -> Work:
        """output [size * n] = every rank's input [n], in rank order; input may be this rank's slice of output."""

    def reduce_scatter_into(self, output: Tensor, input: Tensor) -> Work:
        """output [n] = this rank's slice of the sum over ranks of input [size * n]; output may alias that slice."""

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        """tensor = reduction over ranks, in place."""

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        """The same for a handful of figures (norm, loss, flags), which traffic counts list apart."""

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """tensor = the tensor of rank `source` of this axis, in place."""

    def send(self, tensor: Tensor, to: int) -> Work:
        """Give `tensor` to rank `to` of this axis; after `wait()` it may be written to."""

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        """tensor = what rank `source` of this axis sends next; messages between two ranks keep their order."""

    def barrier(self) -> None:
        """Return when every rank of the axis has come here."""


class Done:
    """A Work that needs no waiting."""

    def wait(self) -> None:
        return None
