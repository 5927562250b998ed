"""torch.distributed under DeepSpeed's names: `init_distributed` joins the job, the rest are torch's own functions."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_global_rank,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

from megazero.comm.startup import choose_backend, choose_device, join
from megazero.config import derived
from megazero.config.engine_sections import LimitConfig
from megazero.deepspeed.missing import missing_name, refuse
from megazero.parallel.launch import Launch

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]
DEFAULT_PORT = 29500


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise missing_name(name, "megazero.deepspeed.comm")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make torch's default process group, also of one process; do nothing if there is one.

    The launcher's variables (torchrun's or Slurm's) give rank and number of processes, unless `init_method` is given.
    dist_backend: "nccl" on GPUs, "gloo" elsewhere, where "nccl" is taken for it; None chooses.
    timeout: the limit of every collective.
    dist_init_required: False raises UsageError if there is no group.
    auto_mpi_discovery, verbose: MPI's variables are not read, and nothing is printed, whatever they are.
    """
    if config is not None:
        raise refuse("init_distributed(config=...)", "collectives have no settings of their own", "no config")
    if is_initialized():
        return
    if dist_init_required is False:
        rule = "processes have met before, where dist_init_required is False"
        raise refuse("dist_init_required=False without a process group", rule, "dist_init_required=None")
    launch = Launch.from_environment()
    device = choose_device("auto", launch)
    backend = choose_backend(dist_backend or "auto", device, launch.rank, setting="dist_backend=")
    if init_method is not None:
        dist.init_process_group(backend, init_method, timeout, world_size=world_size, rank=rank)
    elif launch.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        limits = LimitConfig()
        minutes = derived.collective_limit_minutes(limits) if timeout is None else timeout.total_seconds() / 60
        joining = derived.join_limit_minutes(limits) if timeout is None else minutes
        join(launch, backend=backend, device=device, timeout_minutes=minutes, join_minutes=joining)


def get_local_rank() -> int:
    """Return this process's rank among those of its node."""
    return Launch.from_environment().local_rank


def get_world_group() -> dist.ProcessGroup:
    """Return the group of all processes."""
    group = dist.group.WORLD
    if group is None:
        raise refuse("get_world_group()", "there is no process group yet", "init_distributed() before it")
    return group


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the ranks of a group, numbered as in the group of all processes."""
    return dist.get_process_group_ranks(get_world_group() if group is None else group)
