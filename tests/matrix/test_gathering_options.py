"""Tests that stage 3 trains the same with all options of gathering: bucket sizes, overlap, look-ahead, persistence."""

import itertools

import pytest
from support.reference import History
from support.training import LR, Cell, Outcome, max_relative, reference_history, train_cell, weight_errors

BOUND = 1e-9
STEPS = 3
# The model is small, since the smallest buckets make a message of every 32 elements.
MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4}
# Bucket sizes in elements: the smallest legal one, a prime, the default, and one for the whole model.
BUCKETS = (1, 499, 16_777_216, 10**12)
OVERLAP = (True, False)
# Elements of look-ahead: none, more than one block, everything.
LOOK_AHEAD = (0, 1500, 10**9)
# Largest persistent parameter in elements: none persists, all that are smaller than a matrix, everything.
PERSISTENT = (0, 40, 10**9)


def pairwise(*axes: tuple[object, ...]) -> list[tuple[object, ...]]:
    """Return few combinations in which every pair of values of two axes occurs; greedy, and the same every time."""
    everything = list(itertools.product(*axes))
    places = list(itertools.combinations(range(len(axes)), 2))
    missing = {(a, b, row[a], row[b]) for row in everything for a, b in places}
    chosen: list[tuple[object, ...]] = []
    while missing:
        best = max(everything, key=lambda row: len(missing & {(a, b, row[a], row[b]) for a, b in places}))
        missing -= {(a, b, best[a], best[b]) for a, b in places}
        chosen.append(best)
    return chosen


def cell_of(number: int, row: tuple[object, ...]) -> Cell:
    bucket, overlap, look_ahead, persistent = row
    settings = {
        **MODEL,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": overlap,
        "prefetch_bucket_size": look_ahead,
        "param_persistence_threshold": persistent,
    }
    tp, dp = ((1, 2), (2, 2), (1, 2), (1, 4))[number % 4]
    accumulation = 1 if bucket == 1 else (1, 2)[number % 2]
    return Cell(tp=tp, dp=dp, stage=3, accumulation=accumulation, steps=STEPS, settings=settings)


CELLS = [cell_of(number, row) for number, row in enumerate(pairwise(BUCKETS, OVERLAP, LOOK_AHEAD, PERSISTENT))]


@pytest.fixture(scope="module")
def small_reference(corpus: str) -> History:
    return reference_history(corpus, STEPS, **MODEL)


def gathered_elements(outcome: Outcome, cell: Cell) -> int:
    """Return the elements of whole parameters gathered in the last step."""
    sent = outcome.comm_bytes["dp"].get("all_gather", 0)
    return sent // 8 * cell.dp // (cell.dp - 1)


@pytest.mark.gloo
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_way_of_gathering_trains_the_same(cell: Cell, corpus: str, small_reference: History) -> None:
    outcomes = train_cell(cell, corpus)
    for outcome in outcomes:
        assert max_relative(outcome.losses, small_reference.losses) < BOUND
        assert max_relative(outcome.grad_norms, small_reference.grad_norms) < BOUND
    weights = outcomes[0].full(outcomes[1:])
    assert max(weight_errors(weights, small_reference.weights, LR).values()) < BOUND
    # The options are in effect: persistent parameters are published once a step, all others gathered for each use, but
    # for what has room until its next one.
    padded, _ = outcomes[0].layout
    persistent = outcomes[0].persistent_numel
    has_room = cell.settings["prefetch_bucket_size"] == 10**9 and cell.settings["overlap_comm"]
    if cell.settings["param_persistence_threshold"] == 10**9:
        assert gathered_elements(outcomes[0], cell) == padded
        assert outcomes[0].gathered_numel == (0, 0)
    else:
        once = cell.accumulation * (padded - persistent) + persistent
        found = gathered_elements(outcomes[0], cell)
        assert found == once if has_room else found > 1.5 * cell.accumulation * padded
        assert outcomes[0].gathered_numel[0] == 0
    if has_room:
        assert outcomes[0].gathered_numel[1] >= 0.95 * padded - persistent


def test_the_cover_is_one() -> None:
    rows = pairwise(BUCKETS, OVERLAP, LOOK_AHEAD, PERSISTENT)
    assert len(rows) <= 16
    for a, b in itertools.combinations(range(4), 2):
        axes = (BUCKETS, OVERLAP, LOOK_AHEAD, PERSISTENT)
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(axes[a], axes[b]))
