"""Lines that were passed over."""

from megazero.data.bad_lines import BadLines
from megazero.errors import DataError, Problem


def test_they_are_kept_in_order() -> None:
    bad = BadLines()
    assert (bad.count, bad.lines()) == (0, [])
    bad.note("a:1", "is JSON")
    bad.note_error(DataError(Problem("a:2", "is UTF-8", "something else"), Problem("b:1", "is JSON")))
    bad.extend(["c:1: is short", "c:2: is long"])
    assert bad.lines() == ["a:1: is JSON", "a:2: is UTF-8", "b:1: is JSON", "c:1: is short", "c:2: is long"]
    assert bad.count == 5


def test_they_can_be_taken_away() -> None:
    bad = BadLines()
    bad.note("a:1", "is JSON")
    bad.lines().clear()
    assert bad.take() == ["a:1: is JSON"]
    assert bad.take() == [] and bad.count == 0
    bad.note("a:2", "is JSON")
    assert bad.lines() == ["a:2: is JSON"]
