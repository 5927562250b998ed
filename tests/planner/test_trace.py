"""Tests which rank's trace stands for a pipeline stage."""

from support.each import each

from megazero.planner.trace import JobTrace, RankTrace


def job(stages: int, taken: tuple[int, ...]) -> JobTrace:
    """Return a job of so many stages, of which some have a trace without events; a rank's number is its stage's."""
    ranks = tuple(RankTrace(stage, {"tp": 0, "pp": stage, "dp": 0}, {}, {}) for stage in taken)
    return JobTrace(world_size=stages, stages=stages, micro_batches=1, tokens=1, ranks=ranks)


@each(
    ("stages", "taken", "stands_for"),
    [
        (1, (0,), [0]),
        (2, (0, 1), [0, 1]),
        (3, (0, 1, 2), [0, 1, 2]),
        (6, (0, 3, 5), [0, 3, 3, 3, 3, 5]),
    ],
)
def test_a_stage_has_its_own_trace_or_the_middle_one(
    stages: int, taken: tuple[int, ...], stands_for: list[int]
) -> None:
    assert [job(stages, taken).of_stage(stage).rank for stage in range(stages)] == stands_for
