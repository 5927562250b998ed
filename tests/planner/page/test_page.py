"""Tests the page of a plan: well-formed, alone, with the figures of the plan's JSON, and readable without pictures."""

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from support.plan_page import Drawn, Reader, drawn_plan

from megazero.planner.predict import forecast_of


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return drawn_plan()


def embedded(page: str) -> Any:
    return json.loads(page.partition('id="plan">')[2].partition("</script>")[0])


def test_it_is_well_formed_and_needs_nothing_else(drawn: Drawn) -> None:
    reader = Reader(drawn.page)
    assert reader.open == []
    assert not [name for _, found in reader.elements for name in found if name in ("src", "href", "srcset", "data")]
    assert "url(" not in drawn.page and "@import" not in drawn.page and "default-src 'none'" in drawn.page
    assert "prefers-color-scheme: dark" in drawn.page and "megazero plan <x>" in "".join(reader.texts)
    assert len(drawn.page) < 2_000_000


def test_every_picture_has_a_name_and_a_table_and_every_control_a_label(drawn: Drawn) -> None:
    drawings = re.findall(r"<svg.*?</svg>", drawn.page.partition("<script")[0], re.S)
    assert len(drawings) == 3 and drawn.page.count("</figure>") == 4  # and the one that the controls draw
    for svg in drawings:
        assert ElementTree.fromstring(svg).get("aria-label")
    for after in drawn.page.split("</figure>")[1:]:
        assert "<table>" in after.partition("<figure")[0]
    reader = Reader(drawn.page)
    labelled = {found.get("for") for tag, found in reader.elements if tag == "label"}
    inputs = [found for tag, found in reader.elements if tag == "input"]
    assert [found["type"] for found in inputs] == ["range", *["radio"] * 4]
    assert all(found["type"] == "radio" or found["id"] in labelled for found in inputs)
    assert len(re.findall(r'<label><input type="radio"', drawn.page)) == 4
    assert not [found for _, found in reader.elements if found.get("tabindex")]  # the order of the page


def test_its_figures_are_those_of_the_json(drawn: Drawn) -> None:
    plan = json.loads(json.dumps({**drawn.plan.to_json(), "time": forecast_of(drawn.plan).to_json()}))
    assert embedded(drawn.page)["plan"] == plan
    tables = Reader(drawn.page).tables
    (rank,) = plan["ranks"]
    step = rank["parts"]["steady step"]
    memory = tables["Rank 0, stage 0: bytes by category"]
    for category, most in step["peaks"].items():
        found = [figures for row, figures in memory.items() if row[0] == category.replace("_", " ")]
        assert found == ([[step["at_peak"][category], most]] if most else []), category
    parts = tables["Device memory that each part needs, with constants"]
    assert [figures for _, figures in parts.items()] == [[part["total_bytes"]] for part in rank["parts"].values()]
    sent = sorted(
        [row["messages"], row["bytes"], row["between_nodes"]]
        for axis in step["traffic"].values()
        for row in axis.values()
    )
    assert sorted(tables["Rank 0, stage 0"].values()) == sent
    (shares,) = tables["Shares of the step, by stage"].values()
    assert sum(shares[:-1]) > 0.99 and max(shares) <= 1
    through = tables["Rank 0, stage 0: most bytes by module"]
    assert max(figures[0] for figures in through.values()) == step["peak_bytes"]


def test_the_peak_is_marked_with_its_module_and_line(drawn: Drawn) -> None:
    step = drawn.plan.to_json()["ranks"][0]["parts"]["steady step"]
    line = step["peak_line"].rpartition("/")[2]
    assert re.search(rf">peak [0-9.]+ .iB, in {re.escape(step['peak_module'])}, {re.escape(line)}</text>", drawn.page)


def test_the_recorded_runs_are_a_table_too(drawn: Drawn) -> None:
    rows = Reader(drawn.page).tables["Recorded runs"]
    assert list(rows.values()) == [[p.total, p.seconds, p.sent, p.host] for p in drawn.points if not p.refused]
    assert "refused: " in drawn.page
