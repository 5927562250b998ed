"""The topology: parallel degrees, coordinates and ranks.

An *axis* is a direction of the mesh of processes: `pp` (pipeline stages), `dp` (data parallel, the axis ZeRO
partitions over) and `tp` (tensor parallel).  The *rank order* lists them, outermost first; ranks along the last one are
neighbours.  By default that is `tp`, so that the ranks that communicate most are on one node:

    rank = (pp_index * dp + dp_index) * tp + tp_index        e.g. dp 2, tp 2:   dp 0: [0 1]   dp 1: [2 3]

ZeRO may partition over a part of `dp` only (MiCS, arXiv 2205.00119): neighbours along `dp` form *shard groups*, each of
which holds one *replica* of the model states.

    dp_index = replica * shards + shard                      e.g. 2 replicas of dp 4:   [0 1]   [2 3]

A shard group is divided once more, for what travels over fast links and over slow ones: neighbours that are *inside* a
node, and the ranks *across* nodes that have the same place in theirs; and neighbours that hold *secondary* partitions
(ZeRO++, arXiv 2306.10209, section 3.2).

No process group is needed here; 1,024 ranks cost the same as one.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.units import counted

AXES = ("pp", "dp", "tp")  # outermost first
WORLD = "world"  # the pseudo-axis that holds every rank
ENDS = "ends"  # the pseudo-axis of the first and the last pipeline stage, which share a tied embedding
SHARDS = "dp_shard"  # the pseudo-axis of a shard group, a part of dp over which ZeRO partitions
REPLICAS = "dp_replica"  # the pseudo-axis of the ranks of dp that hold the same partitions
INSIDE = "dp_inside"  # the pseudo-axis of the ranks of a shard group that are on one node
ACROSS = "dp_across"  # the pseudo-axis of its ranks that have the same place on different nodes
SECONDARY = "dp_secondary"  # the pseudo-axis of its ranks over which parameters are partitioned a second time
# {pseudo-axis of neighbours: that of the ranks with the same place among their neighbours}
_STRIDES = MappingProxyType({SHARDS: REPLICAS, INSIDE: ACROSS, SECONDARY: ""})
# {pseudo-axis: the axis that it divides}
_PARENTS = MappingProxyType({SHARDS: "dp", REPLICAS: "dp", INSIDE: SHARDS, ACROSS: SHARDS, SECONDARY: SHARDS})


@dataclass(frozen=True)
class Topology:
    """The degree of every axis, whose product is the world size, and the rank order, outermost axis first.

    replicas: the number of shard groups along dp, a divisor of it.  inside, secondary: the sizes of the pseudo-axes of
    these names, divisors of a shard group's.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    order: tuple[str, ...] = AXES
    replicas: int = 1
    inside: int = 1
    secondary: int = 1

    def __post_init__(self) -> None:
        assert self.dp % self.replicas == 0, f"{self.dp} ranks in {self.replicas} shard groups"
        shards = self.dp // self.replicas
        assert shards % self.inside == shards % self.secondary == 0, f"{self.inside} and {self.secondary} of {shards}"
        assert sorted(self.order) == sorted(AXES), f"every axis once: {self.order}"

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def parts(self) -> tuple[int, int, int]:
        """The numbers that divide the data-parallel axis: all 1 where it is one whole."""
        return self.replicas, self.inside, self.secondary

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis or pseudo-axis; along "ends" 2 where there are several stages."""
        if axis in AXES:
            degree: int = getattr(self, axis)
            return degree
        shards, sizes = self.dp // self.replicas, {WORLD: self.world_size, ENDS: min(self.pp, 2)}
        sizes |= {SHARDS: shards, REPLICAS: self.replicas, INSIDE: self.inside, ACROSS: shards // self.inside}
        return sizes[axis] if axis != SECONDARY else self.secondary

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the coordinate of `rank` along `axis`; along "ends", 1 on the last of several stages, else 0."""
        if axis == WORLD:
            return rank
        if axis == ENDS:
            return int(0 < self.coordinate(rank, "pp") == self.pp - 1)
        if axis in _PARENTS:
            neighbours = next(name for name, strided in _STRIDES.items() if axis in (name, strided))
            of_parent = self.coordinate(rank, _PARENTS[axis])
            return of_parent % self.size(neighbours) if axis == neighbours else of_parent // self.size(neighbours)
        return rank // self._stride(axis) % self.size(axis)

    def rank_of(self, *, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates."""
        place, rank = {"pp": pp, "dp": dp, "tp": tp}, 0
        for axis in self.order:
            rank = rank * self.size(axis) + place[axis]
        return rank

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks that differ along `axis` only, by their first rank, each in order of coordinates.

        Groups of "ends" are pairs, and pipeline stages between the two are in none; all other axes have every rank.
        """
        if axis == WORLD:
            return (tuple(range(self.world_size)),)
        if axis == ENDS:
            return tuple(group if self.pp == 1 else (group[0], group[-1]) for group in self.groups("pp"))
        if axis in _PARENTS:
            return tuple(part for group in self.groups(_PARENTS[axis]) for part in self._parts(group, axis))
        others = [name for name in self.order if name != axis]
        fixed = itertools.product(*(range(self.size(name)) for name in others))
        return tuple(self._line(axis, dict(zip(others, place, strict=True))) for place in fixed)

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the group of `rank` along `axis`; a rank that is in none is alone."""
        if axis == WORLD:
            return tuple(range(self.world_size))
        if axis == ENDS:
            stages = self.group_of(rank, "pp")
            return (stages[0], stages[-1]) if len(stages) > 1 and rank in (stages[0], stages[-1]) else (rank,)
        if axis in _PARENTS:
            return next(part for part in self._parts(self.group_of(rank, _PARENTS[axis]), axis) if rank in part)
        return self._line(axis, {name: self.coordinate(rank, name) for name in AXES})

    def describe(self) -> str:
        """Return the degrees as text: `pipeline 1 x data 2 x tensor 2 = 4 ranks`."""
        data = f"data {self.dp}" if self.replicas == 1 else f"data {self.dp} ({self.replicas} replicas)"
        return f"pipeline {self.pp} x {data} x tensor {self.tp} = {counted(self.world_size, 'rank')}"

    def _parts(self, group: tuple[int, ...], axis: str) -> list[tuple[int, ...]]:
        """Return the parts of a group, neighbours or ranks with the same place among theirs."""
        neighbours = next(name for name, strided in _STRIDES.items() if axis in (name, strided))
        size = self.size(neighbours)
        if axis == neighbours:
            return [group[start : start + size] for start in range(0, len(group), size)]
        return [group[place::size] for place in range(size)]

    def _line(self, axis: str, place: Mapping[str, int]) -> tuple[int, ...]:
        first, stride = self.rank_of(**{**place, axis: 0}), self._stride(axis)
        return tuple(range(first, first + self.size(axis) * stride, stride))

    def _stride(self, axis: str) -> int:
        """Return the distance of two ranks that are neighbours along an axis."""
        return math.prod(self.size(name) for name in self.order[self.order.index(axis) + 1 :])


def parse_order(text: str) -> tuple[str, ...]:
    """Parse the rank order as a configuration writes it, "pp-dp-tp", into axes, outermost first."""
    return tuple(text.split("-"))
