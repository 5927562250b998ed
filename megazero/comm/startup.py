"""Joins the job and makes the mesh: the only place that stacks wrappers around process groups."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout

from megazero.comm.dry import dry_group, dry_groups
from megazero.comm.gpu_environment import defaults_line, missing_defaults
from megazero.comm.groups import Limits, Split, gloo_maker, make_groups, shard_keys, split_keys, splits
from megazero.comm.interface import Communicator
from megazero.comm.links import Links
from megazero.comm.local import LocalCommunicator
from megazero.comm.mesh import (
    ACROSS_GATHERING,
    ACTIVATIONS,
    CONTROL,
    GATHERING,
    GRADIENTS,
    INSIDE_GATHERING,
    SHARD_GATHERING,
    Mesh,
    channel_keys,
    gather_json,
)
from megazero.comm.metered import Meter
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.comm.rendezvous import check_backend, claim_gpu, open_store
from megazero.comm.shared_memory import NO_MEMORY, NodeMemory, share_memory
from megazero.comm.wires.hop_choice import choose_hops
from megazero.comm.wires.shard_group import PLAIN, Wires, stack
from megazero.console import Console
from megazero.errors import Problem, TopologyError
from megazero.memory.lease import NO_SCRATCH, Scratch
from megazero.parallel.launch import Launch
from megazero.parallel.nodes import Nodes
from megazero.parallel.threads import share_of_cores
from megazero.parallel.topology import ACROSS, AXES, ENDS, INSIDE, REPLICAS, SECONDARY, SHARDS, WORLD, Topology

_LONGER = "mend what keeps them apart, or wait longer by --distributed-join-timeout-minutes"


def choose_device(name: str, launch: Launch) -> torch.device:
    """Return this process's device for "auto", "cpu" or "cuda", and make it the current one.

    Sets the defaults of CUDA's and NCCL's variables, which CUDA reads at its start; rank 0 prints them.
    Raises TopologyError when there is no GPU, a node runs more processes than it has, or this one cannot start there.
    """
    if name == "cpu":
        return torch.device("cpu")
    defaults = missing_defaults(os.environ, share_of_cores(launch, os.environ)) if torch.version.cuda else {}
    os.environ.update(defaults)
    if name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    index = gpu_index(launch.local_rank, torch.cuda.device_count(), os.environ)
    if defaults:
        Console(launch.rank).line(defaults_line(defaults))
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
    except torch.AcceleratorError as error:
        reason = f"{error}".splitlines()[0]
        legal = "a GPU with room for another process; nvidia-smi lists those that it runs"
        raise TopologyError(Problem(f"GPU {index}", f"this process starts on it ({reason})", legal)) from error
    return device


def gpu_index(local_rank: int, count: int, environment: Mapping[str, str]) -> int:
    """Return the index of a process's GPU among the `count` that it sees; raises TopologyError without one.

    A launcher that binds every process to a GPU of its own lets it see that one alone, whatever its local rank.
    """
    if not count:
        raise TopologyError(Problem("--device cuda", "PyTorch sees no GPU on this machine", "--device cpu"))
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if count == len(visible) == 1:
        return 0
    if local_rank >= count:
        rule = "every process on a node needs a GPU of its own"
        legal = f"at most {count} processes a node, CUDA_VISIBLE_DEVICES with one GPU for each process, or --device cpu"
        raise TopologyError(Problem(f"local rank {local_rank} with {count} visible GPUs", rule, legal))
    return local_rank


SharedStore = Store  # of all ranks of a job


def join(
    launch: Launch, *, backend: str, device: torch.device, timeout_minutes: float, join_minutes: float | None = None
) -> Store | None:
    """Make the default process group; return the store that all processes of the job share.

    backend is "auto" (nccl on CUDA, gloo elsewhere), "nccl" (gloo on CPUs, as rank 0 prints) or "gloo".  A job of one
    process needs no group and has no store.  timeout_minutes: the limit of every collective.  join_minutes: how long
    processes wait for each other; by default the same.  Raises TopologyError when the backend doesn't fit the device,
    the processes don't meet or have different backends, or two of them have the same GPU.
    """
    chosen = choose_backend(backend, device, launch.rank)
    if launch.world_size == 1:
        return None
    joining = timedelta(minutes=timeout_minutes if join_minutes is None else join_minutes)
    store = open_store(launch, joining.total_seconds())
    check_backend(store, launch.rank, chosen)
    if chosen == "nccl":
        claim_gpu(store, launch.rank, str(torch.cuda.get_device_properties(device).uuid))
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
    _set_pg_timeout(timedelta(minutes=timeout_minutes), default_group())
    return PrefixStore("megazero", store)


def publish(store: SharedStore, key: str, text: str | None) -> str:
    """Return the text that one rank publishes under a key; None on the others, which wait for it."""
    if text is not None:
        store.set(key, text)
    return str(store.get(key).decode())


def choose_backend(name: str, device: torch.device, rank: int, *, setting: str = "--distributed-backend ") -> str:
    """Return the backend for a device: for "auto" that which fits, and on CPUs gloo for "nccl", as rank 0 prints.

    setting: what stands before the name where a user gives it.  Raises TopologyError if the two do not fit.
    """
    fitting = {"cuda": "nccl", "cpu": "gloo"}[device.type]
    if name == "nccl" != fitting:
        Console(rank).line(f"{setting}{name}: PyTorch sees no GPU on this machine, so {fitting} is used")
    elif name not in ("auto", fitting):
        rule = f"{name} doesn't move {device.type} memory, and this run's device is {device.type}"
        raise TopologyError(Problem(f"{setting}{name}", rule, f"{setting}{fitting}"))
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
    wires: Wires = PLAIN,
    nodes: Nodes | None = None,
) -> Mesh:
    """Make a metered communicator per axis, a second data-parallel one for parameters, and the pipeline's channels.

    Where torch's default group carries no CPU tensors, as with NCCL, a group of all ranks over gloo is made for those.
    Every rank of the job must call this with the same topology.
    timeout_minutes: how long a collective may wait on an axis that has groups of its own, the same as for `join`
    (torch doesn't pass it on); None: the backend's default.  join_minutes: how long ranks may take to make the groups;
    by default the same.  meter: counts the traffic; by default one of the mesh's own.  wires: how what ZeRO gathers and
    sums up travels.  nodes: those that the ranks are on; None: one.
    """
    limits = Limits(*(None if limit is None else timedelta(minutes=limit) for limit in (timeout_minutes, join_minutes)))
    groups = make_groups(splits(topology), rank, device, limits)
    if topology.world_size > 1:
        groups[WORLD] = default_group()
        if not carries_cpu_tensors(default_group()):
            split = Split(CONTROL, WORLD, topology.groups(WORLD))
            groups[CONTROL] = gloo_maker(limits).make(split, rank)
    memory = NO_MEMORY
    if topology.world_size > 1 and device.type == "cpu" and default_group().name() == "gloo":
        everyone = ProcessGroupCommunicator(default_group(), NO_SCRATCH)
        memory = _share_memory(everyone, split_keys(topology), groups, topology, rank, nodes)
    meter = meter or Meter()
    return mesh_of_groups(groups, topology, rank, device, scratch, meter=meter, wires=wires, nodes=nodes, memory=memory)


def second_control(mesh: Mesh, timeout_minutes: float | None) -> Communicator:
    """Return a communicator of CPU tensors over all ranks of a mesh, for a thread beside those that use its `control`.

    A collective call.  timeout_minutes: the limit of every collective; None: the backend's default.
    """
    if mesh.control.size == 1:
        return LocalCommunicator()
    ranks = tuple(int(rank) for rank in gather_json(mesh.control, dist.get_rank()))
    limit = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
    # Engines of other ranks may make theirs at the same time.
    split = Split(f"{CONTROL}_of_{ranks[0]}", WORLD, (ranks,))
    return _communicator(gloo_maker(Limits(limit, limit)).make(split, dist.get_rank()), NO_SCRATCH)


def dry_mesh(
    topology: Topology,
    rank: int,
    device: torch.device,
    scratch: Scratch,
    *,
    is_gpu: bool,
    meter: Meter,
    wires: Wires = PLAIN,
    nodes: Nodes | None = None,
) -> Mesh:
    """Make the mesh of one rank of a job that does not exist: its process groups send nothing (`dry.py`).

    is_gpu: the ranks' devices are GPUs, whose groups are NCCL's, else CPUs.  The other arguments: see `make_mesh`.
    """
    backend = "nccl" if is_gpu else "gloo"
    groups = dry_groups(splits(topology), rank, backend)
    if topology.world_size > 1:
        everyone = range(topology.world_size)
        groups[WORLD] = dry_group(everyone, rank, backend)
        if is_gpu:
            groups[CONTROL] = dry_group(everyone, rank, "gloo")
    return mesh_of_groups(groups, topology, rank, device, scratch, meter=meter, wires=wires, nodes=nodes)


def mesh_of_groups(
    groups: Mapping[str, dist.ProcessGroup | None],
    topology: Topology,
    rank: int,
    device: torch.device,
    scratch: Scratch,
    *,
    meter: Meter,
    wires: Wires,
    nodes: Nodes | None,
    memory: NodeMemory = NO_MEMORY,
) -> Mesh:
    """Stack the communicators of a mesh on process groups, by key; a collective call of all ranks.

    memory: that which ranks of a node share.
    """
    axes = {axis: axis for axis in (*AXES, ENDS, WORLD)} | dict.fromkeys(channel_keys(topology.pp), "pp")
    links = {
        axis: links_of(nodes, topology.group_of(rank, axis), rank, groups.get(axis)) for axis in set(axes.values())
    }
    plain = {key: _communicator(groups.get(key), scratch) for key, axis in axes.items() if axis != "dp"}
    both = data_parallel(groups.get("dp"), groups.get(GATHERING), scratch)
    plain |= zip(("dp", GATHERING), both, strict=True)
    axes[GATHERING] = "dp"
    communicators: dict[str, Communicator] = {}
    for key, communicator in plain.items():
        memory.join(key, communicator)
        communicators[key] = meter.communicator(communicator, axes[key], key, links[axes[key]])
    if (group := groups.get(CONTROL)) is not None:
        control = links_of(nodes, range(topology.world_size), rank, group)
        communicators[CONTROL] = meter.communicator(_communicator(group, NO_SCRATCH), WORLD, CONTROL, control)
    mesh = Mesh(topology, rank, device, communicators, meter)
    _connect_stages(mesh)
    return _with_shards(mesh, topology, wires, groups, scratch, nodes, memory)


def divide_data_axis(
    mesh: Mesh, topology: Topology, wires: Wires, scratch: Scratch, limits: Limits, nodes: Nodes | None = None
) -> Mesh:
    """Return the mesh with its data-parallel axis divided as in `topology`, and with these wires.

    A collective call of all ranks of the job, which are those of the mesh; its own axis is not divided yet.
    nodes: those that the ranks are on; None: one.
    """
    keys = shard_keys(topology)
    groups = make_groups([split for split in splits(topology) if split.key in keys], mesh.rank, mesh.device, limits)
    memory = NO_MEMORY
    if keys and mesh.device.type == "cpu" and default_group().name() == "gloo":
        memory = _share_memory(mesh.control, keys, groups, topology, mesh.rank, nodes)
        mesh.meter.reset()
    return _with_shards(mesh, topology, wires, groups, scratch, nodes, memory)


def _share_memory(
    everyone: Communicator,
    keys: Mapping[str, str],
    groups: Mapping[str, dist.ProcessGroup | None],
    topology: Topology,
    rank: int,
    nodes: Nodes | None,
) -> NodeMemory:
    """Return the memory that this rank shares with others of its node; a collective call of all ranks.

    keys: {key: axis} of the communicators that may use it.  A pipeline's, which send to one rank alone, don't.
    """
    names = [key for key, axis in keys.items() if axis not in ("pp", ENDS)]
    if not names:
        return NO_MEMORY
    on_node = {}
    for key in names:
        group, ranks = groups.get(key), topology.group_of(rank, keys[key])
        if group is not None and group.name() == "gloo" and links_of(nodes, ranks, rank, group) is None:
            on_node[key] = ranks
    memory, problem = share_memory(everyone, names, on_node, rank)
    if problem:
        Console(rank).line(f"gloo carries all messages, since ranks share no memory: {problem}")
    return memory


def _with_shards(
    mesh: Mesh,
    topology: Topology,
    wires: Wires,
    groups: Mapping[str, dist.ProcessGroup | None],
    scratch: Scratch,
    nodes: Nodes | None,
    memory: NodeMemory,
) -> Mesh:
    """Return the mesh with the parts of its data-parallel axis, metered, and stacked as the wires have it.

    The mesh's own communicators stand for a part that is all of the axis.
    """
    made: dict[str, Communicator] = {}
    axes = [axis for axis in (SHARDS, INSIDE, ACROSS, REPLICAS, SECONDARY) if groups.get(axis) is not None]
    links = {axis: links_of(nodes, topology.group_of(mesh.rank, axis), mesh.rank, groups[axis]) for axis in axes}
    for first, second in ((SHARDS, SHARD_GATHERING), (INSIDE, INSIDE_GATHERING), (ACROSS, ACROSS_GATHERING)):
        if groups.get(first) is not None:
            both = data_parallel(groups.get(first), groups.get(second), scratch)
            for key, communicator in zip((first, second), both, strict=True):
                memory.join(key, communicator)
                made[key] = mesh.meter.communicator(communicator, first, key, links[first])
    for axis in (REPLICAS, SECONDARY):
        if groups.get(axis) is not None:
            communicator = _communicator(groups[axis], scratch)
            memory.join(axis, communicator)
            made[axis] = mesh.meter.communicator(communicator, axis, axis, links[axis])
    if topology.replicas > 1 and topology.size(SHARDS) == 1:
        made |= dict.fromkeys((SHARDS, SHARD_GATHERING), LocalCommunicator())
    mesh = replace(mesh, topology=topology, communicators={**mesh.communicators, **made})
    plain, notice = plain_parts(topology, mesh.communicators), ""
    if wires.hops_if_faster:
        wires, notice = choose_hops(wires, plain, mesh, nodes or Nodes((topology.world_size,)))
        mesh.meter.reset()
    stacked = stack(wires, plain, scratch, mesh.device, mesh.rank)
    communicators = {**mesh.communicators, **stacked.communicators}
    return replace(mesh, communicators=communicators, wire_state=stacked.state, notice=notice)


def plain_parts(topology: Topology, made: Mapping[str, Communicator]) -> dict[str, Communicator]:
    """Return the communicators by key, and for the parts of the data-parallel axis that have none what stands for them.

    made: those of the axes, and of the parts that are neither one rank nor all of what they divide.
    """
    found = dict(made)
    if topology.replicas == 1:
        found |= {SHARDS: made["dp"], SHARD_GATHERING: made[GATHERING]}
    for keys, whole in (((ACROSS, ACROSS_GATHERING), topology.inside == 1), ((INSIDE, INSIDE_GATHERING), False)):
        for key, shards in zip(keys, (SHARDS, SHARD_GATHERING), strict=True):
            found.setdefault(key, found[shards] if whole else LocalCommunicator())
    return found


def links_of(nodes: Nodes | None, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> Links | None:
    """Return the links of a group; None if its ranks are on one node.  nodes: those of all ranks; None: one."""
    if nodes is None or nodes.count == 1 or group is None:
        return None
    places = nodes.of_all(ranks)
    return Links(places, ranks.index(rank), exchanges=group.name() == "gloo") if len(set(places)) > 1 else None


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


def data_parallel(
    first: dist.ProcessGroup | None, second: dist.ProcessGroup | None, scratch: Scratch
) -> tuple[Communicator, Communicator]:
    """Return the two communicators of the data-parallel axis, which share its two groups; None for an axis of one."""
    if first is None or second is None:
        return LocalCommunicator(), LocalCommunicator()
    return (
        ProcessGroupCommunicator(first, scratch, beside=second),
        ProcessGroupCommunicator(second, scratch, beside=first, lane=1),
    )


def _communicator(group: dist.ProcessGroup | None, scratch: Scratch) -> Communicator:
    """Return the communicator of a group; a rank without one is alone on its axis, as a middle stage is on ENDS."""
    return LocalCommunicator() if group is None else ProcessGroupCommunicator(group, scratch)


def default_group() -> dist.ProcessGroup:
    """Return torch's default group of this process, which `join` or the user's program has made."""
    group = dist.group.WORLD
    assert group is not None, "join() comes before make_mesh()"
    return group
