"""The parts of the data-parallel axis that a configuration asks for (`topology.py` describes them)."""

from dataclasses import replace
from itertools import groupby

from megazero.config.derived import num_replicas, secondary_size
from megazero.config.engine_sections import ZeroConfig
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import SHARDS, Topology


def data_axis(zero: ZeroConfig, topology: Topology, nodes: Nodes | None = None) -> Topology:
    """Return the topology with the parts of its data-parallel axis; nodes: those that the ranks are on; None: one."""
    divided = replace(topology, replicas=num_replicas(zero, topology.dp), secondary=secondary_size(zero))
    may_take_hops = (  # a choice that is left to measurements needs the groups of either
        zero.hierarchical_collectives or zero.mics_hierarchical_params_gather or zero.zero_quantized_gradients
    )
    return replace(divided, inside=_ranks_inside(divided, nodes)) if may_take_hops else divided


def _ranks_inside(topology: Topology, nodes: Nodes | None) -> int:
    """Return how many ranks of a shard group, neighbours, are on each of its nodes; 1 if the numbers differ."""
    if nodes is None:
        return topology.size(SHARDS)
    sizes = {len(list(run)) for group in topology.groups(SHARDS) for _, run in groupby(group, nodes.of)}
    return sizes.pop() if len(sizes) == 1 else 1
