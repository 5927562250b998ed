"""The nodes of ranks, and the layouts that they rule out.

A *node* is a machine: ranks on one communicate over links that are tens of times faster than those between two.
Launchers number ranks node by node, so that consecutive ranks share one.  A group *crosses* nodes when it lies on
several.

Tensor parallelism stays inside a node unless the user insists (ZeRO, sections 1 and 8: model parallelism loses
its efficiency beyond one node; data parallelism and pipelines bear it better).
"""

import bisect
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megazero.errors import Problem
from megazero.parallel.topology import Topology

_TASKS = re.compile(r"([1-9]\d*)(?:\(x([1-9]\d*)\))?")


@dataclass(frozen=True)
class Nodes:
    """The number of ranks of every node, in the order of ranks."""

    ranks_per_node: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.ranks_per_node and min(self.ranks_per_node) > 0, f"nodes have ranks: {self.ranks_per_node}"

    @property
    def count(self) -> int:
        return len(self.ranks_per_node)

    @property
    def world_size(self) -> int:
        """The ranks of all nodes."""
        return sum(self.ranks_per_node)

    def of(self, rank: int) -> int:
        """Return the node that `rank` is on, counted from 0."""
        return self.of_all([rank])[0]

    def of_all(self, ranks: Iterable[int]) -> list[int]:
        """Return the node that each of these ranks is on."""
        ends = list(itertools.accumulate(self.ranks_per_node))
        return [bisect.bisect_right(ends, rank) for rank in ranks]

    def ranks(self, node: int) -> range:
        """Return the ranks on a node."""
        first = sum(self.ranks_per_node[:node])
        return range(first, first + self.ranks_per_node[node])

    def touched_by(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the nodes that these ranks are on, in order."""
        return tuple(sorted(set(self.of_all(ranks))))

    def describe(self) -> str:
        """Return the nodes as text: `2 nodes of 8 ranks`, `3 nodes of 8(x2),4 ranks`."""
        sizes = str(self.ranks_per_node[0]) if len(set(self.ranks_per_node)) == 1 else self.sizes()
        noun = "rank" if self.ranks_per_node == (1,) * self.count else "ranks"
        return f"{self.count} node{'s' * (self.count > 1)} of {sizes} {noun}"

    def sizes(self) -> str:
        """Return the ranks of every node in the form that `parse_tasks_per_node` reads: `8(x2),4`."""
        runs = [(size, len(list(run))) for size, run in itertools.groupby(self.ranks_per_node)]
        return ",".join(str(size) if times == 1 else f"{size}(x{times})" for size, times in runs)


def parse_tasks_per_node(text: str) -> tuple[int, ...]:
    """Parse Slurm's tasks per node, "8(x2),4" as (8, 8, 4); raise ValueError for text of another form."""
    matches = [_TASKS.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise ValueError(f"{text!r} is no list of tasks per node")
    return tuple(int(match[1]) for match in matches if match for _ in range(int(match[2] or 1)))


def shortened(numbers: Sequence[int]) -> str:
    """Format ranks as text: `0 1 2 3`; of many, `0-7` if consecutive and else `0 8 16 ... 120`."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) <= 4:
        return " ".join(map(str, numbers))
    if list(numbers) == list(range(first, last + 1)):
        return f"{first}-{last}"
    return " ".join([*map(str, numbers[:3]), *(["..."] if len(numbers) > 5 else map(str, numbers[3:-1])), str(last)])


def crossing_groups(topology: Topology, axis: str, nodes: Nodes) -> tuple[tuple[int, ...], ...]:
    """Return the groups along `axis` that lie on more than one node."""
    return tuple(group for group in topology.groups(axis) if len(nodes.touched_by(group)) > 1)


def problems_of_placement(topology: Topology, nodes: Nodes, allowed: bool) -> Iterator[Problem]:
    """Yield the problems of a layout on these nodes; `allowed`: tensor-parallel groups may cross them."""
    crossing = () if allowed else crossing_groups(topology, "tp", nodes)
    if not crossing:
        return
    ranks, touched = (shortened(numbers) for numbers in (crossing[0], nodes.touched_by(crossing[0])))
    yield Problem(
        f"--tensor-model-parallel-size {topology.tp} --rank-order {'-'.join(topology.order)} on {nodes.describe()}:"
        f" ranks {ranks} are a group, on nodes {touched}",
        "a tensor-parallel group is inside one node: it sums up activations twice in every layer's forward and twice"
        " in its backward, and the link between nodes is tens of times slower than the one inside",
        ", ".join((*_inside(topology, nodes), "--allow-tensor-parallel-across-nodes")),
    )


def _inside(topology: Topology, nodes: Nodes) -> Iterator[str]:
    """Yield flags that keep every tensor-parallel group inside a node: a smaller degree, another rank order."""
    for degree in range(topology.tp - 1, 0, -1):
        # Whatever the degree divides, its divisors divide too: heads, widths, the world.
        fewer = replace(topology, tp=degree, dp=topology.dp * (topology.tp // degree))
        if topology.tp % degree == 0 and not crossing_groups(fewer, "tp", nodes):
            yield f"--tensor-model-parallel-size {degree}"
            break
    order = (*(axis for axis in topology.order if axis != "tp"), "tp")
    if order != topology.order and not crossing_groups(replace(topology, order=order), "tp", nodes):
        yield f"--rank-order {'-'.join(order)}"
