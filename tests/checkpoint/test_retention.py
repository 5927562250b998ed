"""Tests of retention: which steps' checkpoints go once a newer one is there."""

from support.each import each

from megazero.checkpoint.retention import Retention

STEPS = range(10, 101, 10)


@each(
    ("last", "every", "stay"),
    [
        (None, None, {*STEPS}),
        (1, None, {100}),
        (3, None, {80, 90, 100}),
        (99, None, {*STEPS}),
        (None, 40, {40, 80, 100}),  # Megatron-LM's --save-retain-interval: the newest stays besides
        (2, 30, {30, 60, 90, 100}),
        (2, 7, {70, 90, 100}),
    ],
)
def test_the_newest_stay_and_multiples(last: int | None, every: int | None, stay: set[int]) -> None:
    assert {*STEPS} - Retention(last, every).expired([*reversed(STEPS)]) == stay
