"""Problems and the errors that carry them."""

import pytest

from megazero.errors import ConfigError, DataError, Problem, TrainingError, UserError, raise_problems

FIRST = Problem("--num-attention-heads 7", "heads divide the hidden size", "6, 8")
SECOND = Problem("--lr -1", "a number, greater than 0")


def test_one_problem_reads_as_given_rule_and_legal() -> None:
    assert ConfigError(FIRST).render() == (
        "configuration error: --num-attention-heads 7\n    rule:  heads divide the hidden size\n    legal: 6, 8"
    )


def test_several_problems_are_counted_and_all_told() -> None:
    text = ConfigError(FIRST, SECOND).render()
    assert text.startswith("2 configuration errors:\n")
    assert str(FIRST) in text and str(SECOND) in text and "legal" not in str(SECOND)


def test_a_plain_message_is_a_problem_too() -> None:
    error = DataError("corpus.idx: truncated")
    assert error.render() == "data error: corpus.idx: truncated" == str(error)
    assert error.problems == (Problem("corpus.idx: truncated", ""),)


def test_exit_codes_tell_user_errors_from_a_stopped_run() -> None:
    assert (UserError.exit_code, ConfigError.exit_code, TrainingError.exit_code) == (2, 2, 3)


def test_raising_happens_only_with_problems() -> None:
    raise_problems(ConfigError, ())
    with pytest.raises(ConfigError) as caught:
        raise_problems(ConfigError, (problem for problem in (FIRST, SECOND)))
    assert caught.value.problems == (FIRST, SECOND)
