"""The split of a model's layers into the chunks of pipeline stages.

A *chunk* is a run of consecutive layers; the first also has the embedding, the last the final norm and the vocabulary
head.  Chunk c lies on pipeline stage c mod p, so that a stage with v chunks has every p-th: activations go from stage
to stage, and from the last back to the first.

A *split* is the number of layers of each chunk.  A slot of the schedule takes as long as its slowest chunk, so the
balanced split makes the costliest chunk as cheap as it can be, then the second costliest, and so on; what is left open
goes to earlier chunks.  Costs are multiply-adds, and the head's are those of several layers: the last chunk has fewer
of them, or none.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Chunk:
    """A run of consecutive layers; is_first: with the embedding before them, is_last: with the head after them."""

    layers: range
    is_first: bool = True
    is_last: bool = True


def whole_model(num_layers: int) -> tuple[Chunk, ...]:
    """Return the only chunk of a model that is not cut."""
    return (Chunk(range(num_layers)),)


def cut(split: Sequence[int]) -> tuple[Chunk, ...]:
    """Return chunks of so many layers each, in the order of the model."""
    starts = [sum(split[:index]) for index in range(len(split))]
    last = len(split) - 1
    return tuple(
        Chunk(range(start, start + length), index == 0, index == last)
        for index, (start, length) in enumerate(zip(starts, split, strict=True))
    )


def chunks_of(chunks: Sequence[Chunk], *, stage: int, num_stages: int) -> tuple[Chunk, ...]:
    """Return the chunks that lie on a pipeline stage, in the order of the model."""
    return tuple(chunks[stage::num_stages])


class Costs(NamedTuple):
    """The multiply-adds of a token's forward; a backward takes twice as many of each."""

    layer: int
    embedding: int
    head: int


def model_costs(*, hidden: int, matrices: int, heads_width: int, seq: int, padded_vocab: int) -> Costs:
    """Return the costs of a model with h = hidden, a d = heads_width, s = seq, V = padded_vocab.

    layer:      the elements of its matrices (GPT-2: 4 h^2 + 2 h f), and s a d of its attention: scores and their sum
                over values take 2 s a d, and the causal mask leaves half
    embedding:  2 h, two vectors that are read and summed; no product, but about as long
    head:       h V
    """
    return Costs(matrices + seq * heads_width, 2 * hidden, hidden * padded_vocab)


def balanced_split(
    num_layers: int, num_chunks: int, *, layer_cost: int, embedding_cost: int, head_cost: int
) -> tuple[int, ...]:
    """Return the number of layers of every chunk; only the first and the last of several may have none.

    Of all splits it has the least largest cost of a chunk, of these the least second largest, and so on, and of those
    that still tie the one with most layers in front.
    """
    last = num_chunks - 1
    split = [int(0 < chunk < last) for chunk in range(num_chunks)]
    left = num_layers - sum(split)
    assert left >= 0, f"{num_layers} layers don't reach for {num_chunks} chunks"
    costs = [layers * layer_cost for layers in split]
    costs[0] += embedding_cost
    costs[last] += head_cost
    # Each layer goes to the chunk that is cheapest so far: layers are alike, so no later one makes that a bad choice.
    cheapest = [(cost, chunk) for chunk, cost in enumerate(costs)]
    heapq.heapify(cheapest)
    for _ in range(left):
        cost, chunk = cheapest[0]
        split[chunk] += 1
        heapq.heapreplace(cheapest, (cost + layer_cost, chunk))
    return tuple(split)
