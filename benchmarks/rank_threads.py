"""Ranks as threads of one process: meshes of megazero whose communicators exchange tensors in memory.

    results = run_ranks(3, lambda mesh: ...)        # for each rank, the result or the exception that was raised

A collective blocks nothing before its `wait`, as with gloo.  No program hangs: a rank that waits for another that has
ended gets an error at once (`RankLeft`), and so do ranks that all wait for each other (`Deadlock`).
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megazero.comm.interface import (
    Communicator,
    CompletedWork,
    LabelMismatch,
    ReduceKind,
    Work,
    gather_in_turn,
    reduce_in_turn,
)
from megazero.comm.local import LocalCommunicator
from megazero.comm.mesh import GATHERING, Mesh
from megazero.comm.metered import Meter, MeteredCommunicator
from megazero.parallel.topology import AXES, ENDS, WORLD, Topology

LIMIT_SECONDS = 30.0
_SHARED = ("dp", WORLD, GATHERING)


class RankLeft(RuntimeError):
    """A rank waits for another one that has ended."""


class Deadlock(RuntimeError):
    """All ranks wait, each for a collective to which another one does not come."""


@dataclass
class _Meeting:
    """One collective: what each rank has brought, by rank, and how many ranks have taken the others' tensors."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    labels: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    num_taken: int = 0


class _World:
    """What the ranks share: the meetings of every communicator, and the ranks that have ended."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.meetings: dict[tuple[str, int], _Meeting] = {}
        self.ended: set[int] = set()
        self.waiting: dict[int, _Meeting] = {}

    def bring(self, key: tuple[str, int], rank: int, tensor: Tensor, label: tuple[str, int | None]) -> None:
        with self.changed:
            meeting = self.meetings.setdefault(key, _Meeting())
            meeting.tensors[rank], meeting.labels[rank] = tensor.detach().clone(), label
            self.changed.notify_all()

    def take(self, key: tuple[str, int], rank: int) -> list[Tensor]:
        """Wait until all ranks have come, and return their tensors by rank."""
        meeting = self.meetings[key]
        with self.changed:
            self.waiting[rank] = meeting
            self.changed.notify_all()
            in_time = self.changed.wait_for(lambda: self._is_over(meeting), LIMIT_SECONDS)
            missing = sorted(set(range(self.size)) - set(meeting.tensors))
            if missing:
                error = TimeoutError if not in_time else RankLeft if self.ended & set(missing) else Deadlock
                raise error(f"rank {rank} waits for rank {missing} at {meeting.labels[rank][0]}")
            del self.waiting[rank]
            meeting.num_taken += 1
            if meeting.num_taken == self.size:
                del self.meetings[key]
        _check_alike(meeting, rank)
        return [meeting.tensors[each] for each in range(self.size)]

    def _is_over(self, meeting: _Meeting) -> bool:
        """Return True if a meeting is complete, or will never be."""
        if len(meeting.tensors) == self.size or self.ended - set(meeting.tensors):
            return True
        stuck = {rank for rank, other in self.waiting.items() if len(other.tensors) < self.size}
        return len(stuck | self.ended) == self.size

    def leave(self, rank: int) -> None:
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()


def _check_alike(meeting: _Meeting, rank: int) -> None:
    """Raise an error if the ranks have met for different collectives, or for gathers of different units."""
    calls = {call for call, _ in meeting.labels.values()}
    if len(calls) > 1:
        raise AssertionError(f"ranks have met for different collectives: {sorted(calls)}")
    other = (rank - 1) % len(meeting.labels)
    mine, theirs = meeting.labels[rank][1], meeting.labels[other][1]
    if mine is not None and theirs is not None and mine != theirs:
        raise LabelMismatch(other, theirs, mine)


class _Pending:
    """A collective that has begun; finish: is given every rank's tensor, and writes the result."""

    def __init__(
        self, world: _World, key: tuple[str, int], rank: int, finish: Callable[[list[Tensor]], object]
    ) -> None:
        self._parts = (world, key, rank)
        self._finish: Callable[[list[Tensor]], object] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            world, key, rank = self._parts
            finish(world.take(key, rank))


class ThreadCommunicator:
    """The communicator of one rank on an axis of threads."""

    def __init__(self, rank: int, name: str, world: _World) -> None:
        self.rank, self.size = rank, world.size
        self._name, self._world, self._number = name, world, 0

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        def finish(everyone: list[Tensor]) -> None:
            output.detach().copy_(torch.cat([tensor.view(-1) for tensor in everyone]).view(output.shape))

        return self._begin("all_gather", input, finish, label)

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        return gather_in_turn(self, outputs, inputs, label)

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        def finish(everyone: list[Tensor]) -> None:
            output.detach().copy_(torch.stack(everyone).sum(0).view(self.size, -1)[self.rank].view(output.shape))

        return self._begin("reduce_scatter", input, finish)

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        return reduce_in_turn(self, outputs, inputs, keys)

    def all_to_all_into(self, output: Tensor, input: Tensor) -> Work:
        def finish(everyone: list[Tensor]) -> None:
            output.copy_(torch.cat([theirs.chunk(self.size)[self.rank] for theirs in everyone]))

        return self._begin("all_to_all", input, finish)

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        def finish(everyone: list[Tensor]) -> None:
            stacked = torch.stack(everyone)
            reduced = {"sum": lambda: stacked.sum(0), "max": lambda: stacked.amax(0), "min": lambda: stacked.amin(0)}
            tensor.detach().copy_(reduced[kind]())

        return self._begin(f"all_reduce {kind}", tensor, finish)

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return self.all_reduce(tensor, kind)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._begin(f"broadcast {source}", tensor, lambda everyone: tensor.detach().copy_(everyone[source]))

    def send(self, tensor: Tensor, to: int) -> Work:
        raise AssertionError("data-parallel ranks send nothing to each other")

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        raise AssertionError("data-parallel ranks receive nothing from each other")

    def barrier(self) -> None:
        self._begin("barrier", torch.zeros(1), lambda everyone: None).wait()

    def _begin(
        self, call: str, given: Tensor, finish: Callable[[list[Tensor]], object], label: int | None = None
    ) -> Work:
        if not given.numel():
            return CompletedWork()
        self._number += 1
        key = (self._name, self._number)
        self._world.bring(key, self.rank, given, (f"{call} of {given.numel()} {given.dtype}", label))
        return _Pending(self._world, key, self.rank, finish)


def _mesh(rank: int, world: _World) -> Mesh:
    """Return the mesh of one rank, all of which are data parallel."""
    meter = Meter()
    keys = {axis: axis for axis in (*AXES, ENDS, WORLD)} | {GATHERING: "dp"}
    communicators: dict[str, Communicator] = {
        key: MeteredCommunicator(
            ThreadCommunicator(rank, key, world) if key in _SHARED and world.size > 1 else LocalCommunicator(),
            axis,
            meter,
            key,
        )
        for key, axis in keys.items()
    }
    return Mesh(Topology(dp=world.size), rank, torch.device("cpu"), communicators, meter)


def run_ranks(size: int, action: Callable[[Mesh], Any]) -> Sequence[Any]:
    """Call action(mesh) on `size` threads; return for each rank the result, or the exception that was raised."""
    world = _World(size)

    def one(rank: int) -> Any:
        try:
            return action(_mesh(rank, world))
        except Exception as error:
            return error
        finally:
            world.leave(rank)

    if size == 1:
        return [one(0)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
