"""The mesh: a topology with one communicator per axis, the argument of everything that communicates."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.comm.metered import Meter
from megazero.comm.wires.wire_state import NOTHING_REMEMBERED, WireState
from megazero.parallel.topology import REPLICAS, SECONDARY, SHARDS, WORLD, Topology

GATHERING = "dp_gather"  # the key of the second communicator of the data-parallel axis
SHARD_GATHERING = "dp_shard_gather"  # the key of that of the shard group, where it is a part of the axis
INSIDE_GATHERING, ACROSS_GATHERING = "dp_inside_gather", "dp_across_gather"  # those of its parts, for gathers
WEIGHTS = "dp_weights"  # the key of the shard group's communicator for partitioned parameters, if it is another one
CONTROL = "control"  # the key of the communicator of all ranks for CPU tensors, where "world" carries a GPU's only
# The keys of those over which messages of CPU tensors reach rank 0, the innermost first, where no group has all ranks.
CONTROL_AXES = ("control_tp", "control_dp")
_ALONE: Communicator = LocalCommunicator()

# Keys of the pipeline's channels.  A group whose communicator is made at once (NCCL's are) runs one operation after the
# other on each rank, so a receive that is posted ahead would hold up every send behind it.  Hence activations and
# gradients have groups of their own, and so have the two links (to the stage before, to the next) of one stage.
ACTIVATIONS, GRADIENTS = "pp", "pp_gradients"
CHANNELS = (ACTIVATIONS, GRADIENTS)
_ODD, _WRAPPED = "_odd", "_wrapped"


def channel_keys(num_stages: int) -> tuple[str, ...]:
    """Return the keys of the pipeline's channels."""
    if num_stages == 1:
        return ()
    kinds = ("", _ODD, _WRAPPED) if num_stages > 2 else ("", _WRAPPED)
    return tuple(key + kind for kind in kinds for key in CHANNELS)


def channel_key(key: str, link: int, num_stages: int) -> str:
    """Return the channel key for ACTIVATIONS or GRADIENTS between stage `link` and the one behind it."""
    return key + (_WRAPPED if link == num_stages - 1 else _ODD * (link % 2))


@dataclass(frozen=True)
class Mesh:
    """The view that one rank has of the job: its topology, rank, device, communicators and meter.

    wire_state: what the wires of its shard group remember from step to step.
    notice: a line about what has been measured to make it, for rank 0 to print; "" if nothing has.
    """

    topology: Topology
    rank: int
    device: torch.device
    communicators: Mapping[str, Communicator]
    meter: Meter
    wire_state: WireState = NOTHING_REMEMBERED
    notice: str = ""

    def axis(self, name: str) -> Communicator:
        """Return the communicator of an axis: "tp", "dp", "pp", "ends" or "world"."""
        return self.communicators[name]

    @property
    def gathering(self) -> Communicator:
        """The ranks of `partition` over a second group: parameters are sent beside gradients, in any order."""
        return self.communicators.get(SHARD_GATHERING, self.communicators[GATHERING])

    @property
    def partition(self) -> Communicator:
        """The ranks over which ZeRO partitions: the data-parallel axis, or a shard group of it."""
        return self.communicators.get(SHARDS, self.communicators["dp"])

    @property
    def weights(self) -> Communicator:
        """The ranks of `partition`, for gathers of partitioned parameters, which may be sent quantized."""
        return self.communicators.get(WEIGHTS, self.gathering)

    @property
    def secondary(self) -> Communicator:
        """The ranks over which parameters are partitioned a second time, in the node (hpZ)."""
        return self.communicators.get(SECONDARY, _ALONE)

    @property
    def replicas(self) -> Communicator:
        """The data-parallel ranks that hold the same partitions as this one."""
        return self.communicators.get(REPLICAS, _ALONE)

    def channel(self, key: str, *, link: int) -> Communicator:
        """Return the pipeline axis for ACTIVATIONS or GRADIENTS between stage `link` and the one behind it."""
        return self.communicators[channel_key(key, link, self.topology.pp)]

    @property
    def world(self) -> Communicator:
        return self.communicators[WORLD]

    @property
    def control(self) -> Communicator:
        """All ranks, over CPU tensors: what hosts exchange for themselves never waits for a device."""
        return self.communicators.get(CONTROL, self.world)

    @property
    def control_axes(self) -> tuple[Communicator, ...]:
        """The communicators over which messages of CPU tensors reach rank 0 one after the other: mostly `control`."""
        return tuple(self.communicators[key] for key in CONTROL_AXES if key in self.communicators) or (self.control,)

    def coordinate(self, axis: str) -> int:
        return self.topology.coordinate(self.rank, axis)


def gather_on_first(mesh: Mesh, row: Tensor) -> Tensor | None:
    """Return every rank's row of numbers, [size, n] in rank order, on rank 0, and None elsewhere.

    row: [n], on the CPU, of one length and dtype on all ranks.  Every other rank sends one message, on each axis that
    rank 0 is reached over.
    """
    rows = row.view(1, -1)
    for axis in mesh.control_axes:
        if axis.rank:
            axis.send(rows, 0).wait()
            return None
        gathered = rows.new_empty(axis.size, *rows.shape)
        gathered[0] = rows
        works = [axis.receive_into(gathered[rank], rank) for rank in range(1, axis.size)]
        for work in works:
            work.wait()
        rows = gathered.view(-1, len(row))
    return rows


def gather_json(communicator: Communicator, value: Any) -> list[Any]:
    """Return every rank's JSON-able value, in rank order, on every rank (text in byte tensors; nothing is pickled).

    communicator: one of CPU tensors, as `Mesh.control` is, so that no device is waited for.
    """
    row = _framed(communicator, value)
    gathered = row.new_empty(communicator.size * len(row))
    communicator.all_gather_into(gathered, row).wait()
    return _unframed(gathered.view(communicator.size, len(row)))


def gather_json_on_first(mesh: Mesh, value: Any) -> list[Any]:
    """Return every rank's JSON-able value, in rank order, on rank 0, and an empty list elsewhere; see `gather_json`."""
    rows = gather_on_first(mesh, _framed(mesh.control, value))
    return [] if rows is None else _unframed(rows)


def _framed(communicator: Communicator, value: Any) -> Tensor:
    """Return a value's text behind its length, uint8, as long as the longest of all ranks."""
    payload = json.dumps(value).encode()
    length = torch.tensor([len(payload)], dtype=torch.int64)
    communicator.all_reduce_scalars(length, "max").wait()
    text = payload.ljust(int(length.item()), b" ")
    return torch.frombuffer(bytearray(len(payload).to_bytes(8, "little") + text), dtype=torch.uint8)


def _unframed(rows: Tensor) -> list[Any]:
    texts = (bytes(row.tolist()) for row in rows)
    return [json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")]) for text in texts]
