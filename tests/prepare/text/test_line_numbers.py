"""Line numbers are right at any byte offset, and offsets in increasing order take a single pass over the file."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.errors import DataError
from megazero.prepare.text import bad_lines as line_numbers
from megazero.prepare.text.bad_lines import LineCounter
from megazero.prepare.text.inputs import JSON, InputFile

CONTENT = b"a\n\nbb\n\n\n" * 30 + b"end"


@given(places=st.lists(st.integers(0, len(CONTENT)), max_size=20), read_bytes=st.integers(1, 300))
def test_lines_before_any_place_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, places: list[int], read_bytes: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "numbers").write_bytes(CONTENT)
    (folder / "other").write_bytes(CONTENT[1:])
    counter = LineCounter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_numbers, "READ_BYTES", read_bytes)
        for place in places:
            assert counter.before(InputFile(str(folder / "numbers"), JSON), place) == CONTENT[:place].count(b"\n")
            if place % 3 == 0:
                assert counter.before(InputFile(str(folder / "other"), JSON), place) == CONTENT[1:][:place].count(b"\n")


def test_places_in_order_cost_one_pass(tmp_path: Path) -> None:
    """Bytes that have been counted are not read again: they may even change."""
    path = tmp_path / "a"
    path.write_bytes(CONTENT)
    counter = LineCounter()
    before = counter.before(InputFile(str(path), JSON), 100)
    path.write_bytes(b"x" * 100 + CONTENT[100:])
    assert counter.before(InputFile(str(path), JSON), 200) == before + CONTENT[100:200].count(b"\n")


def test_offsets_become_lines() -> None:
    asked: list[int] = []
    number = line_numbers.line_numbers(b"a\nb\n\nc", lambda: asked.append(1) or 7)
    assert [number(place) for place in (0, 1, 2, 2, 5, 6)] == [7, 7, 8, 8, 10, 10]
    assert asked == [1]


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a readable file"):
        LineCounter().before(InputFile(str(tmp_path / "none"), JSON), 3)
