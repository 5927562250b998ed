"""Joins the job and makes the mesh: the only place that stacks wrappers around process groups."""

import socket
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout

from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.comm.mesh import ACTIVATIONS, CONTROL, GATHERING, GRADIENTS, Mesh, channel_keys
from megazero.comm.metered import Meter, MeteredCommunicator
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.comm.rendezvous import open_store
from megazero.errors import Problem, TopologyError
from megazero.memory.lease import NO_SCRATCH, Scratch
from megazero.parallel.launch import Launch
from megazero.parallel.topology import AXES, ENDS, WORLD, Topology

_LONGER = "mend what keeps them apart, or wait longer by --distributed-join-timeout-minutes"


class Limits(NamedTuple):
    """The time limits of collectives, and of ranks that make a process group; None: the backend's, or the former."""

    collectives: timedelta | None
    joining: timedelta | None


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return this process's device for "auto", "cpu" or "cuda", and make it the current one.

    Raises TopologyError when there is no GPU, or a node runs more processes than it has.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise TopologyError(Problem("--device cuda", "PyTorch sees no GPU on this machine", "--device cpu"))
    if local_rank >= count:
        rule = "every process on a node needs a GPU of its own"
        legal = f"at most {count} processes a node, or --device cpu"
        raise TopologyError(Problem(f"local rank {local_rank} with {count} visible GPUs", rule, legal))
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def join(
    launch: Launch, *, backend: str, device: torch.device, timeout_minutes: float, join_minutes: float | None = None
) -> Store | None:
    """Make the default process group; return the store that all processes of the job share.

    backend is "auto" (nccl on CUDA, gloo elsewhere), "nccl" or "gloo".  A job of one process needs no group and has no
    store.  timeout_minutes: the limit of every collective.  join_minutes: how long processes wait for each other; by
    default the same.  Raises TopologyError when the backend doesn't fit the device, or the processes don't meet.
    """
    chosen = _choose_backend(backend, device)
    if launch.world_size == 1:
        return None
    joining = timedelta(minutes=timeout_minutes if join_minutes is None else join_minutes)
    store = open_store(launch, joining.total_seconds())
    try:
        dist.init_process_group(
            chosen,
            store=PrefixStore("default_pg", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=joining,
            device_id=device if chosen == "nccl" else None,
        )
    except RuntimeError as error:
        given = f"rank {launch.rank} on {socket.gethostname()}: {str(error).splitlines()[0]}"
        rule = f"all processes reach each other within {joining.total_seconds():g} s"
        raise TopologyError(Problem(given, rule, _LONGER)) from error
    _set_pg_timeout(timedelta(minutes=timeout_minutes), _default_group())
    return PrefixStore("megazero", store)


def _choose_backend(name: str, device: torch.device) -> str:
    fitting = {"cuda": "nccl", "cpu": "gloo"}[device.type]
    if name not in ("auto", fitting):
        rule = f"{name} doesn't move {device.type} memory, and this run's device is {device.type}"
        raise TopologyError(Problem(f"--distributed-backend {name}", rule, f"--distributed-backend {fitting}"))
    return fitting


def destroy_process_groups() -> None:
    """Destroy the process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_mesh(
    topology: Topology,
    rank: int,
    device: torch.device,
    scratch: Scratch,
    *,
    timeout_minutes: float | None = None,
    join_minutes: float | None = None,
    meter: Meter | None = None,
) -> Mesh:
    """Make a metered communicator per axis, a second data-parallel one for parameters, and the pipeline's channels.

    Where torch's default group carries no CPU tensors, as with NCCL, a group of all ranks over gloo is made for those.
    Every rank of the job must call this with the same topology.
    timeout_minutes: how long a collective may wait on an axis that has groups of its own, the same as for `join`
    (torch doesn't pass it on); None: the backend's default.  join_minutes: how long ranks may take to make the groups;
    by default the same.  meter: counts the traffic; by default one of the mesh's own.
    """
    limits = Limits(*(None if limit is None else timedelta(minutes=limit) for limit in (timeout_minutes, join_minutes)))
    meter = meter or Meter()
    communicators: dict[str, Communicator] = {}
    keys = {axis: axis for axis in (*AXES, ENDS, WORLD)} | {GATHERING: "dp"}
    for key, axis in (keys | dict.fromkeys(channel_keys(topology.pp), "pp")).items():
        inner = _communicator(topology, axis, rank, scratch, limits)
        communicators[key] = MeteredCommunicator(inner, axis, meter, key)
    if topology.world_size > 1 and not carries_cpu_tensors(_default_group()):
        group = dist.new_group(backend="gloo", timeout=limits.collectives, group_desc=f"megazero_{CONTROL}")
        communicators[CONTROL] = MeteredCommunicator(ProcessGroupCommunicator(group, NO_SCRATCH), WORLD, meter, CONTROL)
    mesh = Mesh(topology, rank, device, communicators, meter)
    _connect_stages(mesh)
    return mesh


def carries_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Return True if the group sends CPU tensors, as gloo does, alone or beside NCCL ("cpu:gloo,cuda:nccl")."""
    return "cpu" in (pair.partition(":")[0] for pair in dist.get_backend_config(group).split(","))


def _connect_stages(mesh: Mesh) -> None:
    """Send one message each way over every link: NCCL connects at the first message, for which both hosts wait.

    In the middle of a step they could wait for ever, since receives are posted before what their senders wait for.
    """
    stage, num_stages = mesh.coordinate("pp"), mesh.topology.pp
    message = torch.zeros(1, device=mesh.device)
    for link in range(num_stages if num_stages > 1 else 0):
        behind = (link + 1) % num_stages
        for key, source, target in ((ACTIVATIONS, link, behind), (GRADIENTS, behind, link)):
            if stage == source:
                mesh.channel(key, link=link).send(message, target).wait()
            elif stage == target:
                mesh.channel(key, link=link).receive_into(message, source).wait()
    mesh.meter.reset()


def _communicator(topology: Topology, axis: str, rank: int, scratch: Scratch, limits: Limits) -> Communicator:
    """Make all groups of the axis, in the same order on all ranks, as torch demands; return this rank's."""
    if topology.size(axis) == 1:
        return LocalCommunicator()
    if axis == WORLD:
        return ProcessGroupCommunicator(_default_group(), scratch)
    groups = [
        (
            ranks,
            dist.new_group(
                list(ranks), timeout=limits.joining or limits.collectives, group_desc=f"megazero_{axis}_{index}"
            ),
        )
        for index, ranks in enumerate(topology.groups(axis))
    ]
    mine = next((group for ranks, group in groups if rank in ranks), None)
    if mine is not None and limits.collectives is not None:
        _set_pg_timeout(limits.collectives, mine)
    return (
        LocalCommunicator() if mine is None else ProcessGroupCommunicator(mine, scratch)
    )  # None: a middle stage is in no group of ENDS


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "join() comes before make_mesh()"
    return group
