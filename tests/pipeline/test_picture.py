"""Tests the picture of a step by reading its SVG: boxes to scale, idle time left white, and the caption's figures."""

import re
from collections.abc import Iterator
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from support.schedule_drawings import computations

from megazero.pipeline.picture import caption, picture
from megazero.pipeline.schedule import Action, Kind, Shape
from megazero.pipeline.timeline import Span, Timeline, messages, predicted_idle_share, simulate, without_waits

SVG = "{http://www.w3.org/2000/svg}"
UNIT = 0.004  # seconds of a simulation's unit of time


def simulated(name: str, shape: Shape, unit: float = UNIT) -> Timeline:
    """Return the timeline of a schedule with forwards of one unit and backwards of two, in seconds."""
    units = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT_GRADIENT: 1, Kind.WEIGHT_GRADIENT: 1}
    return simulate(computations(name, shape), shape, {kind: unit * length for kind, length in units.items()})


def boxes(svg: str) -> Iterator[tuple[str, float, float, float, str]]:
    """Yield tooltip, x, y, width and colour of every computation."""
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if rect.get("class") == "box":
            said = rect.findtext(f"{SVG}title") or ""
            x, y, width = (float(rect.attrib[name]) for name in ("x", "y", "width"))
            yield said, x, y, width, rect.attrib["fill"]


def texts(svg: str, kind: str = "") -> list[str]:
    found = ElementTree.fromstring(svg).iter(f"{SVG}text")
    return [text.text or "" for text in found if kind in text.get("class", "")]


@pytest.mark.parametrize(("name", "shape"), [("1f1b", Shape(3, 4)), ("interleaved", Shape(2, 4, 2))])
def test_every_computation_is_a_box_to_scale(name: str, shape: Shape) -> None:
    timeline = simulated(name, shape)
    svg = picture(timeline, title=name)
    frame = next(rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.get("fill") == "none")
    left, width = float(frame.attrib["x"]), float(frame.attrib["width"])
    found = list(boxes(svg))
    spans = [span for spans in timeline.stages for span in spans]
    assert [said.split(":")[0] for said, *_ in found] == [str(span.action) for span in spans]
    for (_, x, _, length, _), span in zip(found, spans, strict=True):
        assert x == pytest.approx(left + width * span.start / timeline.makespan, abs=0.01)
        assert length == pytest.approx(width * (span.end - span.start) / timeline.makespan, abs=0.01)


def test_what_is_not_covered_is_idle() -> None:
    """Boxes of a row don't overlap, and leave the idle share of the rows white."""
    shape = Shape(3, 4)
    timeline = simulated("gpipe", shape)
    rows: dict[float, list[tuple[float, float]]] = {}
    for _, x, y, width, _ in boxes(picture(timeline, title="")):
        rows.setdefault(y, []).append((x, width))
    assert len(rows) == 3
    for row in rows.values():
        assert all(x + width <= following + 0.02 for (x, width), (following, _) in pairwise(row))
    covered = sum(width for row in rows.values() for _, width in row)
    assert 1 - covered / (3 * 1000) == pytest.approx(predicted_idle_share("gpipe", shape), abs=1e-4)


def test_kinds_have_colours_and_the_legend_names_those_that_occur() -> None:
    both = picture(simulated("1f1b", Shape(2, 2)), title="")
    split = picture(simulated("zero-bubble", Shape(2, 2)), title="")
    assert {"forward", "backward", "idle"} < set(texts(both))
    assert "gradient of the input" not in texts(both)
    assert {"forward", "gradient of the input", "gradients of the weights"} < set(texts(split))
    assert "backward" not in texts(split)
    colours = {said[0]: colour for svg in (both, split) for said, *_, colour in boxes(svg)}
    assert len(set(colours.values())) == 4 == len(colours)


def test_numbers_are_those_of_micro_batches_and_chunks() -> None:
    svg = picture(simulated("interleaved", Shape(2, 2, 2)), title="")
    assert sorted(texts(svg, "number")) == sorted(["0", "0", "0.1", "0.1", "1", "1", "1.1", "1.1"] * 2)
    assert texts(svg, "row") == ["stage 0", "stage 1"]


def test_a_box_that_is_too_small_has_no_number() -> None:
    spans = (Span(Action(Kind.FORWARD, 7), 0, 0.001), Span(Action(Kind.BACKWARD, 8), 0.001, 1))
    svg = picture(Timeline((spans,)), title="")
    assert texts(svg, "number") == ["8"]
    assert [said for said, *_ in boxes(svg)] == ["F7: 0 to 0.001 s", "B8: 0.001 to 1 s"]


@pytest.mark.parametrize(("scale", "unit"), [(1e-5, "µs"), (1e-2, "ms"), (3.0, "s")])
def test_the_axis_has_round_times_and_a_unit(scale: float, unit: str) -> None:
    timeline = simulated("1f1b", Shape(2, 3), scale)
    svg = picture(timeline, title="")
    assert f"time, {unit}" in texts(svg)
    ticks = [float(text) for text in texts(svg, "tick")]
    seconds = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    step = ticks[1]
    assert ticks == pytest.approx([count * step for count in range(len(ticks))])
    assert ticks[-1] * seconds <= timeline.makespan * (1 + 1e-9) < (ticks[-1] + step) * seconds
    assert 5 <= len(ticks) <= 13


def test_the_caption_has_the_measured_share_and_the_formulas() -> None:
    timeline = simulated("1f1b", Shape(2, 3))
    assert caption(timeline, 0.25) == "2 pipeline stages x 48 ms, idle 25.0 % (25.0 % by the formula)"
    slow = Timeline((*timeline.stages[:1], (Span(Action(Kind.FORWARD, 0), 0, 0.048),)))
    assert caption(slow) == "2 pipeline stages x 48 ms, idle 12.5 %"
    assert caption(timeline, 0.3) in texts(picture(timeline, title="", predicted=0.3))


def test_one_stage_is_one_row_without_idle_time() -> None:
    svg = picture(simulated("1f1b", Shape(1, 2)), title="a < b")
    assert texts(svg, "row") == ["stage 0"] and texts(svg, "title") == ["a < b"]
    assert any(re.fullmatch(r"1 pipeline stage x 24 ms, idle 0.0 %", text) for text in texts(svg))


def test_a_long_step_is_drawn_wider_up_to_a_limit() -> None:
    widths = [
        float(ElementTree.fromstring(picture(simulated("1f1b", Shape(2, m)), title="")).attrib["width"])
        for m in (4, 50, 500)
    ]
    assert widths[0] < widths[1] < widths[2] < 5000


def test_the_ideal_stands_beneath_with_its_own_share() -> None:
    """A step in which messages take time is longer than its ideal, which has the formula's idle share."""
    shape = Shape(3, 4)
    actions = computations("1f1b", shape)
    durations = {Kind.FORWARD: 0.01, Kind.BACKWARD: 0.02}
    slow = simulate(actions, shape, durations, exchange=0.005)
    ideal = without_waits(slow, shape, durations)
    svg = picture(slow, title="", ideal=ideal)
    assert ideal == simulate(actions, shape, durations) and slow.makespan > ideal.makespan
    assert texts(svg, "row") == [f"stage {stage}" for stage in (0, 1, 2)] * 2
    assert any(text.endswith(f"idle {100 * predicted_idle_share('1f1b', shape):.1f} %") for text in texts(svg))
    assert len(list(boxes(svg))) == 2 * len(list(boxes(picture(slow, title=""))))


def test_messages_are_lines_between_stages() -> None:
    shape = Shape(2, 4, 2)
    timeline = simulate(computations("interleaved", shape), shape, exchange=0.5)
    found = list(messages(timeline))
    # Each of four micro-batches crosses three borders of chunks, forward and back.
    assert len(found) == 4 * 3 * 2 and {message.used - message.sent >= 0.5 for message in found} == {True}
    svg = picture(timeline, title="")
    assert svg.count('class="message"') == len(found)
    assert any("chunk 1 of layers" in text for text in texts(svg))
    assert not list(messages(simulate(computations("1f1b", Shape(1, 2)), Shape(1, 2))))
