"""Tests the page of advice: a point for every layout that was run dry, a row and a way to it by keyboard."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.browser import BROWSER, opened
from support.plan_page import Reader

from megazero.parallel.nodes import Nodes
from megazero.planner.advice.advise import Advice
from megazero.planner.advice.choices import LayoutChoice, read
from megazero.planner.advice.search import Found, Search, SearchOutcome
from megazero.planner.machines import MACHINES
from megazero.planner.page.layouts import layout_points, layouts_page

WORDS = (
    "--num-layers 1 --hidden-size 512 --num-attention-heads 4 --seq-length 512 --vocab-size 512 --micro-batch-size 1"
    " --global-batch-size 12 --train-iters 10 --lr 1e-4 --eval-iters 0 --precision bf16"
)
NODES = Nodes((2,))
# The first two fit a device that has no room for a micro-batch of six.
LAYOUTS = (LayoutChoice(zero_stage=1), LayoutChoice(zero_stage=3), LayoutChoice(zero_stage=1, micro_batch_size=6))


@pytest.fixture(scope="module")
def advice() -> Advice:
    search = Search(read(shlex.split(WORDS), 2), 512, MACHINES["dgx-a100"])
    found = [Found(choice, NODES, measured) for choice in LAYOUTS if (measured := search.measured(choice, NODES))]
    first, second, large = (each.measured.total for each in found)
    assert max(first, second) < large
    search = replace(search, hardware=replace(search.hardware, memory_bytes=(max(first, second) + large) // 2))
    return Advice(search, NODES, 3, 3, SearchOutcome((found[0],), 0))


@pytest.fixture(scope="module")
def page(advice: Advice) -> str:
    return layouts_page(advice, "megazero plan --advise <x>")


def test_every_layout_is_a_point_of_its_memory_and_time(advice: Advice, page: str) -> None:
    drawn = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", page, re.S)[0])
    links = list(reversed([each for each in drawn.iter() if each.tag.endswith("}a")]))  # the first lies on top
    points = layout_points(advice)
    assert [point.found.choice for point in points[:1]] == [LAYOUTS[0]] and len(links) == len(points) == 3
    places = [next(each for each in link if each.tag.endswith("circle")) for link in links]
    x = [float(circle.get("cx", "")) for circle in places]
    y = [float(circle.get("cy", "")) for circle in places]
    # Both axes are straight: differences have the same scale, more memory lies to the right, more time above less.
    nbytes, seconds = [point.nbytes for point in points], [point.seconds for point in points]
    for at, of, sign in ((x, nbytes, 1), (y, seconds, -1)):
        scale = (at[1] - at[0]) / (of[1] - of[0])
        assert sign * scale > 0 and (at[2] - at[0]) / (of[2] - of[0]) == pytest.approx(scale, rel=0.05)
    assert [circle.get("fill") == "none" for circle in places] == [not point.fits for point in points]
    assert sum(point.fits for point in points) == 2
    labels = [link.get("aria-label", "") for link in links]
    assert labels[0].startswith(f"1: {LAYOUTS[0].describe()}, ") and labels[0].endswith(", fits")
    assert [label.endswith("does not fit") for label in labels] == [not point.fits for point in points]


def test_every_point_leads_to_its_row(advice: Advice, page: str) -> None:
    reader = Reader(page)
    assert reader.open == [] and "megazero plan --advise <x>" in "".join(reader.texts)
    ids = [found["id"] for tag, found in reader.elements if tag == "span" and "id" in found]
    assert {found["href"] for tag, found in reader.elements if tag == "a"} == {f"#{name}" for name in ids}
    assert not [name for _, found in reader.elements for name in found if name in ("src", "srcset", "data")]
    rows = reader.tables["Layouts that were run dry"]
    for (name, *_), figures in rows.items():
        (point,) = (each for each in layout_points(advice) if each.found.choice.describe() == name)
        measured = point.found.measured
        assert figures[1] == measured.seconds and figures[4:] == [measured.total, measured.host_bytes]
    carried = json.loads(page.partition('id="advice">')[2].partition("</script>")[0])
    assert carried["fastest"][0]["step_seconds"] == advice.outcome.found[0].measured.seconds
    assert "megazero pretrain" in page


def test_a_page_without_layouts_has_no_picture(advice: Advice) -> None:
    search = replace(advice.search, tried={})
    page = layouts_page(replace(advice, search=search, outcome=SearchOutcome((), 0)), "megazero plan --advise")
    assert "No layout of these nodes was run dry." in page and "<svg" not in page and "No layout fits." in page


@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
def test_points_are_reached_by_keyboard_and_mark_their_row(page: str, tmp_path: Path) -> None:
    asked = """<script>
      window.addEventListener("load", () => {
      const reached = [...document.querySelectorAll("svg a")].filter((link) => {
        link.focus();
        return document.activeElement === link && link.tabIndex === 0;
      });
      const marked = [...document.querySelectorAll("tbody tr")].map((row) => getComputedStyle(row).outlineStyle);
      document.title = `${reached.length} ${marked.join(" ")}`;
      });
    </script>"""
    reader = opened(page.replace("</body>", f"{asked}</body>"), tmp_path, "layout-2")
    assert "3 none solid none" in "".join(reader.texts)
