"""Makes the mesh of the processes that train together, from the argument `mesh` of `initialize`."""

from typing import Any

from megazero.comm.mesh import Mesh
from megazero.comm.startup import choose_device, join, make_mesh
from megazero.config.run import ParallelConfig
from megazero.library.adopted_mesh import adopt, adopt_default, is_joined, joined_device
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology


def mesh_and_buffers(given: Any) -> tuple[Mesh, FusedBuffers]:
    """Return the mesh, and the buffers of its collectives, which are empty until the engine gives them a size.

    given: a Mesh, whose collectives have buffers of their own; the user's groups (`library/adopted_mesh.py`); or
    None: all processes of torch's default group or, if there is none, all that the launcher has started.
    """
    if isinstance(given, Mesh):
        return given, FusedBuffers(0, given.device)
    if given is None and not is_joined():
        return _join_others()
    device = joined_device()
    buffers = FusedBuffers(0, device)
    return (adopt_default(device, buffers) if given is None else adopt(given, device, buffers)), buffers


def _join_others() -> tuple[Mesh, FusedBuffers]:
    launch = Launch.from_environment()
    device = choose_device("auto", launch.local_rank)
    buffers = FusedBuffers(0, device)
    minutes = ParallelConfig().distributed_timeout_minutes
    join(launch, backend="auto", device=device, timeout_minutes=minutes)
    topology = Topology(dp=launch.world_size)
    return make_mesh(topology, launch.rank, device, buffers, timeout_minutes=minutes), buffers
