"""Tests of the parts of pictures that all of them share."""

from xml.etree import ElementTree

import pytest
from support.each import each

from megazero.svg import legend, picture, round_numbers, round_up, text


def test_a_picture_is_a_file_with_both_schemes() -> None:
    svg = picture(100, 50, [text(1, 2, "a < b", "title"), *legend(0, 20, [("one", "#123456")])], label='"x"')
    root = ElementTree.fromstring(svg)
    assert (root.get("viewBox"), root.get("aria-label")) == ("0 0 100 50", '"x"')
    assert "prefers-color-scheme: dark" in svg
    assert [element.text for element in root.iter() if element.tag.endswith("text")] == ["a < b", "one"]


@each(("amount", "expected"), [(1, 1), (1.1, 2), (0.021, 0.05), (6, 10), (0.1, 0.1), (20, 20)])
def test_round_up(amount: float, expected: float) -> None:
    assert round_up(amount) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (2.1, 3.9, [2.5, 3.0, 3.5]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert round_numbers(low, high, 5) == pytest.approx(expected)
