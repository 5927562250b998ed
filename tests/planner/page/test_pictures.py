"""Tests the pictures of a plan's page: what they say, and that they stay small."""

from xml.etree import ElementTree

from megazero.planner.page.pictures import LINK_COLOURS, timeline, traffic
from megazero.planner.page.stages import Lane, LanesOfStage, LaneWait
from megazero.planner.timeline import LaneSpan

SVG = "{http://www.w3.org/2000/svg}"
LEFT, WIDTH = 150, 930


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def test_a_span_lies_where_its_seconds_are() -> None:
    device = Lane("device", [LaneSpan("device", "F0", 0, 1), LaneSpan("device", "B0", 3, 4)])
    message = Lane("dp", [LaneSpan("dp", "B0", 1, 3)])
    root = parsed(timeline([LanesOfStage(0, [device, message], [LaneWait("dp", 1, 3)])], 4.0))
    spans = {
        rect.findtext(f"{SVG}title"): (float(rect.get("x", "")), float(rect.get("width", "")))
        for rect in root.iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    }
    quarter = WIDTH / 4
    assert spans == {
        "F0: 0.000 to 1000.000 ms": (LEFT, quarter),
        "B0: 3000.000 to 4000.000 ms": (LEFT + 3 * quarter, quarter),
        "dp, waited for in B0: 1000.000 to 3000.000 ms": (LEFT + quarter, 2 * quarter),
    }
    lines = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "ink"]
    assert len(lines) == 1 and lines[0].startswith(f"M{LEFT + round(3 * quarter)} ")
    names = {each.text for each in root.iter(f"{SVG}text")}
    assert {"stage 0", "device", "dp", "F0", "B0", "forward", "backward"} <= names


def test_a_step_of_very_many_spans_is_a_small_picture() -> None:
    count = 20_000
    device = [LaneSpan("device", f"{'FB'[n % 2]}{n}", 2.0 * n, 2 * n + 1.5) for n in range(count)]
    other = [LaneSpan("dp", "", 2 * n + 0.5, 2 * n + 1.0) for n in range(count)]
    waits = [LaneWait("dp", 2 * n - 0.5, 2.0 * n) for n in range(1, count)]
    stages = [
        LanesOfStage(n, [Lane("device", device), *(Lane(k, other) for k in ("dp", "tp", "pp"))], waits)
        for n in range(4)
    ]
    drawn = timeline(stages, 2.0 * count)
    assert len(drawn) < 600_000
    assert len(list(parsed(drawn).iter())) < 1000


def test_bars_of_traffic_are_as_long_as_their_bytes() -> None:
    inside, between = list(LINK_COLOURS)[:2]
    root = parsed(traffic([("dp", {inside: 300, between: 100}), ("pp", {between: 200})]))
    bars = [float(rect.get("width", "")) for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert bars[0] == 3 * bars[1] and (bars[2], bars[3]) == (0, 2 * bars[1])
    assert root.get("aria-label") == "bytes sent in a step, by axis and link"
