"""A small run of the count of samples over restarts; it fails where one is read twice."""

from pathlib import Path

import pytest
import restarts

from megazero.data.reading import Reading


def test_a_small_count_finds_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert restarts.main(["--samples", "1e5", "--scale", "0.0005", "--output", str(tmp_path / "page.md")]) == 0
    rows = [line.split(" | ") for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows[2:]] == ["a", "b", "c"]
    assert all(row[3] == "0" and int(row[2]) > 0 for row in rows[2:])


def test_a_sample_that_is_read_twice_is_counted() -> None:
    marks = restarts.Marks(100 * restarts.UNIT + 1)
    reading = Reading(0, 100 * restarts.UNIT + 1, restarts.UNIT)
    restarts.mark(marks, reading, 60, restarts.UNIT)
    assert marks.twice == 0
    restarts.mark(marks, reading.after(50, restarts.UNIT), 60, restarts.UNIT)
    assert marks.twice == 10 and marks.epoch == 1 and marks.unread == [0]
