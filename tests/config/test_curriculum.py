"""Tests of the lengths of a curriculum, step by step against DeepSpeed's documented schedules."""

import math
from collections.abc import Callable
from itertools import accumulate

from support.configs import make_run
from support.each import each

from megazero.config import derived
from megazero.config.curriculum import Curriculum, CurriculumConfig, RowLengths, read_curriculum
from megazero.config.step_sizes import StepSizes
from megazero.errors import Problem

Rule = Callable[[int], int]


def grown(step: int, *, total: int, least: int, most: int, multiple: int, degree: int) -> int:
    """DeepSpeed's page on the configuration: a root (1: a line) from least to most, down to a multiple of the step.

    No length is below the first multiple from the least one on, and none is above the largest.
    """
    share = (float(step) / total) ** (1.0 / degree)
    length = math.floor(share * (most - least) + least)
    length -= length % multiple
    first = math.ceil(least / multiple) * multiple
    return min(max(length, first), most)


def listed(step: int, *, lengths: list[int], last: list[int]) -> int:
    """Its third schedule: each length up to its last step, that one included; the last length from there on."""
    for length, end in zip(lengths, last, strict=False):
        if step <= end:
            return length
    return lengths[-1]


LINES = [
    {"total": 30, "least": 8, "most": 64, "multiple": 8, "degree": 1},
    {"total": 30, "least": 8, "most": 64, "multiple": 8, "degree": 2},
    {"total": 1000, "least": 72, "most": 2048, "multiple": 8, "degree": 1},
    {"total": 777, "least": 10, "most": 1000, "multiple": 16, "degree": 3},
    {"total": 9, "least": 8, "most": 47, "multiple": 16, "degree": 1},  # a largest length that is no multiple
    {"total": 5, "least": 8, "most": 24, "multiple": 16, "degree": 1},  # a least one that isn't
    {"total": 1, "least": 3, "most": 5, "multiple": 1, "degree": 2},
    {"total": 4, "least": 16, "most": 16, "multiple": 8, "degree": 1},
    {"total": 4, "least": 8, "most": 10, "multiple": 100, "degree": 2},
]


@each("line", LINES)
def test_lengths_grow_as_deepspeed_says(line: dict[str, int]) -> None:
    style = "fixed_linear" if line["degree"] == 1 else "fixed_root"
    root = {} if line["degree"] == 1 else {"curriculum_root_degree": line["degree"]}
    config = CurriculumConfig(
        curriculum_learning=True,
        curriculum_schedule=style,
        curriculum_min_seqlen=line["least"],
        curriculum_max_seqlen=line["most"],
        curriculum_steps=line["total"],
        curriculum_seqlen_step=line["multiple"],
        **root,
    )
    same_at_every_step(config, lambda step: grown(step, **line), steps=3 * line["total"] + 40)


def test_listed_lengths_are_taken_in_turns() -> None:
    config = CurriculumConfig(
        curriculum_learning=True,
        curriculum_schedule="fixed_discrete",
        curriculum_min_seqlen=1,
        curriculum_max_seqlen=10,
        curriculum_seqlens=("1", "2", "3"),
        curriculum_last_steps=("5", "10"),
    )
    same_at_every_step(config, lambda step: listed(step, lengths=[1, 2, 3], last=[5, 10]), steps=20)


def same_at_every_step(config: CurriculumConfig, rule: Rule, *, steps: int) -> None:
    curriculum = read_curriculum(config, None)
    assert isinstance(curriculum, Curriculum)
    expected = [rule(step) for step in range(1, steps + 1)]
    assert [curriculum.length(step) for step in range(1, steps + 1)] == expected
    rows = curriculum.row_lengths()
    assert [rows.at(done) for done in range(steps)] == expected
    assert len(rows.lengths) == len(set(rows.lengths)) and rows.lengths[-1] == expected[-1]


def test_tokens_are_those_of_cut_rows_in_a_growing_batch() -> None:
    rows, sizes = RowLengths((0, 3, 4, 9), (2, 5, 6, 8)), StepSizes((0, 10, 17), (2, 4, 8))
    samples = list(accumulate((0 for _ in range(20)), lambda done, _: done + sizes.at(done), initial=0))
    steps = [rows.at(step) * (samples[step + 1] - samples[step]) for step in range(20)]
    tokens = list(accumulate(steps, initial=0))
    assert [rows.tokens_after(step, sizes) for step in range(21)] == tokens
    for limit in range(tokens[-1]):
        ends = max(step for step in range(21) if tokens[step] <= limit)
        assert rows.steps_until(limit, sizes) == ends
        begun = min(ends, 7)
        progress = {"steps": begun, "samples": samples[begun], "tokens": tokens[begun]}
        assert rows.steps_until(limit, sizes, **progress) == ends


GROWING = {
    **{"curriculum_learning": True, "curriculum_min_seqlen": 4, "curriculum_steps": 6, "curriculum_seqlen_step": 4},
    **{"seq_length": 16, "global_batch_size": 4, "micro_batch_size": 2},
}  # rows of 4 (steps 1 to 2... by the formula), 8, 12, 16 tokens


def test_a_run_in_tokens_ends_by_the_tokens_of_its_rows() -> None:
    rows = [grown(step, total=6, least=4, most=16, multiple=4, degree=1) for step in range(1, 30)]
    tokens = list(accumulate((4 * row for row in rows), initial=0))
    assert rows[:6] == [4, 8, 8, 12, 12, 16]
    for step in (1, 4, 9):
        for limit in (tokens[step], tokens[step + 1] - 1):
            assert derived.train_iters(make_run(**GROWING, train_iters=None, train_tokens=limit), 1) == step
    config = make_run(**GROWING, train_iters=None, train_tokens=tokens[9])
    whole = {"iteration": 4, "consumed_samples": 16, "consumed_tokens": 4 * 4 * 16}  # the first 4 steps had whole rows
    left = tokens[9] - 4 * 4 * 16
    more = max(step for step in range(20) if tokens[4 + step] - tokens[4] <= left)
    assert derived.last_iteration(config, 1, **whole) == 4 + more


def test_a_schedule_in_tokens_counts_those_of_its_rows() -> None:
    config = make_run(**GROWING, train_iters=20, lr_decay_tokens=500, lr_warmup_iters=3)
    lengths = derived.rate_lengths(config.optimizer, derived.run_length(config, 1))
    assert (lengths.unit, lengths.warmup, lengths.decay) == ("tokens", 4 * (4 + 8 + 8), 500)
    whole = make_run(
        **{**GROWING, "curriculum_learning": False}, train_iters=20, lr_decay_tokens=640, lr_warmup_iters=3
    )
    lengths = derived.rate_lengths(whole.optimizer, derived.run_length(whole, 1))
    assert (lengths.unit, lengths.warmup, lengths.decay) == ("samples", 12, 40)


@each(
    ("settings", "given", "legal"),
    [
        ({}, "--curriculum-schedule fixed_linear without --curriculum-steps", "--curriculum-steps STEPS"),
        ({"curriculum_max_seqlen": 20}, "--curriculum-max-seqlen 20", "--curriculum-max-seqlen 16"),
        ({"curriculum_min_seqlen": 17}, "--curriculum-min-seqlen 17 with a largest", "--curriculum-min-seqlen 16"),
        (
            {"curriculum_schedule": "fixed_discrete", "curriculum_seqlens": ("8", "16")},
            "--curriculum-seqlens 8 16 and no --curriculum-last-steps",
            "--curriculum-seqlens 8 16 and --curriculum-last-steps 1000",
        ),
        (
            {
                **{"curriculum_schedule": "fixed_discrete", "curriculum_seqlens": ("16", "8")},
                "curriculum_last_steps": ("5",),
            },
            "--curriculum-seqlens 16 8",
            "such as",
        ),
        (
            {
                **{"curriculum_schedule": "fixed_discrete", "curriculum_seqlens": ("4", "16")},
                "curriculum_last_steps": ("5",),
            },
            "--curriculum-seqlens 4 16",
            "such as",
        ),
    ],
)
def test_lengths_that_no_schedule_has(settings: dict[str, object], given: str, legal: str) -> None:
    problem = read_curriculum(CurriculumConfig(curriculum_learning=True, **settings), 16)
    assert isinstance(problem, Problem)
    assert problem.given.startswith(given) and legal in problem.legal and problem.rule
