"""The job of processes that generate together: joining, leaving, and ending if one of them fails."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megazero.comm.faults.monitor import place_in_job
from megazero.comm.faults.shutdown import reported_faults
from megazero.comm.mesh import Mesh
from megazero.comm.metered import Meter
from megazero.comm.startup import destroy_process_groups, join, make_mesh
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology


@contextmanager
def joined(launch: Launch, layout: Topology, device: torch.device, *, timeout_minutes: float) -> Iterator[Mesh]:
    """Join the job and make the mesh of `layout`, within the block; a process alone makes no process group.

    A UserError that only some ranks meet within the block ends all of them, printed once (`comm/faults/shutdown.py`).
    """
    store = join(launch, backend="auto", device=device, timeout_minutes=timeout_minutes)
    meter = Meter()
    job = place_in_job(launch.rank, layout, limit_seconds=60 * timeout_minutes, folder=".", is_run=True)
    try:
        with reported_faults(store, meter.flight, job):
            # Nothing here is reduced and scattered, so no scratch memory is needed.
            scratch = FusedBuffers(0, device)
            limit = timeout_minutes
            yield make_mesh(
                layout, launch.rank, device, scratch, timeout_minutes=limit, meter=meter, nodes=launch.nodes
            )
    finally:
        destroy_process_groups()
