"""Layouts to generate and evaluate with: the model over tensor-parallel ranks and pipeline stages.  Pure.

To generate there is one copy of it, so tensor size times pipeline size is the number of processes; an evaluation has as
many copies as fit.  Stages are cut by memory, not by computation: for one text they take turns, so the sum of their
times is the same however the model is cut, while memory is what a single process may be short of.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from megazero.config.derived import (
    block_matrices,
    ffn_hidden_size,
    max_position_embeddings,
    padded_vocab_size,
)
from megazero.config.model import ModelConfig
from megazero.config.nearest import flags, near_divisors
from megazero.errors import Problem, TopologyError, raise_problems
from megazero.parallel.layer_split import Chunk, balanced_split, chunks_of, cut
from megazero.parallel.nodes import Nodes, problems_of_placement
from megazero.parallel.topology import Topology

_TENSOR, _STAGES = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
ACROSS = "--allow-tensor-parallel-across-nodes"


def choose_layout(
    model: ModelConfig, *, tp: int, pp: int, nodes: Nodes, across_nodes: bool = False, with_copies: bool = False
) -> Topology:
    """Return a layout of tp x pp processes for `model` on `nodes`.

    across_nodes: whether the processes of one layer may be on several nodes.  with_copies: whether processes that are
    left over hold further copies of the model, along the data-parallel axis.

    Raises TopologyError with all rules that it breaks.
    """
    world_size = nodes.world_size
    raise_problems(TopologyError, _problems(model, tp, pp, world_size, with_copies))
    layout = Topology(tp=tp, pp=pp, dp=world_size // (tp * pp))
    fitting = _fitting(model, world_size, with_copies)
    inside = [each for each in fitting if not any(problems_of_placement(each, nodes, False))]
    # Unlike training, sizes whose product is smaller leave processes over, and there is one rank order.
    problems = [
        replace(
            problem, given=f"{_spelt(layout)} on {nodes.describe()}", legal="; ".join([*map(_spelt, inside), ACROSS])
        )
        for problem in problems_of_placement(layout, nodes, across_nodes)
    ]
    raise_problems(TopologyError, problems)
    return layout


def stage_chunks(model: ModelConfig, vocab_size: int, *, stage: int, layout: Topology) -> tuple[Chunk, ...]:
    """Return a pipeline stage's one chunk, cut so that the largest chunk (by matrices) is as small as can be."""
    hidden, rows = model.hidden_size, padded_rows(vocab_size, layout)
    positions = max_position_embeddings(model) if model.position_embedding_type == "learned_absolute" else 0
    split = balanced_split(
        model.num_layers,
        layout.pp,
        layer_cost=block_matrices(model),
        embedding_cost=hidden * (rows + positions),
        head_cost=hidden * rows,
    )
    return chunks_of(cut(split), stage=stage, num_stages=layout.pp)


def padded_rows(vocab_size: int, layout: Topology) -> int:
    """Return the rows of matrices as wide as the vocabulary, padded no further than an even cut needs."""
    return padded_vocab_size(vocab_size, divisible_by=1, tensor_parallel_size=layout.tp)


def _problems(model: ModelConfig, tp: int, pp: int, world_size: int, with_copies: bool) -> Iterator[Problem]:
    heads, inner, most_stages = model.num_attention_heads, ffn_hidden_size(model), _most_stages(model)
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
    size = tp * pp
    if size != world_size and not (with_copies and size > 0 and world_size % size == 0):
        rule = "the processes hold one copy of the model: tensor size x pipeline size is their number"
        if with_copies:
            rule = "the processes hold whole copies of the model: tensor size x pipeline size divides their number"
        yield Problem(
            f"{_spelt(Topology(tp=tp, pp=pp))} on {_processes(world_size)}",
            rule,
            "; ".join([_processes(size)] * (size > 0) + [*map(_spelt, _fitting(model, world_size, with_copies))]),
        )


def _fitting(model: ModelConfig, world_size: int, with_copies: bool) -> list[Topology]:
    """Return the layouts of so many processes that suit the model."""
    cuttable = math.gcd(model.num_attention_heads, ffn_hidden_size(model))
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return [
        Topology(tp=tp, pp=pp, dp=world_size // (tp * pp))
        for tp in sizes
        for pp in sizes
        if cuttable % tp == 0 and pp <= _most_stages(model)
        if tp * pp == world_size or (with_copies and world_size % (tp * pp) == 0)
    ]


def _most_stages(model: ModelConfig) -> int:
    """Return the most stages: every layer alone, and the embedding and the head."""
    return model.num_layers + 2


def _spelt(layout: Topology) -> str:
    return f"{_TENSOR} {layout.tp} {_STAGES} {layout.pp}"


def _processes(number: int) -> str:
    return f"{number} process{'' if number == 1 else 'es'}"
