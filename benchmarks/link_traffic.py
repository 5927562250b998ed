"""Formulas for the bytes that cross a link between two nodes in a training step, and for the time of the step.

They compare two layouts of the same work, with recomputed layers, on two nodes of two processes: tensor parallelism
across the nodes, and tensor parallelism inside them with ZeRO stage 2 across.  *Node bytes* leave one node in a step.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

NODES, PROCESSES = 2, 2  # nodes, and processes on each
WORLD_SIZE = NODES * PROCESSES
ELEMENT = 4  # bytes in fp32
# Bytes on the link for each byte of data, if the link is slow: a packet of 1514 bytes carries 1448, and every second
# one is acknowledged by 66 bytes the other way.
WIRE = (1514 + 66 / 2) / 1448


@dataclass(frozen=True)
class Work:
    """The work that is compared: the sizes of a model, and the number of samples of a step."""

    num_layers: int
    hidden_size: int
    seq_length: int
    vocab_size: int
    global_batch_size: int


@dataclass(frozen=True)
class Layout:
    """A layout of the processes.

    axis: the parallel axis ("tp" or "dp") whose groups communicate over the link.
    """

    name: str
    what: str
    tensor_parallel: int
    axis: str
    flags: tuple[str, ...]

    @property
    def data_parallel(self) -> int:
        return WORLD_SIZE // self.tensor_parallel

    @property
    def axis_size(self) -> int:
        """The number of processes in a group of the crossing axis."""
        return self.tensor_parallel if self.axis == "tp" else self.data_parallel

    @property
    def rings(self) -> int:
        """The number of groups of the crossing axis, each of which sends around a ring that leaves every node once."""
        return WORLD_SIZE // self.axis_size


ACROSS = Layout(
    "across",
    "tensor parallel 4 across nodes",
    tensor_parallel=4,
    axis="tp",
    flags=("--zero-stage", "0", "--allow-tensor-parallel-across-nodes"),
)
INSIDE = Layout(
    "inside",
    "tensor parallel 2 inside nodes, ZeRO stage 2 with data parallel 2 across",
    tensor_parallel=2,
    axis="dp",
    flags=("--zero-stage", "2"),
)
LAYOUTS = (ACROSS, INSIDE)


def process_numel(work: Work, tensor_parallel: int) -> int:
    """Return the number of parameters of one process.

    Matrices, the biases of column-parallel ones and the word embedding are sharded, the rest is replicated.
    """
    h = work.hidden_size
    block = (12 * h * h + 7 * h) // tensor_parallel + 6 * h
    rows = work.vocab_size // tensor_parallel + work.seq_length
    return work.num_layers * block + rows * h + 2 * h


def process_bytes(layout: Layout, work: Work) -> int:
    """Return the bytes that a process sends in a step on the axis that crosses the link.

    Tensor parallelism sends all-reduces of b s h elements: for each layer two in forward, two in backward, and one in
    recomputation, which stops before the second; one behind the embedding and one before the head, and three figures a
    token in its loss.  An all-reduce of N bytes among n processes sends 2 N (n-1)/n.  ZeRO stage 2 sends (n-1)/n of the
    gradients for each of m micro-batches, here one, and (n-1)/n of the parameters once.
    """
    n = layout.axis_size
    if layout.axis == "dp":
        micro_batches = 1
        return (micro_batches + 1) * ELEMENT * process_numel(work, layout.tensor_parallel) * (n - 1) // n
    tokens = work.global_batch_size // layout.data_parallel * work.seq_length
    reduced = (5 * work.num_layers + 2) * tokens * work.hidden_size + 3 * tokens
    return 2 * ELEMENT * reduced * (n - 1) // n


def node_bytes(layout: Layout, work: Work) -> int:
    """Return the bytes that leave a node over its link in a step."""
    return layout.rings * process_bytes(layout, work)


@dataclass(frozen=True)
class Prediction:
    """The prediction for a layout.

    compute: measured seconds of a step over links without a limit.  node_bytes: bytes that a node sends in a step, by
    formula.
    """

    compute: float
    node_bytes: int

    def seconds(self, mbit: float | None) -> float:
        """Return the predicted seconds of a step over links of so many Mbit/s; None: without a limit."""
        return self.compute if mbit is None else self.compute + 8e-6 * WIRE * self.node_bytes / mbit


def predicted_rate(across: Prediction, inside: Prediction, ratio: float) -> float | None:
    """Return the rate in Mbit/s below which `across` takes more than `ratio` times as long as `inside`.

    The rate is infinite where `across` takes as long even without a limit, and None where it does so at no rate.
    """
    bytes_left = across.node_bytes - ratio * inside.node_bytes
    seconds_left = ratio * inside.compute - across.compute
    if seconds_left <= 0:
        return math.inf
    return 8e-6 * WIRE * bytes_left / seconds_left if bytes_left > 0 else None


def measured_rate(points: Sequence[tuple[float, float]], ratio: float) -> float | None:
    """Return the rate at which the ratio is reached, on straight lines between points (logarithm of rate, ratio).

    Returns None where the ratio is not between those of two neighboring points.
    """
    ordered = sorted(points)
    for (low, more), (high, less) in itertools.pairwise(ordered):
        if less <= ratio <= more and less < more:
            return float(low * (high / low) ** ((more - ratio) / (more - less)))
    return None
