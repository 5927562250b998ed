"""Tests of solving for the three sizes of a batch: of the step, of a micro-batch, and the number of micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from megazero.config.batch import BatchSizes, GivenSizes, solve
from megazero.errors import Problem

SIZE = st.none() | st.integers(1, 40)


def test_any_two_give_the_third() -> None:
    expected = BatchSizes(64, 4, 2)
    assert solve(GivenSizes(train=64, micro=4), 8) == expected
    assert solve(GivenSizes(train=64, accumulation=2), 8) == expected
    assert solve(GivenSizes(micro=4, accumulation=2), 8) == expected
    assert solve(GivenSizes(64, 4, 2), 8) == expected


def test_one_alone_and_none() -> None:
    assert solve(GivenSizes(train=64), 8) == BatchSizes(64, 8, 1)
    assert solve(GivenSizes(micro=4), 8) == BatchSizes(32, 4, 1)
    assert solve(GivenSizes(accumulation=3), 8) == BatchSizes(None, None, 3)
    assert solve(GivenSizes(), 8) == BatchSizes(None, None, 1)


def test_accumulation_of_one_is_a_word_too() -> None:
    found = solve(GivenSizes(64, 4, 1), 8)
    assert isinstance(found, Problem)
    assert found.given == (
        "train_batch_size 64, train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 1"
        " on 8 data-parallel processes"
    )
    assert found.legal == "train_batch_size 32, gradient_accumulation_steps 2, train_micro_batch_size_per_gpu 8"


def test_what_does_not_divide_gets_the_neighbours() -> None:
    found = solve(GivenSizes(train=30, micro=4), 2, {"train": "T", "micro": "M", "accumulation": "A"})
    assert isinstance(found, Problem)
    assert found.given == "T 30, M 4 on 2 data-parallel processes" and "4 x 2 divides T" in found.rule
    assert found.legal == "T 32, T 24"
    alone = solve(GivenSizes(train=3), 8)
    assert isinstance(alone, Problem) and alone.legal == "train_batch_size 8"


@given(train=SIZE, micro=SIZE, accumulation=SIZE, ranks=st.integers(1, 9))
def test_sizes_fit_and_keep_what_was_said(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> None:
    found = solve(GivenSizes(train, micro, accumulation), ranks)
    fits = [
        (m, a)
        for m in ([micro] if micro else range(1, 41))
        for a in ([accumulation] if accumulation else range(1, 41))
        if train is None or m * a * ranks == train
    ]
    if isinstance(found, Problem):
        assert not fits and train is not None
    elif found.train is not None:
        assert found.micro is not None and found.train == found.micro * found.accumulation * ranks
        assert all(said in (None, kept) for said, kept in ((train, found.train), (micro, found.micro)))
        assert accumulation in (None, found.accumulation)
