"""Collectives of several hops: the collectives of a hop begin when those of the hop before have ended.

A call begins its first hop at once.  The hops behind it begin

    at its `wait`, after those of all earlier calls;
    or before the next call that shares these `Hops`, which first waits for the hops before them.

So a reduction's slow last hop runs beside whatever comes after the next call, as backward does between buckets, and not
only when something waits for it.  A gather that follows gathers is the exception: a gather's first hop is the slow one,
and the next gather would wait for it instead of running beside it.

*Order*: all calls begin in one order on all ranks, as collectives do, and each of the communicators underneath has the
hops of one call after all hops of the calls before, whenever a rank waits and in whichever order.  So ranks meet in the
same hop always, and results do not depend on time.

*Waits*: a wait between two hops blocks the host on gloo; on CUDA the current stream waits, and the host goes on.  Every
work must be waited for: the last hops of a call that is not, and that no call follows, would never begin, and the
memory that it has leased is released at the wait.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from megazero.comm.interface import LabelMismatch, Work


class Hops:
    """The calls whose hops have not all begun, of communicators that share communicators underneath."""

    def __init__(self) -> None:
        self._open: deque[_HoppedWork] = deque()  # the oldest first

    def begin(self, hops: Iterator[Sequence[Work]], number: int, *, is_gather: bool = False) -> Work:
        """Begin the first hop of a call.

        hops: begins the next hop, and gives its works, each time it is advanced, `number` times, and what it does after
        that ends the call.  is_gather: the first hop of the call is its slow one.
        """
        if not (is_gather and all(work.is_gather for work in self._open)):
            self._begin_all(None)
        work = _HoppedWork(self, hops, number, is_gather)
        if number > 1:
            self._open.append(work)
        return work

    def begin_until(self, work: "_HoppedWork") -> None:
        """Begin every hop of this call, and before that those of all earlier ones."""
        if work in self._open:
            self._begin_all(work)

    def _begin_all(self, last: "_HoppedWork | None") -> None:
        begun = None
        while self._open and (last is None or begun is not last):
            begun = self._open.popleft()
            begun.begin_all()


class _HoppedWork:
    """A call of several hops, the first of which has begun."""

    def __init__(self, owner: Hops, hops: Iterator[Sequence[Work]], number: int, is_gather: bool) -> None:
        self.is_gather = is_gather
        self._owner = owner
        self._hops = hops
        self._number_left = number - 1
        self._mismatch: LabelMismatch | None = None
        self._works: Sequence[Work] = next(hops)
        self._is_complete = False

    def begin_all(self) -> None:
        while self._number_left:
            self._wait_for_hop()
            self._works = next(self._hops)
            self._number_left -= 1

    def wait(self) -> None:
        if self._is_complete:
            return
        self._owner.begin_until(self)
        self._wait_for_hop()
        self._is_complete, self._works = True, ()
        if self._mismatch is not None:
            raise self._mismatch  # and its messages may still be on their way to the memory that it has leased
        next(self._hops, None)

    def _wait_for_hop(self) -> None:
        """Wait for the hop under way; a mismatch is raised at the end, or ranks that see none would wait for ever."""
        for work in self._works:
            try:
                work.wait()
            except LabelMismatch as error:
                self._mismatch = self._mismatch or error
