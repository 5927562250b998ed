"""The processes that generate together: how they meet, part, and end if one of them cannot go on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megazero.comm.mesh import Mesh
from megazero.comm.shutdown import last_word
from megazero.comm.startup import join, leave, make_mesh
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology


@contextmanager
def joined(launch: Launch, layout: Topology, device: torch.device, *, timeout_minutes: float) -> Iterator[Mesh]:
    """The mesh of `layout`, within the block; a process alone makes no process group.

    A UserError that only some ranks meet within the block ends all of them, told once (`comm/shutdown.py`).
    """
    store = join(launch, backend="auto", device=device, timeout_minutes=timeout_minutes)
    try:
        with last_word(store, launch.rank):
            # Nothing here is reduced and scattered, so no scratch memory is lent.
            scratch = FusedBuffers(0, device)
            yield make_mesh(layout, launch.rank, device, scratch, timeout_minutes=timeout_minutes)
    finally:
        leave()
