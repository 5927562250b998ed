"""The wires of a shard group: how what ZeRO gathers and sums up travels.  Communicators are stacked here alone.

plain        every collective is one of the whole shard group
two hops     inside the nodes and across them, so that a byte crosses once for each node (`two_hops.py`)
quantized    blocks of integers with a scale each, for gathers of weights or sums of gradients (`quantized.py`)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazero.comm.interface import Communicator
from megazero.comm.mesh import ACROSS_GATHERING, INSIDE_GATHERING, SHARD_GATHERING, WEIGHTS
from megazero.comm.wires.codec import BlockCodec
from megazero.comm.wires.error_feedback import ErrorFeedback
from megazero.comm.wires.quantized import QuantizedGather, QuantizedReduceScatter
from megazero.comm.wires.two_hops import TwoHopCommunicator
from megazero.comm.wires.wire_state import WireState
from megazero.memory.lease import Scratch
from megazero.parallel.topology import ACROSS, INSIDE, SHARDS


@dataclass(frozen=True)
class Wires:
    """The choice of wires.

    gathers_in_hops, sums_in_hops: whether plain ones take two hops.  hops_if_faster: both do where that is measured to
    be faster (`hop_choice.py`).  weights: the codec of gathers of partitioned parameters; gradients: that of
    reductions, which then are two exchanges; None: plain.
    error_beta: the weight of older errors in the feedback of what reductions round off; None: there is no feedback.
    error_reset_steps: the reductions of a bucket after which its errors are forgotten.
    """

    gathers_in_hops: bool = False
    sums_in_hops: bool = False
    hops_if_faster: bool = False
    weights: BlockCodec | None = None
    gradients: BlockCodec | None = None
    error_beta: float | None = None
    error_reset_steps: int = 1024


PLAIN = Wires()


class Stack(NamedTuple):
    """The communicators of a shard group, by key, that are not plain, and what they remember."""

    communicators: dict[str, Communicator]
    state: WireState


def stack(wires: Wires, plain: Mapping[str, Communicator], scratch: Scratch, device: torch.device, rank: int) -> Stack:
    """Make the communicators of a shard group that are not plain.

    plain: the metered ones by key, of one rank where there is no such group.  rank: this one's number in the job, by
    which ranks round stochastically each in its own way.
    """
    assert not wires.hops_if_faster, "hops are chosen before communicators are stacked"
    made: dict[str, Communicator] = {}
    generators: dict[str, torch.Generator] = {}
    feedback: ErrorFeedback | None = None
    gathering, sums = plain[SHARD_GATHERING], plain[SHARDS]
    inside, across = plain[INSIDE], plain[ACROSS]
    if wires.gathers_in_hops:
        first, second = plain[INSIDE_GATHERING], plain[ACROSS_GATHERING]
        gathering = made[SHARD_GATHERING] = TwoHopCommunicator(first, second, gathering, scratch)
    if wires.weights is not None:
        generator = _generator(device, 2 * rank)
        generators |= {WEIGHTS: generator} if wires.weights.stochastic else {}
        made[WEIGHTS] = QuantizedGather(gathering, wires.weights, scratch, generator=generator)
    if wires.gradients is not None:
        if wires.error_beta is not None:
            feedback = ErrorFeedback(wires.error_beta, wires.error_reset_steps, scratch.keep)
        codec, generator = wires.gradients, _generator(device, 2 * rank + 1)
        generators |= {SHARDS: generator} if codec.stochastic else {}
        made[SHARDS] = QuantizedReduceScatter(
            inside, across, sums, codec, codec, scratch, feedback=feedback, generator=generator
        )
    elif wires.sums_in_hops:
        made[SHARDS] = TwoHopCommunicator(inside, across, sums, scratch)
    layout = f"{device.type}, {across.size} x {inside.size} ranks, {wires.weights}, {wires.gradients}"
    # An exchange inside the node encodes a slice for every rank, one across nodes the sums for those across.
    rows = [across.size * inside.size] * (inside.size > 1) + [across.size] * (across.size > 1)
    return Stack(made, WireState(layout, feedback, rows, generators))


def _generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator for rounding alone: draws from torch's default one would change the masks of dropout.

    A recomputed forward, which begins with the state that the default one had, gathers at other moments.
    """
    return torch.Generator(device).manual_seed(seed)
