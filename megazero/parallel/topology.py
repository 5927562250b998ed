"""Who is who: parallel degrees to coordinates to ranks.

An *axis* is a direction of the mesh of processes: `pp` (pipeline stages), `dp` (data parallel, the axis ZeRO
partitions over) and `tp` (tensor parallel).  Ranks are laid out with `tp` innermost, so that the ranks that talk most
are neighbours on one node:

    rank = (pp_index * dp + dp_index) * tp + tp_index        e.g. dp 2, tp 2:   dp 0: [0 1]   dp 1: [2 3]

Nothing here knows a process group; 1,024 ranks cost the same as one.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

AXES = ("pp", "dp", "tp")  # outermost first
WORLD = "world"  # the pseudo-axis that holds every rank


@dataclass(frozen=True)
class Topology:
    """Degrees of every axis; their product is the world size."""

    tp: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def size(self, axis: str) -> int:
        """Number of ranks along `axis` ("pp", "dp", "tp" or "world")."""
        return self.world_size if axis == WORLD else {"pp": self.pp, "dp": self.dp, "tp": self.tp}[axis]

    def coordinate(self, rank: int, axis: str) -> int:
        """Where `rank` sits along `axis`."""
        if axis == WORLD:
            return rank
        inner = math.prod(self.size(name) for name in AXES[AXES.index(axis) + 1 :])
        return rank // inner % self.size(axis)

    def rank_of(self, *, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates."""
        return (pp * self.dp + dp) * self.tp + tp

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ along `axis` only, in rank order."""
        if axis == WORLD:
            return (tuple(range(self.world_size)),)
        others = [range(self.size(name)) for name in AXES if name != axis]
        return tuple(self._line(axis, fixed) for fixed in itertools.product(*others))

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """The group along `axis` that `rank` belongs to."""
        return next(group for group in self.groups(axis) if rank in group)

    def describe(self) -> str:
        """`pipeline 1 x data 2 x tensor 2 = 4 ranks`."""
        return f"pipeline {self.pp} x data {self.dp} x tensor {self.tp} = {self.world_size} ranks"

    def _line(self, axis: str, fixed: Sequence[int]) -> tuple[int, ...]:
        coordinates = dict(zip((name for name in AXES if name != axis), fixed, strict=True))
        return tuple(self.rank_of(**{**coordinates, axis: index}) for index in range(self.size(axis)))
