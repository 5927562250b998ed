"""Chooses between one hop and two for what a shard group on several nodes gathers and sums up, by timing gathers.

Sums send the same bytes over the same links the other way, so they take as many hops as gathers.
"""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from megazero.comm.bandwidth import gather_seconds
from megazero.comm.interface import Communicator
from megazero.comm.mesh import ACROSS_GATHERING, INSIDE_GATHERING, SHARD_GATHERING, Mesh
from megazero.comm.metered import sent_bytes
from megazero.comm.wires.shard_group import Wires
from megazero.comm.wires.two_hops import TwoHopCommunicator
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.nodes import Nodes, shortened
from megazero.parallel.topology import ACROSS, INSIDE
from megazero.units import format_bytes

_REPETITIONS = 5
# Messages grow until one hop takes as long, and no further than this: longer ones are hardly faster.
_LONG_SECONDS = 0.02
_FIRST_BYTES, _LARGEST_BYTES = 1 << 16, 1 << 24


class HopChoice(NamedTuple):
    """The wires with as many hops as are faster, and a line with the reason."""

    wires: Wires
    line: str


def choose_hops(wires: Wires, plain: Mapping[str, Communicator], mesh: Mesh, nodes: Nodes) -> HopChoice:
    """Return the same choice on every rank of the job; all of them call it at once, and reset the meter after it.

    plain: the communicators of the shard group and its parts, by key.  nodes: those that the ranks are on.  A dry run
    has no bandwidths, and takes two hops.
    """
    inside, across, whole = plain[INSIDE_GATHERING], plain[ACROSS_GATHERING], plain[SHARD_GATHERING]
    if across.size == 1:
        return _chosen(wires, False, "a shard group is on one node")
    if inside.size == 1:
        return _chosen(wires, False, f"a shard group has one rank, or unequal numbers, on each of {nodes.count} nodes")
    if not dist.is_initialized():  # the mesh of a dry run
        return _chosen(wires, True, "nothing can be measured in a dry run")
    two_hops = TwoHopCommunicator(inside, across, whole, FusedBuffers(_LARGEST_BYTES, mesh.device))

    def seconds(communicator: Communicator, nbytes: int) -> float:
        return gather_seconds(communicator, nbytes, mesh.control, mesh.device)

    nbytes = _FIRST_BYTES
    while nbytes < _LARGEST_BYTES and _all(mesh.control, [seconds(whole, nbytes)]).max() < _LONG_SECONDS:
        nbytes *= 4
    ways = (whole, two_hops, inside, across)
    own = [statistics.median(seconds(way, nbytes) for _ in range(_REPETITIONS)) for way in ways]
    figures = _all(mesh.control, own)  # [ranks, ways]
    one, two = figures[:, :2].amax(dim=0).tolist()
    speeds = []
    for axis, group, column in ((INSIDE, inside, 2), (ACROSS, across, 3)):
        slowest = int(figures[:, column].argmax())
        ranks = mesh.topology.group_of(slowest, axis)
        places = nodes.touched_by(ranks)
        speed = sent_bytes("all_gather", nbytes, group.size) / figures[slowest, column].item()
        where = f"node{'s' * (len(places) > 1)} {shortened(places)}"
        speeds.append(f"{format_bytes(speed)}/s {axis.removeprefix('dp_')} {where} (ranks {shortened(ranks)})")
    return _chosen(
        wires,
        two < one,
        f"{format_bytes(nbytes)} are gathered in {1000 * two:.1f} ms by two and in {1000 * one:.1f} ms by one; the"
        f" slowest groups send {' and '.join(speeds)}",
    )


def _chosen(wires: Wires, takes_two: bool, because: str) -> HopChoice:
    hops = "two hops" if takes_two else "one hop"
    chosen = replace(
        wires,
        hops_if_faster=False,
        gathers_in_hops=wires.gathers_in_hops or takes_two,
        sums_in_hops=wires.sums_in_hops or takes_two,
    )
    return HopChoice(chosen, f"hierarchical_collectives auto: {hops}, since {because}")


def _all(control: Communicator, figures: list[float]) -> torch.Tensor:
    """Return every rank's figures, [ranks, n]."""
    gathered = torch.empty(control.size, len(figures), dtype=torch.float64)
    control.all_gather_into(gathered.view(-1), torch.tensor(figures, dtype=torch.float64)).wait()
    return gathered
