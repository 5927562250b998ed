"""The picture of a step's memory is a well-formed page whose areas have the heights that the ledger recorded."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from megazero.errors import DataError
from megazero.memory.ledger_figures import CATEGORIES, Category, MemoryTimeline, PhaseMark, StepMemory, UnitMark
from megazero.report.pictures.ledger_picture import (
    PassSection,
    columns,
    drawing,
    joined,
    page,
    phase_of,
    sections,
    write_picture,
)

MIB = 1 << 20
PHASES = (PhaseMark(1, "forward"), PhaseMark(6, "backward"), PhaseMark(11, "update"))
TRAFFIC = {
    "dp": {"reduce_scatter": {"messages": 3, "bytes": 2 * MIB}},
    "tp": {"all_reduce": {"messages": 8, "bytes": 5}},
}


def step(changes: list[tuple[int, Category, int]], num_operations: int = 12) -> StepMemory:
    start = np.array([4 * MIB if name == "parameters" else 0 for name in CATEGORIES], np.int64)
    return StepMemory(MemoryTimeline.of_changes(start, changes, PHASES, num_operations))


PLAIN = step([(2 * MIB, "activations", 2), (MIB, "temporary", 3), (-MIB, "temporary", 3), (-2 * MIB, "activations", 9)])


def areas(svg: str) -> dict[str, list[tuple[float, float]]]:
    """Return the corners of each category's area, read from the SVG."""
    found = {}
    for path in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path"):
        title = path.find("{http://www.w3.org/2000/svg}title")
        if title is None or title.text is None:
            continue
        corners, x, y = [], 0.0, 0.0
        for command, arguments in re.findall(r"([MHVZ])([^MHVZ]*)", path.attrib["d"]):
            numbers = [float(number) for number in arguments.split()]
            if command == "M":
                x, y = (numbers[0], numbers[1])
            elif command == "H":
                x = numbers[0]
            elif command == "V":
                y = numbers[0]
            corners.append((x, y))
        found[title.text.split(":")[0]] = corners
    return found


def area_of(corners: list[tuple[float, float]]) -> float:
    """Return the area of a polygon by the shoelace formula."""
    turned = corners[1:] + corners[:1]
    return abs(sum(x * v - u * y for (x, y), (u, v) in zip(corners, turned, strict=True))) / 2


def test_areas_are_bytes_times_operations() -> None:
    """Areas are bytes times operations: parameters fill 13 columns (0 to 12), activations 2 to 8, a temporary 3."""
    found = areas(drawing(PLAIN))
    unit = area_of(found["parameters"]) / (13 * 4)
    assert area_of(found["activations"]) / unit == pytest.approx(7 * 2, rel=2e-3)
    assert area_of(found["temporary"]) / unit == pytest.approx(1 * 1, rel=2e-2)
    assert set(found) == {"parameters", "activations", "temporary"}


def test_areas_stand_on_each_other() -> None:
    found = areas(drawing(PLAIN))
    bottom = max(y for _, y in found["parameters"])
    top = min(y for _, y in found["parameters"])
    assert max(y for _, y in found["activations"]) == top
    assert (bottom - min(y for _, y in found["temporary"])) / (bottom - top) == pytest.approx(7 / 4, rel=2e-3)


def test_an_area_keeps_its_size_on_a_moving_ground() -> None:
    changes: list[tuple[int, Category, int]] = [
        (MIB, "activations", 2),
        (3 * MIB, "gradients", 4),
        (-2 * MIB, "gradients", 5),
    ]
    found = areas(drawing(step(changes)))
    unit = area_of(found["parameters"]) / (13 * 4)
    assert area_of(found["activations"]) / unit == pytest.approx(11, rel=2e-3)
    assert area_of(found["gradients"]) / unit == pytest.approx(3 + 8, rel=2e-3)


def test_no_moment_of_a_long_step_is_lost() -> None:
    rng = np.random.default_rng(0)
    changes: list[tuple[int, Category, int]] = []
    for operation in range(1, 50_000, 3):
        nbytes = int(rng.integers(1, 1000))
        changes += [(nbytes, "temporary", operation), (-nbytes, "temporary", operation + 1)]
    changes[2 * 8000 : 2 * 8000] = [(5 * MIB, "gradients", 24_000), (-5 * MIB, "gradients", 24_000)]
    long = step(changes, num_operations=50_000)
    table = columns(long.timeline)
    assert table.shape == (1000, len(CATEGORIES))
    assert table.sum(axis=1).max() == long.peak_bytes
    assert table.max(axis=0)[CATEGORIES.index("gradients")] == 5 * MIB
    assert (table[:, CATEGORIES.index("gradients")] > 0).sum() == 1
    assert len(page(long, {}, title="long")) < 300_000


def test_columns_between_changes_keep_the_last_moment() -> None:
    table = columns(step([(5, "master", 3000), (-2, "master", 3001)], num_operations=9999).timeline)
    master = table[:, CATEGORIES.index("master")]
    assert master.tolist() == [0] * 300 + [5] + [3] * 699


@pytest.mark.parametrize("changes", [[], [(1, "moments", 1)]])
def test_small_and_empty_steps_can_be_drawn(changes: list[tuple[int, Category, int]]) -> None:
    nothing = StepMemory(MemoryTimeline.of_changes(np.zeros(len(CATEGORIES), np.int64), changes, (), len(changes)))
    ElementTree.fromstring(drawing(nothing))
    assert "Peak" in page(nothing, {}, title="nothing")


def test_the_phase_of_an_operation() -> None:
    assert [phase_of(PHASES, operation) for operation in (0, 1, 2, 6, 7, 12)] == [
        "",
        "",
        "forward",
        "forward",
        "backward",
        "update",
    ]


def test_units_are_named_along_the_foot_and_at_the_peak() -> None:
    """In backward an operation belongs to the parameter whose gradient comes next; other phases have no units."""
    units = [(0, "x"), (1, "embedding"), (3, "layers.0"), (7, "layers.0.up.weight"), (9, "embedding.weight")]
    marks = tuple(UnitMark(operation, name) for operation, name in units)
    timeline = replace(PLAIN.timeline, units=marks)
    assert sections(timeline) == [
        (1, 3, "forward", "embedding"),
        (3, 6, "forward", "layers.0"),
        (6, 7, "backward", "layers.0"),
        (7, 11, "backward", "embedding"),
    ]
    svg = drawing(StepMemory(timeline))
    names = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]
    assert "peak 7.0 MiB, in embedding" in names and "layers.0" in names
    assert "after 3 of 12 operations, in forward, in embedding" in page(StepMemory(timeline), {}, title="x")
    assert set(areas(svg)) >= {"parameters", "activations", "temporary"}


class Tags(HTMLParser):
    """A parser that checks that tags close in order, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        """Ignore a tag that closes itself."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


def test_narrow_units_that_differ_in_a_number_are_joined() -> None:
    """Forwards of two micro-batches, and backwards whose layers are recomputed; wide ones stay what they are."""
    names = ["F0", "F1", "F2", "B2", "F1", "B1", "F0", "B0", "F0", "F1", "F2"]
    phases = {"F": "forward", "B": "backward"}
    found = [PassSection(n, n + 1, phases[name[0]], f"layers.{name[1]}") for n, name in enumerate(names)]
    found = [PassSection(-1, 0, "forward", "embedding"), *found]
    expected = [
        PassSection(-1, 0, "forward", "embedding"),
        PassSection(0, 3, "forward", "layers.0-2"),
        PassSection(3, 8, "backward", "layers.2-0"),
        PassSection(8, 11, "forward", "layers.0-2"),
    ]
    assert joined(found, least=2) == expected
    assert joined(found, least=1) == found


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = page(PLAIN, TRAFFIC, title="Rank 3, <iteration> 2")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "Memory over one step: Rank 3, <iteration> 2" in tags.text
    assert "Peak 7.0 MiB (7340032 bytes) after 3 of 12 operations, in forward" in tags.text
    cells = [word for word in tags.text if word]
    key = cells.index("category")
    assert cells[key : key + 12] == [
        *("category", "at the peak", "most at any moment"),
        *("temporary", "1.0 MiB", "1.0 MiB"),
        *("activations", "2.0 MiB", "2.0 MiB"),
        *("parameters", "4.0 MiB", "4.0 MiB"),
    ]
    assert cells[-9:-1] == ["dp", "reduce scatter", "3", "2.0 MiB", "tp", "all reduce", "8", "5 B"]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "src=" not in text


def test_a_picture_replaces_the_one_before_in_one_move(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger_rank0000.html"
    for title in ("one", "two"):
        write_picture(path, PLAIN, TRAFFIC, title=title)
    assert "two" in path.read_text() and [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_made_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file"):
        write_picture(tmp_path / "file" / "ledger.html", PLAIN, TRAFFIC, title="x")
