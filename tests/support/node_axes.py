"""An axis of several nodes in a test's worker: the communicators of its node, across nodes, and of the whole."""

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
from support.late_communicator import LateCommunicator

from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.comm.metered import Meter, MeteredCommunicator
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.memory.fused_buffers import FusedBuffers

BUFFER_BYTES = 1 << 16


class NodeAxes(NamedTuple):
    """The communicators of one rank, counted by `meter`, and the pool from which they lease."""

    inside: Communicator
    across: Communicator
    whole: Communicator
    meter: Meter
    pool: FusedBuffers
    late: tuple[LateCommunicator, ...]

    def check_finished(self) -> None:
        """Raise an error if a work has not been waited for, or a buffer is still leased."""
        assert not [work.name for axis in self.late for work in axis.unfinished]
        self.pool.resize(BUFFER_BYTES)


def node_axes(rank: int, num_nodes: int, per_node: int, *, is_late: bool = True, seed: int | None = None) -> NodeAxes:
    """Return the axes of a worker, whose works are late (`late_communicator.py`); all ranks must call this together."""
    pool, meter = FusedBuffers(BUFFER_BYTES, torch.device("cpu")), Meter()
    groups = _groups(rank, num_nodes, per_node)
    plain: list[Communicator] = [
        LocalCommunicator() if group is None else ProcessGroupCommunicator(group, pool) for group in groups
    ]
    late = tuple(LateCommunicator(axis, seed=seed) for axis in plain) if is_late else ()
    names = ("inside", "across", "whole")
    axes = [MeteredCommunicator(axis, name, meter) for axis, name in zip(late or plain, names, strict=True)]
    return NodeAxes(*axes, meter, pool, late)


@functools.cache
def _groups(rank: int, num_nodes: int, per_node: int) -> tuple[dist.ProcessGroup | None, ...]:
    """Return the groups of the node, across nodes and of all ranks; None for one of this rank alone."""
    everyone = torch.arange(num_nodes * per_node).view(num_nodes, per_node)
    found = []
    for rows in (everyone.tolist(), everyone.T.tolist(), [everyone.flatten().tolist()]):
        mine = None
        for row in rows:
            group = dist.new_group(row) if len(row) > 1 else None
            mine = group if rank in row else mine
        found.append(mine)
    return tuple(found)
