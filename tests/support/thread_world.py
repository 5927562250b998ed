"""Ranks as threads of one process, for tests of code that needs real ranks only for a few small collectives.

Their communicators are late (`late_communicator.py`): every work must be waited for.

results = run_threads(4, lambda world: world.rank)
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from support.late_communicator import LateCommunicator
from torch import Tensor

from megazero.comm.interface import CompletedWork, ReduceKind, Work, gather_in_turn, reduce_in_turn

_TIMEOUT_SECONDS = 30.0


class _Shared:
    def __init__(self, size: int) -> None:
        self.slots: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)


class ThreadCommunicator:
    """The communicator of one rank in a world of threads."""

    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = size
        self._shared = shared

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        output.copy_(torch.cat(self._exchange(input)))
        return CompletedWork()

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        return gather_in_turn(self, outputs, inputs, label)

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        output.copy_(torch.stack(self._exchange(input)).sum(0).chunk(self.size)[self.rank])
        return CompletedWork()

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        return reduce_in_turn(self, outputs, inputs, keys)

    def all_to_all_into(self, output: Tensor, input: Tensor) -> Work:
        output.copy_(torch.cat([theirs.chunk(self.size)[self.rank] for theirs in self._exchange(input)]))
        return CompletedWork()

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        everyone = torch.stack(self._exchange(tensor))
        reduced = {"sum": everyone.sum(0), "max": everyone.amax(0), "min": everyone.amin(0)}
        tensor.copy_(reduced[kind])
        return CompletedWork()

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return self.all_reduce(tensor, kind)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        tensor.copy_(self._exchange(tensor)[source])
        return CompletedWork()

    def barrier(self) -> None:
        self._shared.barrier.wait(_TIMEOUT_SECONDS)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._shared.slots[self.rank] = tensor.clone()
        self.barrier()
        everyone = list(self._shared.slots)
        self.barrier()
        return everyone


def run_threads(size: int, action: Callable[[LateCommunicator], Any]) -> list[Any]:
    """Call action(world) on `size` threads and return, for each rank, the result or the exception that was raised."""
    shared = _Shared(size)

    def one(rank: int) -> Any:
        world = LateCommunicator(ThreadCommunicator(rank, size, shared))
        try:
            result = action(world)
            assert not world.unfinished, f"never waited for: {', '.join(work.name for work in world.unfinished)}"
            return result
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
