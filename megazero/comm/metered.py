"""The meter of traffic: calls and bytes sent, by (axis, collective).

Bytes are those that one rank has to send when the algorithm is bandwidth-optimal, which ZeRO's formulas count (section
7): with n ranks and a whole tensor of N bytes, all-gather, reduce-scatter and all-to-all N (n-1)/n, all-reduce twice
that, broadcast and send N.  The backends used here send just that (gloo's ring all-reduce, the messages in
`process_group.py`, NCCL's rings), so one figure is both the formula's and the wire's.  Those that go to another node
are counted apart (`links.py`).  Copies of offloaded state between the device and host memory are counted beside them.

The same calls are written to the flight record, from which a fault is reported (`flight_record.py`).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from megazero.comm.faults.flight_record import Begun, FlightRecord
from megazero.comm.interface import Collective, Communicator, FileTransfer, HostTransfer, ReduceKind, Work
from megazero.comm.links import Links

_NBYTES: Callable[[Tensor], int] = attrgetter("nbytes")


@dataclass
class Count:
    """The calls of one collective on one axis, the bytes that this rank sent for them, and those to other nodes."""

    calls: int = 0
    nbytes: int = 0
    across: int = 0


class Meter:
    """The counts of one rank since the last `reset`.

    waited_seconds: the time that the host has waited for other ranks since the start, which is never reset.
    flight: the record of the rank's last collectives, which stays.
    """

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        self.flight = FlightRecord()
        self._counts: defaultdict[tuple[str, Collective | HostTransfer | FileTransfer], Count] = defaultdict(Count)

    def record(
        self, axis: str, collective: Collective | HostTransfer | FileTransfer, nbytes: int, across: int = 0
    ) -> None:
        """Count a call, its bytes, and how many of them go to other nodes."""
        count = self._counts[axis, collective]
        count.calls += 1
        count.nbytes += nbytes
        count.across += across

    def count(self, axis: str, collective: Collective | HostTransfer | FileTransfer) -> Count:
        """Return calls and bytes so far; zeros when there were none."""
        return self._counts.get((axis, collective), Count())

    def counts(self) -> dict[str, dict[str, Count]]:
        """Return {axis: {collective or copy: calls and bytes so far}}."""
        table: dict[str, dict[str, Count]] = {}
        for (axis, collective), count in sorted(self._counts.items()):
            table.setdefault(axis, {})[collective] = replace(count)
        return table

    def bytes_by_axis(self) -> dict[str, dict[str, int]]:
        """Return {axis: {collective: bytes}} of the collectives that were called."""
        table: dict[str, dict[str, int]] = {}
        for (axis, collective), count in sorted(self._counts.items()):
            table.setdefault(axis, {})[collective] = count.nbytes
        return table

    def bytes_across_nodes(self) -> dict[str, dict[str, int]]:
        """Return {axis: {collective: bytes}} of what went to other nodes, without what did not."""
        table: dict[str, dict[str, int]] = {}
        for (axis, collective), count in sorted(self._counts.items()):
            if count.across:
                table.setdefault(axis, {})[collective] = count.across
        return table

    def reset(self) -> None:
        self._counts.clear()

    def wait_for(self, axis: str, number: int, call: Callable[[], None]) -> None:
        """Wait for other ranks by a call, noted and timed as a collective is; its number is the same on all ranks."""
        begun = self.flight.begin(axis, "wait", number, 0)
        _NotedWork(_Call(call), begun, self).wait()

    def communicator(self, inner: Communicator, axis: str, key: str = "", links: Links | None = None) -> Communicator:
        """Return `inner` with its traffic recorded here; arguments: see `MeteredCommunicator`."""
        return MeteredCommunicator(inner, axis, self, key, links)


class MeteredCommunicator:
    """A communicator whose traffic is recorded by a meter, and by its flight record where there are other ranks.

    key: the name of this communicator in the flight record; by default that of its axis.  links: those that its
    messages take; None: all of them stay inside the node.
    """

    def __init__(self, inner: Communicator, axis: str, meter: Meter, key: str = "", links: Links | None = None) -> None:
        self._inner = inner
        self._axis = axis
        self._meter = meter
        self._key = key or axis
        self._links = links
        self._number = 0
        self.size = inner.size
        self.rank = inner.rank

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        begun = self._record("all_gather", output)
        return self._noted(begun, self._inner.all_gather_into(output, input, label))

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        begun = self._record("all_gather", *outputs)
        return self._noted(begun, self._inner.all_gather_coalesced(outputs, inputs, label))

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        begun = self._record("reduce_scatter", input)
        return self._noted(begun, self._inner.reduce_scatter_into(output, input, key))

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        begun = self._record("reduce_scatter", *inputs)
        return self._noted(begun, self._inner.reduce_scatter_coalesced(outputs, inputs, keys))

    def all_to_all_into(self, output: Tensor, input: Tensor) -> Work:
        begun = self._record("all_to_all", input)
        return self._noted(begun, self._inner.all_to_all_into(output, input))

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        begun = self._record("all_reduce", tensor)
        return self._noted(begun, self._inner.all_reduce(tensor, kind))

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        begun = self._record("scalars", tensor)
        return self._noted(begun, self._inner.all_reduce_scalars(tensor, kind))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        begun = self._record("broadcast", tensor)
        return self._noted(begun, self._inner.broadcast(tensor, source))

    def send(self, tensor: Tensor, to: int) -> Work:
        begun = self._record("send", tensor, to=to)
        return self._noted(begun, self._inner.send(tensor, to))

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        begun = self._begin("receive", tensor.nbytes)
        return self._noted(begun, self._inner.receive_into(tensor, source))

    def barrier(self) -> None:
        begun = self._begin("barrier", 0)
        if begun is None:
            self._inner.barrier()
        else:
            _NotedWork(_Call(self._inner.barrier), begun, self._meter).wait()

    def _record(self, collective: Collective, *wholes: Tensor, to: int | None = None) -> Begun | None:
        nbytes = sum(map(_NBYTES, wholes))
        sent = sent_bytes(collective, nbytes, self.size)
        across = 0 if self._links is None else self._links.across(collective, sent, to)
        self._meter.record(self._axis, collective, sent, across)
        return self._begin(collective, nbytes)

    def _begin(self, collective: str, nbytes: int) -> Begun | None:
        """Write to the flight record; return None where no other rank takes part."""
        if self.size == 1:
            return None
        self._number += 1
        return self._meter.flight.begin(self._key, collective, self._number, nbytes)

    def _noted(self, begun: Begun | None, work: Work) -> Work:
        return work if begun is None else _NotedWork(work, begun, self._meter)


class _NotedWork:
    """A work whose wait is noted in the flight record and timed."""

    __slots__ = ("_begun", "_meter", "_work")

    def __init__(self, work: Work, begun: Begun, meter: Meter) -> None:
        self._work = work
        self._begun = begun
        self._meter = meter

    def wait(self) -> None:
        flight, start = self._meter.flight, time.perf_counter()
        flight.waiting_since = start  # before `waiting`, which the monitor reads first
        flight.waiting = self._begun
        try:
            self._work.wait()
        except RuntimeError as error:
            flight.fail(self._begun, error)
            raise
        flight.waiting = None
        self._meter.waited_seconds += time.perf_counter() - start


class _Call(NamedTuple):
    """A call that blocks, as a work."""

    wait: Callable[[], None]


def sent_bytes(collective: Collective, nbytes: int, size: int) -> int:
    """Return the bytes that one of `size` ranks sends for a collective over a whole tensor of `nbytes`."""
    if collective in ("broadcast", "send"):
        return nbytes if size > 1 else 0
    share = nbytes * (size - 1) // size
    return share if collective in ("all_gather", "reduce_scatter", "all_to_all") else 2 * share
