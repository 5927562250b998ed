"""Publishing: updated parameters travel from the rank that owns them to every rank that computes with them.

Each bucket is all-gathered in place as soon as its partition has been updated, while the next one is being updated.
Nobody waits at the step's end: a unit's gathers are waited for just before the unit's first use in the next forward.
"""

from collections import deque

from megazero.comm.interface import Communicator, Work
from megazero.zero.layout import Bucket
from megazero.zero.plan import Placement
from megazero.zero.shards import Shards


class ParameterGather:
    """All-gathers in flight, by unit."""

    def __init__(self, shards: Shards, communicator: Communicator) -> None:
        self._shards = shards
        self._communicator = communicator
        self._in_flight: dict[str, deque[Work]] = {}
        self._is_needed = shards.plan.optimizer.placement is Placement.PARTITIONED

    def publish(self, bucket: Bucket) -> None:
        """Start gathering a bucket whose owned range has new values."""
        if not self._is_needed:
            return
        whole = self._shards.working(bucket, bucket.range)
        work = self._communicator.all_gather_into(whole, self._shards.working(bucket, self._shards.owned(bucket)))
        unit = self._shards.layout.sections[bucket.section].unit
        self._in_flight.setdefault(unit, deque()).append(work)

    def ensure(self, unit: str) -> None:
        """Return when the unit's parameters may be read."""
        for work in self._in_flight.pop(unit, ()):
            work.wait()

    def ensure_all(self) -> None:
        """Return when every parameter may be read."""
        for unit in list(self._in_flight):
            self.ensure(unit)
