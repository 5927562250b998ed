"""Tests chunks and splits: literal tables, and the rule of balance against all possible splits."""

import itertools
from collections.abc import Iterator

import pytest
from support.each import each

from megazero.parallel.layer_split import Chunk, Costs, balanced_split, chunks_of, cut, model_costs, whole_model


def test_a_model_that_is_not_cut() -> None:
    assert whole_model(5) == (Chunk(range(5), is_first=True, is_last=True),) == cut((5,))


def test_chunks_follow_each_other() -> None:
    assert cut((2, 3, 1, 0)) == (
        Chunk(range(0, 2), is_first=True, is_last=False),
        Chunk(range(2, 5), is_first=False, is_last=False),
        Chunk(range(5, 6), is_first=False, is_last=False),
        Chunk(range(6, 6), is_first=False, is_last=True),
    )


def test_chunks_are_dealt_out_to_stages() -> None:
    chunks = cut((1, 2, 3, 4, 5, 6))
    assert [[len(chunk.layers) for chunk in chunks_of(chunks, stage=i, num_stages=3)] for i in range(3)] == [
        [1, 4],
        [2, 5],
        [3, 6],
    ]
    assert chunks_of(chunks, stage=0, num_stages=1) == chunks


def test_costs_of_a_small_model() -> None:
    """The sizes are h 4, f 12, s 10, V 7, so a query has 5 keys on average, and each costs twice 4."""
    matrices = 4 * 12 + 4 * 4 + 4 * 12 + 12 * 4
    assert model_costs(hidden=4, matrices=matrices, heads_width=4, seq=10, padded_vocab=7) == Costs(
        matrices + 2 * 5 * 4, 8, 28
    )


@each(
    ("layers", "chunks", "costs", "split"),
    [
        (12, 1, Costs(1, 1, 5), (12,)),
        (12, 4, Costs(1, 0, 0), (3, 3, 3, 3)),
        (13, 4, Costs(1, 0, 0), (4, 3, 3, 3)),
        (14, 4, Costs(2, 1, 1), (3, 4, 4, 3)),
        (12, 4, Costs(1, 0, 5), (4, 4, 4, 0)),
        (13, 4, Costs(1, 0, 2), (4, 4, 4, 1)),
        (2, 4, Costs(1, 0, 0), (0, 1, 1, 0)),
        (3, 4, Costs(1, 0, 0), (1, 1, 1, 0)),
        (0, 2, Costs(1, 0, 0), (0, 0)),
    ],
)
def test_splits(layers: int, chunks: int, costs: Costs, split: tuple[int, ...]) -> None:
    found = balanced_split(layers, chunks, layer_cost=costs.layer, embedding_cost=costs.embedding, head_cost=costs.head)
    assert found == split


def test_a_large_vocabulary_on_a_small_model_leaves_the_last_chunk_without_layers() -> None:
    costs = model_costs(hidden=256, matrices=12 * 256**2, heads_width=256, seq=256, padded_vocab=50_304)
    assert costs.head > 8 * costs.layer
    split = [
        balanced_split(8, p, layer_cost=costs.layer, embedding_cost=costs.embedding, head_cost=costs.head)
        for p in (2, 3, 4)
    ]
    assert split == [(8, 0), (4, 4, 0), (2, 3, 3, 0)]


def all_splits(num_layers: int, num_chunks: int) -> Iterator[tuple[int, ...]]:
    """Yield every legal split, by trying all tuples."""
    for split in itertools.product(range(num_layers + 1), repeat=num_chunks):
        if sum(split) == num_layers and all(split[1:-1]):
            yield split


def chunk_costs(split: tuple[int, ...], costs: Costs) -> list[int]:
    found = [layers * costs.layer for layers in split]
    found[0] += costs.embedding
    found[-1] += costs.head
    return found


@each("num_chunks", [1, 2, 3, 4, 5])
@each("embedding", [0, 1, 3, 7])
@each("head", [0, 2, 3, 6, 20])
def test_against_every_split(num_chunks: int, embedding: int, head: int) -> None:
    for num_layers, layer in itertools.product(range(max(num_chunks - 2, 0), 8), (1, 3, 4)):
        costs = Costs(layer, embedding, head)
        best = min(
            all_splits(num_layers, num_chunks),
            key=lambda split: (
                sorted(chunk_costs(split, costs), reverse=True),
                [-layers for layers in split],
            ),
        )
        assert best == balanced_split(
            num_layers, num_chunks, layer_cost=layer, embedding_cost=embedding, head_cost=head
        ), (num_layers, costs)


def test_too_few_layers_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="1 layers"):
        balanced_split(1, 4, layer_cost=1, embedding_cost=0, head_cost=0)
