"""Opens the page of a plan in headless Chromium: its controls show the recorded runs, and what lies between them."""

from pathlib import Path

import pytest
from support.browser import BROWSER, opened
from support.plan_page import Drawn, drawn_plan

CAPTION = "The plan and this setting, bytes of the rank that needs most"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return drawn_plan()


def test_the_controls_show_a_recorded_run(drawn: Drawn, tmp_path: Path) -> None:
    reader = opened(drawn.page, tmp_path, "micro-batch=4&stage=3")
    rows = {row[0]: figures for row, figures in reader.tables[CAPTION].items()}
    own = drawn.points[0]
    point = next(each for each in drawn.points if (each.setting["micro-batch"], each.setting["stage"]) == (4, 3))
    assert rows["in all"] == [own.total, point.total, point.total - own.total]
    assert rows["a step, modelled"][:2] == [own.seconds, point.seconds]
    for name, nbytes in point.at_peak.items():
        assert rows[name.replace("_", " ")][1] == nbytes, name
    text = "".join(reader.texts)
    assert "Recorded: this run was run dry." in text
    assert dict(reader.elements)["output"] and "are left." in text
    assert [found.get("hidden", "shown") for tag, found in reader.elements if tag == "form"] == ["shown"]


def test_between_two_recorded_runs_lies_a_line(drawn: Drawn, tmp_path: Path) -> None:
    reader = opened(drawn.page, tmp_path, "micro-batch=2")
    rows = {row[0]: figures for row, figures in reader.tables[CAPTION].items()}
    low, high = drawn.points[:2]
    for name in ("parameters", "temporary"):
        assert rows[name][1] == round(low.at_peak[name] + (high.at_peak[name] - low.at_peak[name]) / 3)
    assert "Computed: on the line between the recorded micro-batches 1 and 4" in "".join(reader.texts)
    assert len(rows["a step, modelled"]) == 1  # no time is computed
