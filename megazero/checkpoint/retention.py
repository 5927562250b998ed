"""The checkpoints of a run that stay once a newer one is there."""

from collections.abc import Collection
from typing import NamedTuple


class Retention(NamedTuple):
    """The checkpoints of a run that stay.

    keep_last: so many of the newest; None: all, or with keep_every the newest.
    keep_every: besides, those of steps that are multiples of it.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    @property
    def lets_go(self) -> bool:
        """True if some checkpoint ever goes."""
        return self.keep_last is not None or self.keep_every is not None

    def expired(self, steps: Collection[int]) -> set[int]:
        """Return the steps whose checkpoints go, of all that there are; the newest is never among them."""
        if not self.lets_go:
            return set()
        older = sorted(steps)[: -(self.keep_last or 1)]
        return {step for step in older if self.keep_every is None or step % self.keep_every}


ALL_STAY = Retention()
