"""The layout as text, for the start of a run: which rank is where, and which ranks communicate.

    pipeline 2 x data 2 x tensor 2 = 8 ranks on 2 nodes of 4 ranks; every rank with its (pp, dp, tp)
      node 0    0 (0,0,0)   1 (0,0,1)   2 (0,1,0)   3 (0,1,1)
      node 1    4 (1,0,0)   5 (1,0,1)   6 (1,1,0)   7 (1,1,1)
    who talks to whom, and on which nodes
      tensor    [0 1] node 0 | [2 3] node 0 | [4 5] node 1 | [6 7] node 1
      data      [0 2] node 0 | [1 3] node 0 | [4 6] node 1 | [5 7] node 1
      pipeline  [0 4] nodes 0 1 | [1 5] nodes 0 1 | [2 6] nodes 0 1 | [3 7] nodes 0 1

What is too much for a page is left out, where "..." stands; 0-7 stands for 0 1 2 3 4 5 6 7.
"""

from collections.abc import Iterator, Sequence

from megazero.parallel.nodes import Nodes, shortened
from megazero.parallel.topology import AXES, Topology

_TITLES = (("tensor", "tp"), ("data", "dp"), ("pipeline", "pp"))
_WIDTH = 100  # characters behind a line's title
_MOST_NODES = 16  # lines


def draw_layout(topology: Topology, nodes: Nodes) -> list[str]:
    """Return the lines of the picture: at most 22, and one for a single rank."""
    if topology.world_size == 1:
        return ["1 rank, which has the whole model and every sample"]
    return [
        f"{topology.describe()} on {nodes.describe()}; every rank with its (pp, dp, tp)",
        *_few([_node(topology, nodes, node) for node in range(nodes.count)], _MOST_NODES, gap="  ..."),
        "who talks to whom, and on which nodes",
        *(f"  {title:<9} {_groups(topology, axis, nodes)}" for title, axis in _TITLES),
    ]


def _node(topology: Topology, nodes: Nodes, node: int) -> str:
    width = len(str(topology.world_size - 1))
    title = f"node {node:>{len(str(nodes.count - 1))}}"
    return f"  {title:<9} {_as_fits([_place(topology, rank, width) for rank in nodes.ranks(node)], '   ')}"


def _place(topology: Topology, rank: int, width: int) -> str:
    return f"{rank:>{width}} ({','.join(str(topology.coordinate(rank, axis)) for axis in AXES)})"


def _groups(topology: Topology, axis: str, nodes: Nodes) -> str:
    if topology.size(axis) == 1:
        return "every rank alone"
    return _as_fits(list(_group_texts(topology, axis, nodes)), " | ")


def _group_texts(topology: Topology, axis: str, nodes: Nodes) -> Iterator[str]:
    for ranks in topology.groups(axis):
        touched = nodes.touched_by(ranks)
        yield f"[{shortened(ranks)}] node{'s' * (len(touched) > 1)} {shortened(touched)}"


def _few(items: Sequence[str], most: int, gap: str = "...") -> list[str]:
    """Return all items, or the first ones, a gap and the last one where there are more than `most`, gap included."""
    return list(items) if len(items) <= most else [*items[: most - 2], gap, items[-1]]


def _as_fits(items: Sequence[str], separator: str) -> str:
    """Join as many items as fit on a line, at least the first and the last."""
    most = min(len(items), _WIDTH)
    while most > 3 and len(separator.join(_few(items, most))) > _WIDTH:
        most -= 1
    return separator.join(_few(items, most))
