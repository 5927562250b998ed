"""The order in which units are used, recorded in one pass and looked up in the next.  Pure: names and numbers.

A *use* is a unit being needed: its module's forward, a parameter read outside its module, its backward.  A *pass* is a
forward and its backward (or a forward without one).  The record shows which unit to gather ahead of its use, and how
far away a unit's next use is, which decides whether the unit is retained; `gather.py` prefetches by it.

    recorded   embed  b0  b1  head  head  b1  b0
    now                   ^
    upcoming                  head  head  b1  b0
    distance of b1: two uses of head away
    room of b1 until then: that of b1 and head

When a pass leaves the recorded order (a branch, a skipped layer, another number of calls), the rest of it is unknown,
nothing is gathered ahead, and its own order is the record of the next.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

# The most uses of a pass that are recorded.  Only forwards whose backwards never come have more.
_MOST_USES = 100_000


class UseOrder:
    """The record of one kind of pass; `numel`: elements of each unit."""

    def __init__(self, numel: Mapping[str, int]) -> None:
        self._numel = numel
        self._now: list[str] = []
        self._place = 0  # of the next use in the record; its end, once the pass has left it
        self._set_record([])

    def use(self, unit: str) -> None:
        """Record that the unit is used now."""
        follows = self._place < self._end and self._recorded[self._place] == unit
        self._place = self._place + 1 if follows else self._end
        self._now.append(unit)
        if len(self._now) > _MOST_USES:
            self._now, self._place = [], self._end

    @property
    def is_left(self) -> bool:
        """True where no use is known to be ahead: this pass has left the record, or has come to its end."""
        return self._place == self._end

    def upcoming(self) -> Iterator[str]:
        """Return the units by their next uses, in order, as far as they are recorded; a unit may come several times."""
        return map(self._recorded.__getitem__, range(self._place, self._end))

    def distance(self, unit: str) -> int | None:
        """Return the elements of other units used before this one's next use; None when no next use is recorded."""
        places = self._places.get(unit, [])
        nearest = bisect_left(places, self._place)
        if nearest == len(places):
            return None
        return self._elements_before[places[nearest]] - self._elements_before[self._place]

    def fits(self, unit: str, numel: int) -> bool:
        """Return True if `numel` elements are room for the unit until its next use.

        They are if it, this use's unit and all that are used until then, each counted once, have no more.
        """
        counted = set(self._now[-1:])
        left = numel - sum(self._numel[name] for name in counted)
        for name in self.upcoming():
            left -= 0 if name in counted else self._numel[name]
            if left < 0 or name == unit:
                return left >= 0
            counted.add(name)
        return False

    def end_pass(self) -> None:
        """Make the uses of this pass the record of the next."""
        if self._now and self._now != self._recorded:
            self._set_record(self._now)
        self.reset_pass()

    def reset_pass(self) -> None:
        """Forget the uses of this pass: the record stays."""
        self._now = []
        self._place = 0

    def _set_record(self, order: list[str]) -> None:
        self._recorded, self._end = order, len(order)
        self._elements_before = list(accumulate((self._numel[unit] for unit in order), initial=0))
        self._places: dict[str, list[int]] = {}
        for place, unit in enumerate(order):
            self._places.setdefault(unit, []).append(place)
