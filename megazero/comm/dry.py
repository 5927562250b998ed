"""Process groups that send nothing, over which one rank of a job of any size runs alone, on tensors without values.

A dry group has the methods of torch's that communicators call.  A group of the kind "gloo" makes its collectives of
messages, as one over gloo does (`process_group.py`), so that what those need beside tensors is allocated here too.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch.distributed as dist

from megazero.comm.groups import Split
from megazero.comm.interface import CompletedWork
from megazero.comm.process_group import (
    ALL_GATHER,
    ALL_GATHER_COALESCED,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    REDUCE_SCATTER_COALESCED,
)

_DONE = CompletedWork()


class _DryGroup:
    """The part of a process group's interface that communicators use; every call has completed when it returns."""

    def __init__(self, size: int, rank: int, kind: str) -> None:
        self._size = size
        self._rank = rank
        self._kind = kind
        with_slices = ALL_GATHER, ALL_GATHER_COALESCED, REDUCE_SCATTER, REDUCE_SCATTER_COALESCED, ALL_TO_ALL
        for name in (*with_slices, "allreduce", "broadcast", "send", "recv", "barrier"):
            setattr(self, name, _Held if kind == "gloo" else _complete)

    def name(self) -> str:
        return self._kind

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class _Held(CompletedWork):
    """A work of gloo's, which holds the tensors of its message as long as it lives itself."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments


def _complete(*arguments: Any) -> CompletedWork:
    """Return a work that has completed."""
    return _DONE


def dry_group(ranks: Sequence[int], rank: int, kind: str) -> dist.ProcessGroup:
    """Return the group of these ranks on one of them; kind: "gloo" or "nccl"."""
    return cast("dist.ProcessGroup", _DryGroup(len(ranks), ranks.index(rank), kind))


def dry_groups(planned: Iterable[Split], rank: int, kind: str) -> dict[str, dist.ProcessGroup | None]:
    """Return a rank's groups of the splits by key, None where it is in no group of the split."""
    made: dict[str, dist.ProcessGroup | None] = {}
    for split in planned:
        colour = split.colour_of(rank)
        made[split.key] = None if colour is None else dry_group(split.groups[colour], rank, kind)
    return made
