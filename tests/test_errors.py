"""Tests of error messages, character by character, and of exit codes."""

import pytest
from support.each import each

from megazero.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FileError,
    Problem,
    TopologyError,
    TrainingError,
    UserError,
    raise_problems,
)

WIDTH = Problem("--hidden-size 10", "heads divide it", "8, 12")
SPLIT = Problem("--split 0", "some share is above 0")


def test_a_problem_says_what_was_given_the_rule_and_what_is_legal() -> None:
    assert str(WIDTH) == "--hidden-size 10\n    rule:  heads divide it\n    legal: 8, 12"
    assert str(SPLIT) == "--split 0\n    rule:  some share is above 0"


def test_one_problem_has_no_count() -> None:
    assert str(ConfigError(WIDTH)) == f"configuration error: {WIDTH}"
    assert ConfigError(WIDTH).render() == str(ConfigError(WIDTH))


def test_several_problems_are_counted_and_all_told() -> None:
    assert DataError(WIDTH, SPLIT).render() == f"2 data errors:\n{WIDTH}\n{SPLIT}"


def test_a_message_alone_has_no_empty_rule() -> None:
    error = CheckpointError("the folder is gone")
    assert error.problems == (Problem("the folder is gone", ""),)
    assert str(error) == "checkpoint error: the folder is gone"


@each(
    ("kind", "text", "code"),
    [
        (UserError, "error", 2),
        (ConfigError, "configuration error", 2),
        (DataError, "data error", 2),
        (CheckpointError, "checkpoint error", 2),
        (FileError, "file error", 2),
        (TopologyError, "topology error", 2),
        (TrainingError, "training stopped", 3),
    ],
)
def test_kinds(kind: type[UserError], text: str, code: int) -> None:
    with pytest.raises(UserError, match=f"^{text}: why$") as caught:
        raise kind("why")
    assert caught.value.exit_code == code


def test_problems_are_raised_all_at_once_or_not_at_all() -> None:
    raise_problems(ConfigError, [])
    with pytest.raises(ConfigError) as caught:
        raise_problems(ConfigError, (problem for problem in (WIDTH, SPLIT)))
    assert caught.value.problems == (WIDTH, SPLIT)
