"""Makes the mesh of the processes that train together, from the argument `mesh` of `initialize`."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from megazero.comm.mesh import Mesh
from megazero.comm.monitor import place_in_job
from megazero.comm.shutdown import watch_program
from megazero.comm.startup import choose_device, join, make_mesh
from megazero.config.run import ParallelConfig
from megazero.library.adopted_mesh import adopt, adopt_default, is_joined, joined_device
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology

_WATCHED = ("gloo", "nccl")  # backends of real processes


def mesh_and_buffers(given: Any) -> tuple[Mesh, FusedBuffers]:
    """Return the mesh, and the buffers of its collectives, which are empty until the engine gives them a size.

    given: a Mesh, whose collectives have buffers of their own; the user's groups (`library/adopted_mesh.py`); or
    None: all processes of torch's default group or, if there is none, all that the launcher has started.
    """
    if given is None and not is_joined():
        return _join_others()
    if isinstance(given, Mesh):
        mesh, buffers = given, FusedBuffers(0, given.device)
    else:
        device = joined_device()
        buffers = FusedBuffers(0, device)
        mesh = adopt_default(device, buffers) if given is None else adopt(given, device, buffers)
    if is_joined() and dist.get_world_size() > 1 and dist.get_backend() in _WATCHED:
        world: Any = dist.group.WORLD
        limit: timedelta = world._get_backend(mesh.device).options._timeout
        _watch(mesh, _get_default_store(), limit.total_seconds())
    return mesh, buffers


def _join_others() -> tuple[Mesh, FusedBuffers]:
    launch = Launch.from_environment()
    device = choose_device("auto", launch.local_rank)
    buffers = FusedBuffers(0, device)
    parallel = ParallelConfig()
    minutes, joining = parallel.collective_limit_minutes, parallel.join_limit_minutes
    store = join(launch, backend="auto", device=device, timeout_minutes=minutes, join_minutes=joining)
    topology = Topology(dp=launch.world_size)
    mesh = make_mesh(topology, launch.rank, device, buffers, timeout_minutes=minutes, join_minutes=joining)
    if store is not None:
        _watch(mesh, store, 60 * minutes)
    return mesh, buffers


def _watch(mesh: Mesh, store: Store, limit_seconds: float) -> None:
    """Have the faults of the job's ranks reported; ranks are numbered as torch's default group numbers them."""
    topology = mesh.topology
    if (mesh.rank, topology.world_size) != (dist.get_rank(), dist.get_world_size()):
        topology = Topology(dp=dist.get_world_size())
    job = place_in_job(dist.get_rank(), topology, limit_seconds=limit_seconds, folder=".", is_run=False)
    watch_program(store, mesh.meter.flight, job)
