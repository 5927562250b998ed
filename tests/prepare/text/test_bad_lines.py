"""Tests of the list of input lines that were skipped."""

from megazero.prepare.text.bad_lines import BadLines


def test_they_are_kept_in_order() -> None:
    bad = BadLines()
    assert (bad.count, bad.lines()) == (0, [])
    bad.add("a:1", "is JSON")
    bad.add("b:1", "is UTF-8")
    assert bad.lines() == ["a:1: is JSON", "b:1: is UTF-8"]
    assert bad.count == 2


def test_they_can_be_taken_away() -> None:
    bad = BadLines()
    bad.add("a:1", "is JSON")
    bad.lines().clear()
    assert bad.pop_lines() == ["a:1: is JSON"]
    assert bad.pop_lines() == [] and bad.count == 0
    bad.add("a:2", "is JSON")
    assert bad.lines() == ["a:2: is JSON"]
