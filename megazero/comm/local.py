"""The communicator of an axis with one rank: every collective copies its input or does nothing."""

from collections.abc import Sequence

from torch import Tensor

from megazero.comm.interface import CompletedWork, ReduceKind, Work, gather_in_turn, reduce_in_turn


class LocalCommunicator:
    """A communicator for the only rank of an axis, so that world size 1 takes the same path as any other."""

    size = 1
    rank = 0

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        return _copy(output, input)

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        return gather_in_turn(self, outputs, inputs, label)

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        return _copy(output, input)

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        return reduce_in_turn(self, outputs, inputs, keys)

    def all_to_all_into(self, output: Tensor, input: Tensor) -> Work:
        return _copy(output, input)

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return CompletedWork()

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return CompletedWork()

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return CompletedWork()

    def send(self, tensor: Tensor, to: int) -> Work:
        raise AssertionError("an axis of one rank has no other rank to send to")

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        raise AssertionError("an axis of one rank has no other rank to receive from")

    def barrier(self) -> None:
        return None


def _copy(output: Tensor, input: Tensor) -> Work:
    # Compared by storage and offset, since meta tensors have no address.
    is_same = (output.untyped_storage()._cdata, output.storage_offset()) == (
        input.untyped_storage()._cdata,
        input.storage_offset(),
    )
    if not is_same:
        output.copy_(input)
    return CompletedWork()
