"""Makes the process groups of a mesh, from one list that is a pure function of the topology.

The list has a *split* for each key of the mesh: the division of the job's ranks into the groups of one axis, each with
a colour of its own.  All ranks go through the list in the same order:

    NCCL, connected at once   one `split_group` of the default group a split, which all ranks call with all colours
    gloo                      a rank makes its own groups alone, over the job's store; all of them share one device,
                              since every device has a thread of its own that wakes a hundred times a second
    other                     all ranks call `new_group` for all groups, as torch counts them; none is connected yet

So a rank of the first two makes at most as many groups as there are splits, however many ranks the job has.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Store, _get_default_store

from megazero.comm.mesh import ACROSS_GATHERING, GATHERING, INSIDE_GATHERING, SHARD_GATHERING, channel_keys
from megazero.operating_system import batch_threads
from megazero.parallel.topology import ACROSS, AXES, ENDS, INSIDE, REPLICAS, SECONDARY, SHARDS, Topology

# {key: axis} of what ZeRO uses where it partitions over a part of the data-parallel axis, and where what it sends takes
# hops; gathers have groups of their own, since they run beside sums.
SHARD_KEYS: Mapping[str, str] = MappingProxyType({SHARDS: SHARDS, SHARD_GATHERING: SHARDS, REPLICAS: REPLICAS})
HOP_KEYS: Mapping[str, str] = MappingProxyType(
    {INSIDE: INSIDE, ACROSS: ACROSS, INSIDE_GATHERING: INSIDE, ACROSS_GATHERING: ACROSS}
)
SECONDARY_KEYS: Mapping[str, str] = MappingProxyType({SECONDARY: SECONDARY})
_MOST_CHANNEL_BLOCKS = 4  # thread blocks of an open receive of a pipeline, which runs beside the stage's computation


class Split(NamedTuple):
    """The groups that one key of the mesh divides the job's ranks into; the index of a group is its colour."""

    key: str
    axis: str
    groups: tuple[tuple[int, ...], ...]

    def colour_of(self, rank: int) -> int | None:
        """Return the index of the group that a rank is in; None for one that is in none."""
        return next((colour for colour, ranks in enumerate(self.groups) if rank in ranks), None)

    def name(self, colour: int) -> str:
        """Return the description of a group, for torch's own reports."""
        return f"megazero_{self.axis}_{colour}"


class Limits(NamedTuple):
    """The time limits of collectives, and of ranks that make a process group; None: the backend's, or the former."""

    collectives: timedelta | None
    joining: timedelta | None


def splits(topology: Topology) -> tuple[Split, ...]:
    """Return the splits of a mesh, in the order in which all ranks make them; an axis of one rank has none.

    ENDS comes last: the stages between the ends are in none of its groups, and torch names a group by the number of
    those before it, which must be the same on all members.
    """
    keys = split_keys(topology)
    groups = {axis: topology.groups(axis) for axis in dict.fromkeys(keys.values())}
    return tuple(Split(key, axis, groups[axis]) for key, axis in keys.items())


def split_keys(topology: Topology) -> dict[str, str]:
    """Return {key: axis} of the splits of a mesh."""
    keys = {axis: axis for axis in AXES} | {GATHERING: "dp"}
    keys |= shard_keys(topology)
    keys |= dict.fromkeys(channel_keys(topology.pp), "pp") | {ENDS: ENDS}
    return {key: axis for key, axis in keys.items() if topology.size(axis) > 1}


def shard_keys(topology: Topology) -> dict[str, str]:
    """Return {key: axis} of the parts of the data-parallel axis that a topology has."""
    keys: dict[str, str] = {}
    for axis, found in ((REPLICAS, SHARD_KEYS), (INSIDE, HOP_KEYS), (SECONDARY, SECONDARY_KEYS)):
        keys |= found if topology.size(axis) > 1 else {}
    return keys


def make_groups(
    planned: Sequence[Split], rank: int, device: torch.device, limits: Limits
) -> dict[str, dist.ProcessGroup | None]:
    """Make this rank's groups of the splits; return them by key, None where it is in no group of the split.

    A collective call of all ranks of the job.
    """
    if not planned:
        return {}
    maker = group_maker(device, limits)
    return {split.key: maker.make(split, rank) for split in planned}


class GroupMaker:
    """Makes groups by torch's `new_group`, which all ranks call for every group."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def make(self, split: Split, rank: int) -> dist.ProcessGroup | None:
        """Make this rank's group of the split, with the limit of joining while it is made; None if it is in none."""
        group = self._make(split, rank)
        if group is not None and self.limits.collectives is not None:
            for backend in {group._get_backend(device) for device in group._device_types}:
                backend._set_default_timeout(self.limits.collectives)
        return group

    @property
    def joining(self) -> timedelta | None:
        return self.limits.joining or self.limits.collectives

    def _make(self, split: Split, rank: int) -> dist.ProcessGroup | None:
        names = range(len(split.groups))
        made: list[dist.ProcessGroup] = [
            dist.new_group(list(ranks), timeout=self.joining, group_desc=split.name(colour))
            for colour, ranks in zip(names, split.groups, strict=True)
        ]
        colour = split.colour_of(rank)
        return None if colour is None else made[colour]


class SplitMaker(GroupMaker):
    """Makes groups by splitting the default group's NCCL communicator, which all ranks take part in."""

    def _make(self, split: Split, rank: int) -> dist.ProcessGroup | None:
        made: dist.ProcessGroup | None = dist.split_group(
            split_ranks=[list(ranks) for ranks in split.groups],
            timeout=self.joining,
            pg_options=_nccl_options(split.key),
            group_desc=split.name(split.colour_of(rank) or 0),
        )
        return made


def _nccl_options(key: str) -> Any:
    """Return the options of a split of NCCL groups, with limited channels for a pipeline's; None: the parent's."""
    if key not in channel_keys(num_stages=3):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MOST_CHANNEL_BLOCKS
    return options


class GlooMaker(GroupMaker):
    """Makes gloo groups that share one device, on their members only, over the job's store.

    The groups are not entered in torch's list of groups; they live as long as their communicators.
    """

    def __init__(self, limits: Limits, store: Store) -> None:
        super().__init__(limits)
        self._devices = _gloo_devices()
        self._store = store

    def _make(self, split: Split, rank: int) -> dist.ProcessGroup | None:
        colour = split.colour_of(rank)
        if colour is None:
            return None
        ranks, name = split.groups[colour], split.name(colour)
        mine = ranks.index(rank)
        gloo: Any = dist.ProcessGroupGloo  # torch's annotations lack its options
        options = gloo._Options()
        options._devices, options._threads = self._devices, 2 * len(self._devices)
        options.global_ranks_in_group, options.group_name = list(ranks), name
        if self.joining is not None:
            options._timeout = self.joining
        store = PrefixStore(f"{split.key}_{colour}", self._store)
        group = dist.ProcessGroup(store, mine, len(ranks))
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend = gloo(store, mine, len(ranks), options)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_group_name(GroupName(name))
        group._set_group_desc(name)
        return group


def group_maker(device: torch.device, limits: Limits) -> GroupMaker:
    """Return the maker of groups that fits the default group; a collective call of all ranks of the job."""
    world = dist.group.WORLD
    assert world is not None, "join() comes before groups are made"
    if device.type == "cpu" and isinstance(world._get_backend(device), dist.ProcessGroupGloo):
        return gloo_maker(limits)
    if world.bound_device_id is not None:
        return SplitMaker(limits)
    return GroupMaker(limits)


def gloo_maker(limits: Limits) -> GlooMaker:
    """Return a maker of gloo groups over the job's store; a collective call of all ranks of the job."""
    store = PrefixStore("megazero_groups", _get_default_store())
    number = store.add(f"of_rank_{dist.get_rank()}", 1)  # the same on all ranks, which make as many makers
    return GlooMaker(limits, PrefixStore(f"maker_{number}", store))


def _gloo_devices() -> Sequence[Any]:
    """Return gloo devices for the interfaces that torch would take: those that GLOO_SOCKET_IFNAME names, or its own.

    A thread that sends holds the connection's lock.  If the message wakes a device's thread and that takes the core at
    once, the answer finds the lock held, and the device of the sender asks for it without a pause until the sender has
    a core again.  So devices wait for a core.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    with batch_threads():
        made = [dist.ProcessGroupGloo.create_device(interface=name) for name in names]
        return made or [dist.ProcessGroupGloo.create_default_device()]
