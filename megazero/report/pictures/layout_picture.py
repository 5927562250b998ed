"""Draws a layout: every rank with its place, by pipeline stage, replica of the data and part of the layers.

A row is a pipeline stage, through which activations go down and gradients up; a frame holds the ranks that share the
layers of one replica (tensor parallelism); the frames of a row hold replicas, which average their gradients (data
parallelism).  The colour is that of the node.
"""

from collections.abc import Iterator

from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology
from megazero.svg import legend, text

_BOX, _GAP, _PAD, _ROW = 52, 4, 6, 74
_LEFT, _TOP = 92, 62
MOST_RANKS = 64
_NODES = ("#3d8bd4", "#e0702f", "#1b998b", "#9a7fd1", "#c2557a", "#8a8f2e", "#4bb3c4", "#a0714f")


def layout_parts(topology: Topology, nodes: Nodes) -> tuple[float, float, list[str]]:
    """Return the width, the height and the parts of the picture, of at most `MOST_RANKS` ranks."""
    assert topology.world_size <= MOST_RANKS, f"{topology.world_size} ranks have no room"
    frame = topology.tp * (_BOX + _GAP) - _GAP + 2 * _PAD
    width = max(_LEFT + topology.dp * (frame + 12) + 12, 640)
    parts = [
        text(16, 24, topology.describe(), "title"),
        *legend(16, 46, [(f"node {node}", _NODES[node % len(_NODES)]) for node in range(min(nodes.count, 8))]),
    ]
    for stage in range(topology.pp):
        y = _TOP + stage * _ROW
        parts.append(text(_LEFT - 12, y + 30, f"stage {stage}" if topology.pp > 1 else "all layers", "end"))
        for replica in range(topology.dp):
            x = _LEFT + replica * (frame + 12)
            parts += _replica(topology, nodes, stage, replica, x, y)
            if stage + 1 < topology.pp:
                middle = x + frame / 2
                parts.append(f'<path class="ink" d="M{middle:g} {y + 52}v22m-4 -6l4 6l4 -6" stroke-width="1.2"/>')
    foot = _TOP + topology.pp * _ROW
    parts += [text(16, foot + 4 + 18 * number, line) for number, line in enumerate(_lines(topology))]
    return width, foot + 18 * len(list(_lines(topology))), parts


def _replica(topology: Topology, nodes: Nodes, stage: int, replica: int, x: float, y: float) -> Iterator[str]:
    """Draw the frame of one replica's ranks on one stage."""
    frame = topology.tp * (_BOX + _GAP) - _GAP + 2 * _PAD
    yield f'<rect class="line" x="{x:g}" y="{y}" width="{frame}" height="52" rx="6"/>'
    for part in range(topology.tp):
        rank = topology.rank_of(pp=stage, dp=replica, tp=part)
        left, colour = x + _PAD + part * (_BOX + _GAP), _NODES[nodes.of(rank) % len(_NODES)]
        hint = f"<title>rank {rank}: stage {stage}, replica {replica}, part {part}, node {nodes.of(rank)}</title>"
        yield f'<rect x="{left:g}" y="{y + _PAD}" width="{_BOX}" height="40" rx="4" fill="{colour}">{hint}</rect>'
        yield f'<text class="on-colour middle" x="{left + _BOX / 2:g}" y="{y + 31}">{rank}</text>'


def _lines(topology: Topology) -> Iterator[str]:
    """Yield what the picture shows, for the axes that have several ranks."""
    if topology.tp > 1:
        yield f"a frame: {topology.tp} ranks that share every layer (tensor parallel)"
    if topology.dp > 1:
        yield f"side by side: {topology.dp} replicas; they sum gradients, and ZeRO shares their states (data parallel)"
    if topology.pp > 1:
        yield f"from top to bottom: {topology.pp} pipeline stages; activations go down, gradients up"
