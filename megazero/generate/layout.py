"""Layouts to generate with: one copy of the model, over tensor-parallel ranks and pipeline stages.  Pure.

There is no data parallelism: tensor size times pipeline size is the number of processes.  Stages are cut by what they
hold, not by what they compute: for one text they take turns, so the sum of their times is the same however it is cut,
while memory is what a single process may be short of.
"""

import math
from collections.abc import Iterator

from megazero.config.derived import ffn_hidden_size, max_position_embeddings, padded_vocab_size
from megazero.config.model import ModelConfig
from megazero.config.near import flags, near_divisors
from megazero.errors import Problem, TopologyError, raise_problems
from megazero.parallel.stages import Chunk, balanced_split, chunks_of, cut
from megazero.parallel.topology import Topology

_TENSOR, _STAGES = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


def choose_layout(model: ModelConfig, *, tp: int, pp: int, world_size: int) -> Topology:
    """tp x pp processes for `model`.  Raises TopologyError with everything that speaks against it."""
    raise_problems(TopologyError, _problems(model, tp, pp, world_size))
    return Topology(tp=tp, pp=pp)


def stage_chunks(model: ModelConfig, vocab_size: int, *, stage: int, layout: Topology) -> tuple[Chunk, ...]:
    """What a pipeline stage holds: one chunk, the largest of them (by matrices) as small as can be."""
    hidden, rows = model.hidden_size, padded_rows(vocab_size, layout)
    split = balanced_split(
        model.num_layers,
        layout.pp,
        layer_cost=hidden * (4 * hidden + 2 * ffn_hidden_size(model)),
        embedding_cost=hidden * (rows + max_position_embeddings(model)),
        head_cost=hidden * rows,
    )
    return chunks_of(cut(split), stage=stage, num_stages=layout.pp)


def padded_rows(vocab_size: int, layout: Topology) -> int:
    """Rows of matrices as wide as the vocabulary, no more of them than an even cut needs."""
    return padded_vocab_size(vocab_size, divisible_by=1, tensor_parallel_size=layout.tp)


def _problems(model: ModelConfig, tp: int, pp: int, world_size: int) -> Iterator[Problem]:
    heads, inner, most_stages = model.num_attention_heads, ffn_hidden_size(model), model.num_layers + 2
    cuttable = math.gcd(heads, inner)
    if tp < 1 or cuttable % tp:
        yield Problem(
            f"{_TENSOR} {tp}",
            f"every process has as many of the {heads} heads, and of the {inner} inner elements of a feed-forward"
            " layer, as any other: the size divides both",
            flags(_TENSOR, near_divisors(cuttable, tp)),
        )
    if not 1 <= pp <= most_stages:
        yield Problem(
            f"{_STAGES} {pp}",
            f"every pipeline stage has one of the {model.num_layers} layers; only the first, with the embedding, and"
            " the last, with the head, may have none",
            f"{_STAGES} 1 to {most_stages}",
        )
    if tp * pp != world_size:
        fitting = [
            f"{_TENSOR} {size} {_STAGES} {world_size // size}"
            for size in range(1, world_size + 1)
            if world_size % size == 0 and cuttable % size == 0 and world_size // size <= most_stages
        ]
        yield Problem(
            f"{_TENSOR} {tp} {_STAGES} {pp} on {_processes(world_size)}",
            "the processes hold one copy of the model: tensor size x pipeline size is their number",
            "; ".join([_processes(tp * pp)] * (tp * pp > 0) + fitting),
        )


def _processes(number: int) -> str:
    return f"{number} process{'' if number == 1 else 'es'}"
