"""The plan of what a model retains of its forward, and what it computes again.

*Full* recomputation cuts the layers into segments; a recomputed segment retains only its input, the activation
*checkpoint*.  *Selective* recomputation retains everything but what the attention core computes.  The words are
Megatron-LM's (Korthikanti et al., arXiv 2205.05198).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from megazero.activations.recompute import Recomputation

Granularity = Literal["none", "selective", "full"]
Method = Literal["uniform", "block"]

# On a GPU a chunk must be large: every one reads and writes the gradient of the whole matrix.
LOGITS_CHUNK_BYTES: Mapping[str, int] = MappingProxyType({"cpu": 1 << 26, "cuda": 1 << 30})


class Segment(NamedTuple):
    """A segment of the model: layers [start, stop), which run together."""

    start: int
    stop: int
    is_recomputed: bool


@dataclass(frozen=True)
class ActivationPlan:
    """The choices of one model about recomputation, and the `Recomputation` that carries them out.

    recomputation: runs what is recomputed; None where nothing is, and in a dry run.
    method, num_layers: "uniform" recomputes all layers, in segments of num_layers; "block" the first num_layers, each
    on its own.
    logits_chunk_bytes: the largest chunk of the logits that exists at once, in bytes of the loss's dtype.
    """

    granularity: Granularity = "none"
    recomputation: Recomputation | None = None
    method: Method = "uniform"
    num_layers: int = 1
    logits_chunk_bytes: int = LOGITS_CHUNK_BYTES["cpu"]

    @property
    def core_recomputation(self) -> Recomputation | None:
        """The recomputation of the attention core, where it is recomputed on its own."""
        return self.recomputation if self.granularity == "selective" else None

    def with_recomputation(self, recomputation: Recomputation) -> "ActivationPlan":
        """Return the same choices, carried out by `recomputation`."""
        return replace(self, recomputation=recomputation)

    def num_checkpoints(self, total: int) -> int:
        """Return how many activation checkpoints a forward of `total` layers leaves."""
        return sum(segment.is_recomputed for segment in self.segments(total))

    def segments(self, total: int) -> tuple[Segment, ...]:
        """Cut `total` layers into the segments in which they run."""
        if self.granularity != "full":
            return (Segment(0, total, is_recomputed=False),)
        return tuple(_uniform(total, self.num_layers) if self.method == "uniform" else _block(total, self.num_layers))


def _uniform(total: int, length: int) -> Iterator[Segment]:
    for start in range(0, total, length):
        yield Segment(start, min(start + length, total), is_recomputed=True)


def _block(total: int, number: int) -> Iterator[Segment]:
    number = min(number, total)
    for layer in range(number):
        yield Segment(layer, layer + 1, is_recomputed=True)
    if number < total:
        yield Segment(number, total, is_recomputed=False)


NO_RECOMPUTATION = ActivationPlan()
