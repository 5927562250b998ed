"""How parameters are gathered changes nothing that is computed: options of ZeRO stage 3 against the reference."""

import itertools

import pytest
from support.reference import History
from support.training import SETTINGS, Cell, reference_history, train_cell, worst_error

BOUND = 1e-9
STEPS = 3

# What each option may be; the model has some 135,000 elements, its largest unit 44,000, a bias 60.
CHOICES = {
    "bucket": (1, 997, 16_777_216, 150_000),
    "overlap_comm": (True, False),
    "prefetch_bucket_size": (0, 30_000, 10**9),
    "param_persistence_threshold": (0, 200, 10**9),
    "max_reuse_distance": (0, 60_000),
}
# Every pair of choices of two options occurs.
COVER = [
    (1, True, 30_000, 200, 0),
    (1, False, 0, 10**9, 60_000),
    (1, True, 10**9, 0, 60_000),
    (997, True, 0, 200, 0),
    (997, False, 30_000, 0, 60_000),
    (997, True, 10**9, 10**9, 0),
    (16_777_216, True, 30_000, 10**9, 0),
    (16_777_216, False, 0, 0, 0),
    (16_777_216, False, 10**9, 200, 60_000),
    (150_000, True, 0, 0, 60_000),
    (150_000, False, 30_000, 200, 0),
    (150_000, False, 10**9, 10**9, 0),
]


def cell(row: tuple[int, ...], number: int) -> Cell:
    bucket, overlap, prefetch, persistence, reuse = row
    settings = {
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": overlap,
        "prefetch_bucket_size": prefetch,
        "param_persistence_threshold": persistence,
        "max_reuse_distance": reuse,
    }
    return Cell(dp=2, stage=3, accumulation=1 + number % 2, steps=STEPS, settings=settings)


CELLS = [cell(row, number) for number, row in enumerate(COVER)]


@pytest.fixture(scope="module")
def short_reference(corpus: str) -> History:
    return reference_history(corpus, steps=STEPS)


@pytest.mark.gloo
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_options_of_gathering_change_nothing(cell: Cell, corpus: str, short_reference: History) -> None:
    assert worst_error(train_cell(cell, corpus), short_reference) < BOUND


def test_the_cells_cover_every_pair() -> None:
    for (first, one), (second, other) in itertools.combinations(enumerate(CHOICES.values()), 2):
        missing = set(itertools.product(one, other)) - {(row[first], row[second]) for row in COVER}
        assert not missing, (first, second, missing)
