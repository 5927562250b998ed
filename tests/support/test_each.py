"""Tests of many cases as one test: all are tried, and those that fail are named."""

import pytest
from support.each import each


def test_all_are_tried_and_those_that_fail_are_named() -> None:
    tried = []

    @each("number, other", [(1, "a"), (2, "b"), (3, "c")], ids=lambda value: f"<{value}>")
    def check(number: int, other: str, fixture: str) -> None:
        tried.append((number, other, fixture))
        assert number == 2, other

    with pytest.raises(pytest.fail.Exception) as caught:
        check(fixture="f")
    assert tried == [(1, "a", "f"), (2, "b", "f"), (3, "c", "f")]
    told = str(caught.value)
    assert told.startswith("2 of 3 cases") and "case <1>, <a>:" in told and "case <3>, <c>:" in told
    assert "<2>" not in told and "assert number == 2" in told


@each("number", [1, 2], ids=["one", "two"])
@each("letter", "ab")
def test_what_raises_nothing_passes(number: int, letter: str, tmp_path: object) -> None:
    assert number in (1, 2) and letter in "ab" and tmp_path


def test_a_missing_failure_is_one() -> None:
    @each("error", [ValueError, TypeError])
    def check(error: type[Exception]) -> None:
        with pytest.raises(ValueError):
            raise error

    with pytest.raises((pytest.fail.Exception, TypeError), match="case <class 'TypeError'>"):
        check()

    @each("error", [ValueError])
    def silent(error: type[Exception]) -> None:
        with pytest.raises(error):
            pass

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        silent()
