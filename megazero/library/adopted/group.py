"""Makes a communicator over a process group that the user has made, for callers that need no mesh.

Without a group, the communicator is over all processes of the job.  If torch's default group does not exist yet, they
join in one here, as the launcher's environment describes the job.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist

from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.comm.startup import choose_device, join
from megazero.config import derived
from megazero.config.engine_sections import LimitConfig
from megazero.errors import Problem, TopologyError
from megazero.library.adopted.mesh import is_joined, joined_device
from megazero.parallel.launch import Launch


def adopt_group(group: Any = None, limits: LimitConfig | None = None) -> Communicator:
    """Return a communicator over a torch process group, by default over all processes; one process needs no group.

    limits: for processes that join here.  Raises TopologyError when this process is not in the group.
    """
    if group is None and not is_joined():
        _join_others(limits or LimitConfig())
    if not is_joined():
        return LocalCommunicator()
    if dist.get_rank(group) < 0:
        given = f"a group of ranks {dist.get_process_group_ranks(group)} on rank {dist.get_rank()}"
        raise TopologyError(
            Problem(given, "a process communicates in groups that it belongs to", "this process's own group")
        )
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None, "there is a default group"
    return (
        LocalCommunicator()
        if dist.get_world_size(chosen) == 1
        else ProcessGroupCommunicator(chosen, _AllocatedScratch())
    )


def group_or_all(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group, by default that of all processes; None for a process that has joined no job."""
    return group if group is not None or not is_joined() else dist.group.WORLD


def is_group(group: Any) -> bool:
    """Return True for a torch process group, which torch gives to its members alone."""
    return isinstance(group, dist.ProcessGroup)


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks in the job of a group's processes."""
    return tuple(dist.get_process_group_ranks(group))


def rank_in_job() -> int:
    """Return the rank of this process, which has joined the job."""
    return dist.get_rank()


def own_device() -> torch.device:
    """Return the device of this process: that of its default group or, without one, its GPU if any, else the CPU."""
    return joined_device() if is_joined() else choose_device("auto", Launch.from_environment())


def _join_others(limits: LimitConfig) -> None:
    launch = Launch.from_environment()
    if launch.world_size > 1:
        device = choose_device("auto", launch)
        minutes, joining = derived.collective_limit_minutes(limits), derived.join_limit_minutes(limits)
        join(launch, backend="auto", device=device, timeout_minutes=minutes, join_minutes=joining)


class _AllocatedScratch:
    """A scratch whose memory is allocated for each lease and freed after it, for rare collectives."""

    buffer_bytes = sys.maxsize

    def lease(self, numel: int, dtype: torch.dtype) -> "_Lease":
        return _Lease(torch.empty(numel, dtype=dtype, device=own_device()))

    def keep(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=own_device())


class _Lease:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def release(self) -> None:
        """Do nothing: the memory is freed with this object."""
