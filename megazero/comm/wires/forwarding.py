"""The base of communicators that do some collectives another way, and leave the others to the one they wrap."""

from collections.abc import Sequence

from torch import Tensor

from megazero.comm.interface import Communicator, ReduceKind, Work


class ForwardingCommunicator:
    """A communicator that has another one do everything."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.size = inner.size
        self.rank = inner.rank

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        return self._inner.all_gather_into(output, input, label)

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        return self._inner.all_gather_coalesced(outputs, inputs, label)

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        return self._inner.reduce_scatter_into(output, input, key)

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        return self._inner.reduce_scatter_coalesced(outputs, inputs, keys)

    def all_to_all_into(self, output: Tensor, input: Tensor) -> Work:
        return self._inner.all_to_all_into(output, input)

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return self._inner.all_reduce(tensor, kind)

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return self._inner.all_reduce_scalars(tensor, kind)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._inner.broadcast(tensor, source)

    def send(self, tensor: Tensor, to: int) -> Work:
        return self._inner.send(tensor, to)

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        return self._inner.receive_into(tensor, source)

    def barrier(self) -> None:
        self._inner.barrier()
