"""Decides between one hop and two of a shard group's messages by a machine's description, where that is left open.

A real start times gathers (`comm/wires/hop_choice.py`); of a machine that is only described the model of time has them.
"""

from dataclasses import replace

from megazero.config.engine_sections import ZeroConfig
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import ACROSS, INSIDE, SHARDS, Topology
from megazero.planner.costs import collective_seconds, group_of
from megazero.planner.dry.rank import DryJob
from megazero.planner.hardware import Hardware
from megazero.units import format_bytes

_NBYTES = 1 << 24  # of a gather, the longest that a start times


def with_hops(job: DryJob, hardware: Hardware) -> tuple[DryJob, tuple[str, ...]]:
    """Return a run with as many hops as are faster, and a line with the reason if that was left open."""
    zero, line = decided_hops(job.config.zero, job.topology, job.nodes, hardware)
    return replace(job, config=replace(job.config, zero=zero)), (line,) if line else ()


def decided_hops(zero: ZeroConfig, topology: Topology, nodes: Nodes, hardware: Hardware) -> tuple[ZeroConfig, str]:
    """Return the settings with as many hops as are faster, and a line with the reason; "" if nothing was left open."""
    if zero.hierarchical_collectives != "auto":
        return zero, ""
    rank = topology.rank_of(pp=topology.pp // 2)
    whole, inside, across = (
        group_of(tuple(nodes.of_all(topology.group_of(rank, axis)))) for axis in (SHARDS, INSIDE, ACROSS)
    )
    takes_two, because = False, "a shard group is on one node, or has one rank, or unequal numbers, on each of several"
    if across.size > 1 < inside.size:
        one = collective_seconds(hardware, "all_gather", _NBYTES, whole)
        two = collective_seconds(hardware, "all_gather", _NBYTES / inside.size, across)
        two += collective_seconds(hardware, "all_gather", _NBYTES, inside)
        takes_two = two < one
        because = (
            f"{format_bytes(_NBYTES)} are gathered in {1000 * two:.3g} ms by two and in {1000 * one:.3g} ms by one"
            f" on {hardware.name}"
        )
    hops = "two hops" if takes_two else "one hop"
    line = f"hierarchical_collectives auto: {hops}, since {because}; a start measures it"
    return replace(zero, hierarchical_collectives=takes_two), line
