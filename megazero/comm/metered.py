"""The meter of traffic: calls and bytes sent, by (axis, collective).

Bytes are those that one rank has to send when the algorithm is bandwidth-optimal, which ZeRO's formulas count (section
7): with n ranks and a whole tensor of N bytes, all-gather and reduce-scatter N (n-1)/n, all-reduce twice that,
broadcast and send N.  The backends used here send just that (gloo's ring all-reduce, the messages in
`process_group.py`, NCCL's rings), so one figure is both the formula's and the wire's.
"""

import time
from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor

from megazero.comm.interface import Collective, Communicator, ReduceKind, Work


@dataclass
class Count:
    """The calls of one collective on one axis, and the bytes that this rank sent for them."""

    calls: int = 0
    nbytes: int = 0


class Meter:
    """The counts of one rank since the last `reset`.

    waited_seconds: the time that the host has waited for other ranks since the start, which is never reset.
    """

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        self._counts: defaultdict[tuple[str, Collective], Count] = defaultdict(Count)

    def record(self, axis: str, collective: Collective, nbytes: int) -> None:
        count = self._counts[axis, collective]
        count.calls += 1
        count.nbytes += nbytes

    def count(self, axis: str, collective: Collective) -> Count:
        """Return calls and bytes so far; zeros when there were none."""
        return self._counts.get((axis, collective), Count())

    def bytes_by_axis(self) -> dict[str, dict[str, int]]:
        """Return {axis: {collective: bytes}} of the collectives that were called."""
        table: dict[str, dict[str, int]] = {}
        for (axis, collective), count in sorted(self._counts.items()):
            table.setdefault(axis, {})[collective] = count.nbytes
        return table

    def reset(self) -> None:
        self._counts.clear()


class MeteredCommunicator:
    """A communicator whose traffic is recorded by a meter."""

    def __init__(self, inner: Communicator, axis: str, meter: Meter) -> None:
        self._inner = inner
        self._axis = axis
        self._meter = meter
        self.size = inner.size
        self.rank = inner.rank

    def all_gather_into(self, output: Tensor, input: Tensor) -> Work:
        self._record("all_gather", output)
        return self._timed(self._inner.all_gather_into(output, input))

    def reduce_scatter_into(self, output: Tensor, input: Tensor) -> Work:
        self._record("reduce_scatter", input)
        return self._timed(self._inner.reduce_scatter_into(output, input))

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        self._record("all_reduce", tensor)
        return self._timed(self._inner.all_reduce(tensor, kind))

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        self._record("scalars", tensor)
        return self._timed(self._inner.all_reduce_scalars(tensor, kind))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        self._record("broadcast", tensor)
        return self._timed(self._inner.broadcast(tensor, source))

    def send(self, tensor: Tensor, to: int) -> Work:
        self._record("send", tensor)
        return self._timed(self._inner.send(tensor, to))

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        return self._timed(self._inner.receive_into(tensor, source))

    def barrier(self) -> None:
        self._inner.barrier()

    def _timed(self, work: Work) -> Work:
        return work if self.size == 1 else _TimedWork(work, self._meter)

    def _record(self, collective: Collective, whole: Tensor) -> None:
        nbytes = whole.numel() * whole.element_size()
        self._meter.record(self._axis, collective, sent_bytes(collective, nbytes, self.size))


class _TimedWork:
    """A work whose wait a meter times."""

    __slots__ = ("_meter", "_work")

    def __init__(self, work: Work, meter: Meter) -> None:
        self._work = work
        self._meter = meter

    def wait(self) -> None:
        start = time.perf_counter()
        self._work.wait()
        self._meter.waited_seconds += time.perf_counter() - start


def sent_bytes(collective: Collective, nbytes: int, size: int) -> int:
    """Return the bytes that one of `size` ranks sends for a collective over a whole tensor of `nbytes`."""
    if collective in ("broadcast", "send"):
        return nbytes if size > 1 else 0
    share = nbytes * (size - 1) // size
    return share if collective in ("all_gather", "reduce_scatter") else 2 * share
