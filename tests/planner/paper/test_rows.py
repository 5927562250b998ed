"""Tests how a figure is printed beside the paper's: its sign, and the error of what the paper has measured."""

from megazero.planner.paper.rows import PaperFigure, Table, lines_of


def test_measurements_have_an_error_and_theory_has_none() -> None:
    rows = (
        PaperFigure("measured", 50.0, 40.0, "TFLOP/s", ">", is_measured=True, note="28.9 GB"),
        PaperFigure("theory", 31.4, 31.4, "GB"),
        PaperFigure("alone", 7.0, None, "times"),
    )
    title, *lines = lines_of(Table("Figure 9", rows))
    assert title == "Figure 9"
    assert lines[0].split() == ["measured", "50.0000", ">40", "TFLOP/s", "+25", "%;", "28.9", "GB"]
    assert lines[1].split() == ["theory", "31.4000", "31.4", "GB"]
    assert lines[2].split() == ["alone", "7.0000", "times"]
    assert [row.to_json()["error"] for row in rows] == [0.25, None, None]
