"""Makes the mesh of the processes that train together, from the argument `mesh` of `initialize`."""

from datetime import timedelta
from typing import Any

import torch

from megazero.comm.faults.monitor import place_in_job
from megazero.comm.faults.shutdown import watch_program
from megazero.comm.groups import Limits
from megazero.comm.mesh import Mesh
from megazero.comm.startup import choose_device, divide_data_axis, join, make_mesh
from megazero.comm.wires.shard_group import PLAIN
from megazero.config import derived
from megazero.config.engine_sections import LimitConfig, ZeroConfig
from megazero.errors import ConfigError, Problem, TopologyError, UsageError, raise_problems
from megazero.library.adopted.mesh import (
    DefaultGroup,
    adopt,
    adopt_default,
    default_group,
    is_joined,
    joined_device,
    launched_nodes,
)
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger_interface import AnyLedger
from megazero.parallel.data_axis import data_axis
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology
from megazero.rules.states import shard_groups_are_equal
from megazero.zero.plan import wires


def mesh_and_buffers(given: Any, limits: LimitConfig, ledger: AnyLedger) -> tuple[Mesh, FusedBuffers]:
    """Return the mesh, and the buffers of its collectives, which are empty until the engine gives them a size.

    limits: for the processes that join here; UsageError if they have joined already, with another limit.
    given: a Mesh, whose collectives have buffers of their own; the user's groups (`library/adopted/mesh.py`); or
    None: all processes of torch's default group or, if there is none, all that the launcher has started.
    ledger: counts the buffers.
    """
    if given is None and not is_joined():
        return _join_others(limits, ledger)
    if isinstance(given, Mesh):
        mesh, buffers = given, FusedBuffers(0, given.device, ledger=ledger)
    else:
        device = joined_device()
        buffers = FusedBuffers(0, device, ledger=ledger)
        mesh = adopt_default(device, buffers) if given is None else adopt(given, device, buffers)
    if (group := default_group(mesh.device)) is not None:
        _check_limit(limits, group)
        _watch(mesh, group)
    return mesh, buffers


def divided(mesh: Mesh, zero: ZeroConfig, buffers: FusedBuffers, limits: LimitConfig) -> Mesh:
    """Return the mesh with the shard groups and the wires that the configuration asks for; a collective call.

    Raises ConfigError if groups are not equal, and TopologyError if the mesh is not one of all the job's processes.
    """
    size = mesh.axis("dp").size
    raise_problems(ConfigError, shard_groups_are_equal(zero, size, lambda name: f"zero.{name}"))
    nodes = launched_nodes(mesh.topology.world_size)
    topology = data_axis(zero, mesh.topology, nodes)
    wanted = wires(zero)
    if size == 1 or (topology == mesh.topology and wanted == PLAIN):
        return mesh
    group = default_group(mesh.device)
    is_whole = group is not None and group.size == mesh.topology.world_size
    if not is_whole or mesh.topology.parts != Topology().parts or not _is_numbered_as_the_job(mesh):
        given = f"parts of the data-parallel axis, or wires, on {mesh.topology.describe()}"
        rule = (
            "they are made in a mesh of all processes that has none yet, and in which ranks of a tensor-parallel group"
            " are neighbours"
        )
        raise TopologyError(Problem(given, rule, "megazero.initialize without mesh, or the configuration without them"))
    minutes = timedelta(minutes=derived.collective_limit_minutes(limits))
    return divide_data_axis(mesh, topology, wanted, buffers, Limits(minutes, minutes), nodes)


def _is_numbered_as_the_job(mesh: Mesh) -> bool:
    """Return True on all ranks if each has the number in the mesh that it has in the job; a collective call.

    Nodes are runs of ranks of the job, so that only then neighbours of the mesh are neighbours on a node.
    """
    group = default_group(mesh.device)
    differs = torch.tensor([float(group is None or group.rank != mesh.rank)])
    mesh.control.all_reduce_scalars(differs, "max").wait()
    mesh.meter.reset()
    return not differs.item()


def _join_others(limits: LimitConfig, ledger: AnyLedger) -> tuple[Mesh, FusedBuffers]:
    launch = Launch.from_environment()
    device = choose_device("auto", launch)
    buffers = FusedBuffers(0, device, ledger=ledger)
    minutes, joining = derived.collective_limit_minutes(limits), derived.join_limit_minutes(limits)
    store = join(launch, backend="auto", device=device, timeout_minutes=minutes, join_minutes=joining)
    topology = Topology(dp=launch.world_size)
    mesh = make_mesh(
        topology, launch.rank, device, buffers, timeout_minutes=minutes, join_minutes=joining, nodes=launch.nodes
    )
    if store is not None:
        _watch(mesh, DefaultGroup(launch.rank, launch.world_size, store, 60 * minutes))
    return mesh, buffers


def _check_limit(limits: LimitConfig, group: DefaultGroup) -> None:
    """Raise UsageError if processes that have joined already are given another limit than they have."""
    wanted = 60 * derived.collective_limit_minutes(limits)
    if limits != LimitConfig() and wanted != group.limit_seconds:
        given = f"limits: {wanted:g} s for a collective, where the processes have joined with {group.limit_seconds:g} s"
        legal = "the same configuration for megazero.zero.Init, or init_process_group(timeout=...) of your program"
        raise UsageError(Problem(given, "processes get their time limit when they join", legal))


def _watch(mesh: Mesh, group: DefaultGroup) -> None:
    """Have the faults of the job's ranks reported; ranks are numbered as torch's default group numbers them."""
    topology = mesh.topology
    if (mesh.rank, topology.world_size) != (group.rank, group.size):
        topology = Topology(dp=group.size)
    job = place_in_job(group.rank, topology, limit_seconds=group.limit_seconds, folder=".", is_run=False)
    watch_program(group.store, mesh.meter.flight, job)
