"""Publishing: updated parameters are sent from the rank that owns them to every rank that stores them whole.

Each bucket is all-gathered in place as soon as its partition has been updated, while the next one is being updated.
The step's end does not wait: a unit's gathers are waited for just before the unit's first use in the next forward.
"""

from collections import deque

from megazero.comm.interface import Communicator, Work
from megazero.memory.copies import ARRIVED, Arrival
from megazero.timers import Timers
from megazero.zero.layout import Bucket
from megazero.zero.plan import Placement
from megazero.zero.shards import Shards


class ParameterPublisher:
    """A sender of updated buckets, which waits by unit.  Without `by_gather` every owner broadcasts its partition."""

    def __init__(self, shards: Shards, communicator: Communicator, *, by_gather: bool, timers: Timers) -> None:
        self._shards = shards
        self._communicator = communicator
        self._by_gather = by_gather
        self._timers = timers
        self._in_flight: dict[str, deque[Work | Arrival]] = {}
        self._updated: dict[int, Arrival] = {}  # by bucket: new values of partitions that no gather has followed yet
        self._owners_differ = shards.plan.optimizer.placement is Placement.PARTITIONED

    def publish(self, bucket: Bucket, arrival: Arrival) -> None:
        """Start sending a bucket whose owned range gets new values, unless its section is partitioned.

        arrival: that of the new values on the device.
        """
        section = self._shards.layout.sections[bucket.section]
        if section.partitioned:
            if arrival is not ARRIVED:
                self._updated[bucket.index] = arrival
                self._in_flight.setdefault(section.unit, deque()).append(arrival)
        elif self._owners_differ:
            with self._timers.measure("params-publish"), arrival.ahead():
                works = self._gather(bucket) if self._by_gather else self._broadcasts(bucket)
            self._in_flight.setdefault(section.unit, deque()).extend((arrival, *works))

    def take_updated(self, bucket: Bucket) -> Arrival:
        """Return the arrival that the next gather of a partitioned bucket must follow."""
        return self._updated.pop(bucket.index, ARRIVED)

    def ensure(self, unit: str) -> None:
        """Wait until the unit's parameters may be read."""
        if works := self._in_flight.pop(unit, None):
            with self._timers.measure("params-publish"):
                for work in works:
                    work.wait()

    def ensure_all(self) -> None:
        """Wait until every parameter may be read."""
        for unit in list(self._in_flight):
            self.ensure(unit)

    def _gather(self, bucket: Bucket) -> list[Work]:
        whole = self._shards.working(bucket, bucket.range)
        return [self._communicator.all_gather_into(whole, self._shards.working(bucket, self._shards.owned(bucket)))]

    def _broadcasts(self, bucket: Bucket) -> list[Work]:
        owners = range(self._communicator.size)
        return [
            self._communicator.broadcast(self._shards.working(bucket, bucket.partition(owner)), owner)
            for owner in owners
        ]
