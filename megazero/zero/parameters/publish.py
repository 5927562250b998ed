"""Publishing: updated parameters are sent from the rank that owns them to every rank that stores them whole.

Each bucket is all-gathered in place as soon as its partition has been updated, while the next one is being updated;
neighbours in a section by one call, as far as a gather may move more than a bucket, once the last of them has been.
The step's end does not wait: a unit's gathers are waited for just before the unit's first use in the next forward.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from megazero.comm.interface import Communicator, Work, gather_together
from megazero.memory.copies import ARRIVED, Arrival
from megazero.timers import Timers
from megazero.zero.layout import Bucket, neighbours
from megazero.zero.plan import Placement
from megazero.zero.shards import Shards


class ParameterPublisher:
    """A sender of updated buckets, which waits by unit.  Without `by_gather` every owner broadcasts its partition."""

    def __init__(
        self, shards: Shards, communicator: Communicator, *, by_gather: bool, most_gathered: int, timers: Timers
    ) -> None:
        """most_gathered: the elements that one gather of several buckets moves at the most."""
        self._shards = shards
        self._communicator = communicator
        self._by_gather = by_gather
        self._timers = timers
        self._in_flight: dict[str, deque[Work | Arrival]] = {}
        self._updated: dict[int, Arrival] = {}  # by bucket: new values of partitions that no gather has followed yet
        self._most_gathered = most_gathered
        self._group_of = {
            bucket.index: group
            for section in shards.layout.sections
            for group in neighbours(section.buckets, most_gathered)
            for bucket in group
        }
        self._begun: dict[int, tuple[Bucket, Arrival]] = {}  # published buckets of which some neighbours are not yet
        self._owners_differ = shards.plan.optimizer.placement is Placement.PARTITIONED

    def publish(self, bucket: Bucket, arrival: Arrival) -> None:
        """Start sending a bucket whose owned range gets new values, unless its section is partitioned.

        arrival: that of the new values on the device.  `send_rest` must be called behind the last one.
        """
        section = self._shards.layout.sections[bucket.section]
        if section.partitioned:
            if arrival is not ARRIVED:
                self._updated[bucket.index] = arrival
                self._in_flight.setdefault(section.unit, deque()).append(arrival)
        elif self._owners_differ and self._by_gather:
            self._begun[bucket.index] = bucket, arrival
            group = self._group_of[bucket.index]
            if all(each.index in self._begun for each in group):
                self._gather(group)
        elif self._owners_differ:
            with self._timers.measure("params-publish"), arrival.ahead():
                works = self._broadcasts(bucket)
            self._in_flight.setdefault(section.unit, deque()).extend((arrival, *works))

    def send_rest(self) -> None:
        """Start sending the published buckets whose neighbours are not published."""
        if not self._begun:
            return
        begun = sorted((bucket for bucket, _ in self._begun.values()), key=lambda bucket: bucket.index)
        for group in neighbours(begun, self._most_gathered):
            self._gather(group)

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

    def _gather(self, group: Sequence[Bucket]) -> None:
        """Start to gather neighbouring buckets of a section together."""
        arrivals = [self._begun.pop(bucket.index)[1] for bucket in group]
        wholes = [self._shards.working(bucket, bucket.range) for bucket in group]
        owned = [self._shards.working(bucket, self._shards.owned(bucket)) for bucket in group]
        with self._timers.measure("params-publish"), ExitStack() as ahead:
            for arrival in arrivals:
                ahead.enter_context(arrival.ahead())
            work = gather_together(self._communicator, wholes, owned)
        unit = self._shards.layout.sections[group[0].section].unit
        self._in_flight.setdefault(unit, deque()).extend((*arrivals, work))

    def _broadcasts(self, bucket: Bucket) -> list[Work]:
        owners = range(self._communicator.size)
        return [
            self._communicator.broadcast(self._shards.working(bucket, bucket.partition(owner)), owner)
            for owner in owners
        ]
