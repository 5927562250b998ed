"""Joins the job and makes the mesh: the only place that stacks wrappers around process groups."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megazero.comm.interface import Communicator, Scratch
from megazero.comm.local import LocalCommunicator
from megazero.comm.mesh import GATHERING, Mesh
from megazero.comm.metered import Meter, MeteredCommunicator
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.errors import Problem, TopologyError
from megazero.parallel.topology import AXES, WORLD, Topology


@dataclass(frozen=True)
class Launch:
    """What the launcher (torchrun, or srun with its names exported) told this process."""

    rank: int
    world_size: int
    local_rank: int

    @staticmethod
    def from_environment() -> "Launch":
        """RANK, WORLD_SIZE and LOCAL_RANK; a process started by hand is alone.  Raises TopologyError."""
        read = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        try:
            rank, world, local = (
                int(read["RANK"] or 0),
                int(read["WORLD_SIZE"] or 1),
                int(read["LOCAL_RANK"] or 0),
            )
        except ValueError:
            raise TopologyError(Problem(str(read), "RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers")) from None
        if not 0 <= rank < world or local < 0:
            # A forgotten WORLD_SIZE would make every process a run of its own, all saving to the same folder.
            given = f"RANK {rank}, WORLD_SIZE {world}, LOCAL_RANK {local}"
            raise TopologyError(Problem(given, "ranks count from 0 to WORLD_SIZE - 1", "start with torchrun"))
        return Launch(rank, world, local)


def choose_device(name: str, local_rank: int) -> torch.device:
    """ "auto", "cpu" or "cuda" to this process's device, which becomes the current one.

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


def join(launch: Launch, *, backend: str, device: torch.device, timeout_minutes: float) -> Store | None:
    """Make the default process group; returns the store that all processes of the job share.

    backend is "auto" (nccl on CUDA, gloo elsewhere), "nccl" or "gloo".  A job of one process needs no group and has no
    store.  Raises TopologyError when the backend doesn't fit the device, or the launcher has named no meeting place.
    """
    chosen = _choose_backend(backend, device)
    if launch.world_size == 1:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        rule = f"{launch.world_size} processes find each other by MASTER_ADDR and MASTER_PORT"
        raise TopologyError(Problem(f"no {' and no '.join(missing)} in the environment", rule, "start with torchrun"))
    timeout = timedelta(minutes=timeout_minutes)
    # torch would make the same store by itself, and keep it to itself.
    store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    store.set_timeout(timeout)
    dist.init_process_group(
        chosen,
        store=PrefixStore("default_pg", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if chosen == "nccl" else None,
    )
    return PrefixStore("megazero", store)


def _choose_backend(name: str, device: torch.device) -> str:
    fitting = {"cuda": "nccl", "cpu": "gloo"}[device.type]
    if name not in ("auto", fitting):
        rule = f"{name} doesn't move {device.type} memory, and this run's device is {device.type}"
        raise TopologyError(Problem(f"--distributed-backend {name}", rule, f"--distributed-backend {fitting}"))
    return fitting


def leave() -> None:
    """Take the process groups down, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_mesh(
    topology: Topology, rank: int, device: torch.device, scratch: Scratch, *, timeout_minutes: float | None = None
) -> Mesh:
    """One metered communicator per axis, and a second one of the data-parallel axis for parameters.

    Every rank of the job must call this with the same topology.
    timeout_minutes: how long a collective may wait on an axis that has groups of its own, as `join` was told for all
    ranks (torch doesn't pass it on); None: as long as the backend likes.
    """
    timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
    meter = Meter()
    communicators: dict[str, Communicator] = {}
    for key, axis in (*((axis, axis) for axis in (*AXES, WORLD)), (GATHERING, "dp")):
        inner = _communicator(topology, axis, rank, scratch, timeout=timeout)
        communicators[key] = MeteredCommunicator(inner, axis, meter)
    return Mesh(topology, rank, device, communicators, meter)


def _communicator(
    topology: Topology, axis: str, rank: int, scratch: Scratch, *, timeout: timedelta | None
) -> Communicator:
    """All ranks make all groups of the axis, in the same order, as torch demands; each keeps its own."""
    if topology.size(axis) == 1:
        return LocalCommunicator()
    if axis == WORLD:
        return ProcessGroupCommunicator(_default_group(), scratch)
    groups = [
        (ranks, dist.new_group(list(ranks), timeout=timeout, group_desc=f"megazero_{axis}"))
        for ranks in topology.groups(axis)
    ]
    mine = next(group for ranks, group in groups if rank in ranks)
    return ProcessGroupCommunicator(mine, scratch)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "join() comes before make_mesh()"
    return group
