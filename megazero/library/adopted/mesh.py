"""Makes a mesh over process groups that the user's program has made.

The program may have joined the job already, and may run tensor parallelism of its own.  Its groups are given in one of
three forms:

    nothing       all processes of the default group are one data-parallel axis
    DeviceMesh    torch's: its only dim, or the dims called "dp" and (if there is one) "tp"
    mpu           an object or module with `get_data_parallel_group()` and, with model parallelism, one of
                  `get_model_parallel_group()` and `get_tensor_model_parallel_group()`, as Megatron-LM has it

Ranks need not be numbered as a `Topology` numbers them: this rank's number follows from its places in the two groups,
and collectives over "world" run over one group first, then over the other.  The second data-parallel group, over which
parameters are gathered, is made here by a collective call of all processes of the job; so are groups of the same ranks
over gloo for CPU tensors, where the user's groups carry none.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store, _get_default_store

from megazero.comm.groups import GroupMaker, Limits, Split, gloo_maker, group_maker
from megazero.comm.interface import Communicator, CompletedWork, ReduceKind, Work, gather_in_turn, reduce_in_turn
from megazero.comm.local import LocalCommunicator
from megazero.comm.mesh import CONTROL, CONTROL_AXES, GATHERING, Mesh
from megazero.comm.metered import Meter, MeteredCommunicator
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.comm.startup import carries_cpu_tensors, data_parallel, links_of, make_mesh
from megazero.errors import Problem, TopologyError
from megazero.memory.lease import NO_SCRATCH, Scratch
from megazero.parallel.launch import Launch
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import AXES, ENDS, WORLD, Topology

_LEGAL = 'a megazero Mesh, a DeviceMesh with dims "dp" and "tp", or an object with get_data_parallel_group()'


class ForeignGroups(NamedTuple):
    """The data-parallel group of this process and, if there is one, its tensor-parallel group."""

    data: dist.ProcessGroup
    tensor: dist.ProcessGroup | None = None


def is_joined() -> bool:
    """Return True if this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


def joined_device() -> torch.device:
    """Return the device of the default process group: this process's current GPU, or the CPU."""
    uses_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config(_default_group())
    return torch.device("cuda", torch.cuda.current_device()) if uses_gpu else torch.device("cpu")


class DefaultGroup(NamedTuple):
    """Torch's default group of several processes: this one's rank, their shared store, and the limit of waiting."""

    rank: int
    size: int
    store: Store
    limit_seconds: float


def default_group(device: torch.device) -> DefaultGroup | None:
    """Return torch's default group; None if there is none, or none of several real processes."""
    if not is_joined() or dist.get_world_size() == 1 or dist.get_backend() not in ("gloo", "nccl"):
        return None
    world: Any = _default_group()
    limit: timedelta = world._get_backend(device).options._timeout
    return DefaultGroup(dist.get_rank(), dist.get_world_size(), _get_default_store(), limit.total_seconds())


def adopt_default(device: torch.device, scratch: Scratch) -> Mesh:
    """Return a mesh in which all processes of the default group are data parallel; a collective call."""
    group, limit = _default_group(), _limit(device)
    minutes = None if limit is None else limit.total_seconds() / 60
    topology = Topology(dp=dist.get_world_size(group))
    nodes = launched_nodes(topology.world_size)
    return make_mesh(topology, dist.get_rank(group), device, scratch, timeout_minutes=minutes, nodes=nodes)


def launched_nodes(world_size: int) -> Nodes | None:
    """Return the nodes of a job of this many processes, as the launcher gives them; None if it has started others."""
    nodes = Launch.from_environment().nodes
    return nodes if nodes.world_size == world_size else None


def _limit(device: torch.device) -> timedelta | None:
    """Return the time limit of torch's default group, which is also that of the groups made beside it."""
    known = default_group(device)
    return None if known is None else timedelta(seconds=known.limit_seconds)


def adopt(foreign: Any, device: torch.device, scratch: Scratch) -> Mesh:
    """Return a mesh over the user's groups; a collective call of the whole job.  Raises TopologyError."""
    groups = find_groups(foreign)
    data = dist.get_process_group_ranks(groups.data)
    tensor = [dist.get_rank()] if groups.tensor is None else dist.get_process_group_ranks(groups.tensor)
    _check_ranks(data, tensor)
    limits = Limits(collectives=_limit(device), joining=_limit(device))
    second = _second_group(data, device, GATHERING, group_maker(device, limits))
    over_data, gathering = data_parallel(groups.data if len(data) > 1 else None, second, scratch)
    over_tensor = _communicator(groups.tensor, scratch)
    inner: dict[str, Communicator] = {
        "pp": LocalCommunicator(),
        "dp": over_data,
        "tp": over_tensor,
        WORLD: _product(over_data, over_tensor),
        ENDS: LocalCommunicator(),
        GATHERING: gathering,
    }
    hosts = [over_data, over_tensor]
    if not all(carries_cpu_tensors(group) for group in groups if group is not None):
        axes = {"dp": data} if groups.tensor is None else {"dp": data, "tp": tensor}
        maker = gloo_maker(limits)
        hosts = [
            _communicator(_second_group(ranks, device, f"{CONTROL}_{axis}", maker), NO_SCRATCH)
            for axis, ranks in axes.items()
        ]
        inner[CONTROL] = _product(*hosts)
    if len(hosts) > 1:
        inner |= dict(zip(CONTROL_AXES, reversed(hosts), strict=True))
    meter = Meter()
    names = {axis: axis for axis in (*AXES, ENDS, WORLD)} | {GATHERING: "dp"}
    names |= dict.fromkeys((CONTROL, *CONTROL_AXES), WORLD)
    nodes, me = launched_nodes(dist.get_world_size()), dist.get_rank()
    over_data_links = links_of(nodes, data, me, groups.data)
    over_tensor_links = links_of(nodes, tensor, me, groups.tensor)
    links = {"tp": over_tensor_links, "dp": over_data_links, GATHERING: over_data_links}
    links |= dict(zip(CONTROL_AXES, (over_tensor_links, over_data_links), strict=True))
    # What reaches all ranks leaves the node where either does.
    links |= dict.fromkeys((WORLD, CONTROL), over_data_links or over_tensor_links)
    communicators = {
        key: MeteredCommunicator(axis, names[key], meter, links=links.get(key)) for key, axis in inner.items()
    }
    topology = Topology(tp=over_tensor.size, dp=over_data.size)
    return Mesh(topology, topology.rank_of(dp=over_data.rank, tp=over_tensor.rank), device, communicators, meter)


def find_groups(foreign: Any) -> ForeignGroups:
    """Find the groups in the object that the user has given; raises TopologyError if it has none."""
    if isinstance(foreign, DeviceMesh):
        return _of_device_mesh(foreign)
    data = _call(foreign, "get_data_parallel_group")
    if data is None:
        given = f"mesh of type {type(foreign).__name__}"
        raise TopologyError(Problem(given, "a mesh has the data-parallel group of this process", _LEGAL))
    tensor = _call(foreign, "get_tensor_model_parallel_group")
    model = _call(foreign, "get_model_parallel_group")
    if tensor is not None and model is not None and dist.get_world_size(tensor) != dist.get_world_size(model):
        sizes = f"{dist.get_world_size(model)} ranks share a model, {dist.get_world_size(tensor)} of them its tensors"
        rule = "a model is divided by tensor parallelism alone: a pipeline's stages hold different layers"
        raise TopologyError(Problem(sizes, rule, "a pipeline of one stage"))
    return ForeignGroups(data, model if tensor is None else tensor)


class TwoAxes:
    """A communicator over the product of two axes: rank = outer rank * inner size + inner rank."""

    def __init__(self, outer: Communicator, inner: Communicator) -> None:
        self._outer, self._inner = outer, inner
        self.size = outer.size * inner.size
        self.rank = outer.rank * inner.size + inner.rank

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        row = input.new_empty(self._inner.size * input.numel())
        self._inner.all_gather_into(row, input, label).wait()
        return self._outer.all_gather_into(output, row, label)

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        return gather_in_turn(self, outputs, inputs, label)

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        row = input.new_empty(self._inner.size * output.numel())
        self._outer.reduce_scatter_into(row, input).wait()
        return self._inner.reduce_scatter_into(output, row)

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        return reduce_in_turn(self, outputs, inputs, keys)

    def all_to_all_into(self, output: Tensor, input: Tensor) -> Work:
        raise AssertionError("only gathers and sums cross both axes")

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        self._inner.all_reduce(tensor, kind).wait()
        return self._outer.all_reduce(tensor, kind)

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return self.all_reduce(tensor, kind)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        row, column = divmod(source, self._inner.size)
        # Every row broadcasts its own member's tensor first; then the row of the source overwrites the others.
        self._inner.broadcast(tensor, column).wait()
        self._outer.broadcast(tensor, row).wait()
        return CompletedWork()

    def send(self, tensor: Tensor, to: int) -> Work:
        raise AssertionError("only sums cross both axes")

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        raise AssertionError("only sums cross both axes")

    def barrier(self) -> None:
        self._inner.barrier()
        self._outer.barrier()


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    return group


def _call(foreign: Any, name: str) -> Any:
    function: Callable[[], Any] | None = getattr(foreign, name, None)
    return None if function is None else function()


def _of_device_mesh(mesh: DeviceMesh) -> ForeignGroups:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return ForeignGroups(mesh.get_group(0))
    if set(names) == {"dp", "tp"}:
        return ForeignGroups(mesh.get_group("dp"), mesh.get_group("tp"))
    given = f"DeviceMesh of shape {tuple(mesh.shape)} with dims {', '.join(names) or 'without names'}"
    raise TopologyError(Problem(given, "its dims are known by their names", 'mesh_dim_names=("dp", "tp"), or one dim'))


def _check_ranks(data: list[int], tensor: list[int]) -> None:
    """Raise TopologyError unless the groups have this process alone in common, and their ranks ascend."""
    me = dist.get_rank()
    given = f"data-parallel ranks {data}, tensor-parallel ranks {tensor} on rank {me}"
    if set(data) & set(tensor) != {me}:
        raise TopologyError(Problem(given, "both groups hold this process, and have no other in common"))
    if data != sorted(data):
        raise TopologyError(Problem(given, "ranks of a group stand in rising order", "a group made by new_group"))


def _communicator(group: dist.ProcessGroup | None, scratch: Scratch) -> Communicator:
    if group is None or dist.get_world_size(group) == 1:
        return LocalCommunicator()
    return ProcessGroupCommunicator(group, scratch)


def _product(outer: Communicator, inner: Communicator | None = None) -> Communicator:
    return outer if inner is None or inner.size == 1 else TwoAxes(outer, inner)


def _second_group(ranks: list[int], device: torch.device, key: str, maker: GroupMaker) -> dist.ProcessGroup:
    """Make another group of the same ranks, for `key`.

    All processes call this, and make the groups of all data-parallel (or tensor-parallel) axes in the same order.
    """
    world = _default_group()
    first_ranks = torch.empty(dist.get_world_size(world), dtype=torch.int64, device=device)
    whole = ProcessGroupCommunicator(world, NO_SCRATCH)
    whole.all_gather_into(first_ranks, torch.tensor([ranks[0]], device=device)).wait()
    axis_of = first_ranks.tolist()
    groups = tuple(
        tuple(rank for rank, other in enumerate(axis_of) if other == first) for first in sorted(set(axis_of))
    )
    made = maker.make(Split(key, key, groups), dist.get_rank())
    assert made is not None, "every rank is in a group of the axis"
    return made
