"""Draws one step's ledger: live bytes by category over the step's operations, as one HTML file.

Along the foot stand the units, the modules that forward and backward went through.  Time is counted in operations,
which, unlike seconds, are the same in every run.  A picture has a fixed number of columns; where several moments fall
into one, the highest is drawn, so the peak is never lost.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megazero.files import written_aside
from megazero.memory.ledger_figures import CATEGORIES, MemoryTimeline, PhaseMark, StepMemory, UnitMark
from megazero.svg import CLASSES, COLOURS, LETTER_WIDTH, legend, part_of_page, round_up, text
from megazero.units import format_bytes

_STRIP = 17  # the height of the units' names
_LEAST_BAND, _LEAST_UNIT = 1.0, 3.0  # pixels; what is narrower is not drawn, or as one with its neighbours
_MOST_UNITS, _NAMED_UNIT = 60, 24.0  # more units than this are drawn as one until a name has room
_MOST_ROOM = 2.5  # times the peak: more room than that is above the picture
_ROOM = "#d1495b"

# Model states have cold colours, activations warm ones; neighbours in the stack differ in lightness.
CATEGORY_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "parameters": "#2f6cb3",
        "master": "#7b6db0",
        "moments": "#b9addb",
        "gradients": "#1b998b",
        "gathered_parameters": "#5fa8e0",
        "communication_buffers": "#7d8590",
        "activation_checkpoints": "#b5442e",
        "activations": "#f08a4b",
        "temporary": "#f7d488",
    }
)

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1120px;
       margin: 24px auto; padding: 0 16px; }
h1 { font-size: 19px; margin: 0; }
p { margin: 4px 0 14px; color: var(--soft); }
svg { width: 100%; height: auto; display: block; }
.tables { display: flex; flex-wrap: wrap; gap: 12px 56px; align-items: flex-start; }
table { border-collapse: collapse; margin-top: 14px; }
th { font-weight: 600; text-align: left; border-bottom: 1px solid var(--line); }
th, td { padding: 3px 20px 3px 0; }
.figure { text-align: right; font-variant-numeric: tabular-nums; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 8px; }
"""


class Frame(NamedTuple):
    """The place of a drawing in its picture, in pixels, and its scale: operations and bytes to coordinates."""

    operations: int
    top_bytes: float
    left: float = 80
    top: float = 34
    width: float = 1000
    height: float = 420

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def foot(self) -> float:
        return self.top + self.height

    def x(self, operation: float) -> float:
        return self.left + self.width * min(operation / self.operations, 1.0)

    def y(self, nbytes: float) -> float:
        return self.top + self.height * (1 - nbytes / self.top_bytes)


class PassSection(NamedTuple):
    """A stretch of operations in which forward or backward was in one unit."""

    begin: int
    end: int
    phase: str
    unit: str


def write_picture(path: Path, step: StepMemory, traffic: Mapping[str, Mapping[str, Any]], *, title: str) -> None:
    """Write the page; it appears whole or not at all.  Raises DataError when it can't be written."""
    with written_aside(path) as stream:
        stream.write(page(step, traffic, title=title).encode())


def page(step: StepMemory, traffic: Mapping[str, Mapping[str, Any]], *, title: str) -> str:
    """Return the HTML page; traffic: {axis: {collective: {"messages": ..., "bytes": ...}}}."""
    where = step.peak_operation
    place = ", in ".join(part for part in (phase_of(step.timeline.phases, where), peak_unit(step)) if part)
    peak = f"{format_bytes(step.peak_bytes)} ({step.peak_bytes} bytes)"
    subtitle = f"Peak {peak} after {where} of {step.timeline.num_operations} operations" + (place and f", in {place}")
    note = "Time is counted in operations. Axis world: all ranks; scalars: losses, norms and flags." if traffic else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{COLOURS}{CLASSES}{_STYLE}</style></head>\n"
        f"<body><h1>Memory over one step: {escape(title)}</h1>\n<p>{escape(subtitle)}</p>\n"
        f'{drawing(step)}\n<div class="tables">{_memory_table(step)}{_traffic_table(traffic)}</div>\n'
        f"<p>{note}</p></body></html>\n"
    )


def phase_of(phases: Sequence[PhaseMark], operation: int) -> str:
    """Return the phase in which the `operation`-th operation ran; empty before the first phase."""
    return next((mark.phase for mark in reversed(phases) if mark.operation < operation), "")


def sections(timeline: MemoryTimeline) -> list[PassSection]:
    """Return the stretches of forward and backward by unit, in order; none where the units are not known.

    In backward an operation belongs to the parameter whose gradient comes next, and that to its module.
    """
    names = sorted({mark.name for mark in timeline.units if mark.name}, key=len)
    module_of = {name: next(each for each in names if f"{name}.".startswith(f"{each}.")) for name in names}
    phases, units = list(timeline.phases), list(timeline.units)
    starts = sorted({mark.operation for mark in phases} | {mark.operation for mark in units})
    found: list[PassSection] = []
    for begin, end in pairwise([*starts, timeline.num_operations]):
        phase, unit = _last(phases, begin), _last(units, begin)
        place = bisect.bisect_right(units, begin, key=_operation)
        coming = units[place] if place < len(units) else None
        if phase is not None and phase.phase == "backward" and coming and _last(phases, coming.operation) is phase:
            unit = coming
        if phase is None or phase.phase not in ("forward", "backward") or unit is None or not unit.name or begin == end:
            continue
        module = module_of[unit.name]
        if found and (found[-1].end, *found[-1][2:]) == (begin, phase.phase, module):
            found[-1] = found[-1]._replace(end=end)
        else:
            found.append(PassSection(begin, end, phase.phase, module))
    return found


_Mark = TypeVar("_Mark", PhaseMark, UnitMark)


def _last(marks: Sequence[_Mark], operation: int) -> _Mark | None:
    """Return the last of the marks that stands at `operation` or before it."""
    place = bisect.bisect_right(marks, operation, key=_operation)
    return marks[place - 1] if place else None


def _operation(mark: PhaseMark | UnitMark) -> int:
    return mark.operation


def peak_unit(step: StepMemory) -> str:
    """Return the unit that was computed at the peak; empty where it is not known."""
    where = step.peak_operation
    return next((each.unit for each in sections(step.timeline) if each.begin < where <= each.end), "")


def drawing(step: StepMemory, *, room: int = 0, place: str = "", most_columns: int = 1000) -> str:
    """Return the SVG element.

    room: bytes, where a line is drawn, or words that it is above the picture; 0 for none.  place: of the peak, by
    default its unit.  most_columns: of the areas.
    """
    timeline = step.timeline
    peak = max(step.peak_bytes, 1)
    frame = Frame(timeline.num_operations + 1, 1.06 * (max(peak, room) if room <= _MOST_ROOM * peak else peak))
    units = sections(timeline)
    least = _LEAST_UNIT if len(units) <= _MOST_UNITS else _NAMED_UNIT
    units = joined(units, least=round(least * frame.operations / frame.width))
    below = frame.foot + (_STRIP + 4 if units else 0)
    parts = [
        *_phase_bands(timeline, frame),
        *bytes_grid(frame),
        *areas(step, frame, most_columns),
        *_unit_strip(units, frame),
        *_peak_mark(step, frame, place or peak_unit(step)),
        *(_room_line(room, frame) if room else ()),
        *_operations(frame, below + 18),
        text(frame.right, below + 38, "operations run", "end"),
    ]
    entries = [(_words(name), CATEGORY_COLOURS[name]) for name in CATEGORIES if step.peaks[name]]
    parts += [*legend(frame.left, below + 38, entries[:5]), *legend(frame.left, below + 58, entries[5:])]
    return part_of_page(frame.right + 20, below + 68, parts, label="live memory by category over one step")


def joined(found: Sequence[PassSection], *, least: int) -> list[PassSection]:
    """Return the sections with runs of those of fewer than `least` operations as one: "layers.0-11".

    A run has names that differ in a number alone, which grows or shrinks.  Its phase is "backward" where
    recomputation alternates with that.
    """
    kept: list[PassSection] = []
    for each in found:
        longer = _with_next(kept[-1], each, least) if kept else None
        if longer is None:
            kept.append(each)
        else:
            kept[-1] = longer
    return kept


def _with_next(run: PassSection, each: PassSection, least: int) -> PassSection | None:
    """Return a run with one section more; None if that begins another run."""
    family, _, numbers = run.unit.rpartition(".")
    first, _, last = numbers.partition("-")
    own_family, _, number = each.unit.rpartition(".")
    if not (first.isdecimal() and number.isdecimal()) or (own_family, each.begin) != (family, run.end):
        return None
    way, step = int(last or first) - int(first), int(number) - int(last or first)
    turns = way * step < 0
    # A layer is recomputed before its backward, so in a run of backwards its forward is of the next layer.
    differs = each.phase != run.phase and (way > 0 or (each.phase == "forward" and step == 0))
    if turns or differs or min(run.end - run.begin, each.end - each.begin) >= least:
        return None
    phase = run.phase if each.phase == run.phase else "backward"
    unit = run.unit if first == number else f"{family}.{first}-{number}"
    return PassSection(run.begin, each.end, phase, unit)


def columns(timeline: MemoryTimeline, most: int = 1000) -> NDArray[np.int64]:
    """Return live bytes [num columns, len(CATEGORIES)]: each column's highest moment, or the last one before it."""
    num_columns = min(most, timeline.num_operations + 1)
    column = timeline.operations * num_columns // (timeline.num_operations + 1)
    before = np.searchsorted(column, np.arange(num_columns))
    # The candidates of a column: its own moments, and the last one before it, with less than any height.
    point = np.concatenate([np.maximum(before - 1, 0), np.arange(len(column))])
    columns_of = np.concatenate([np.arange(num_columns), column])
    height = np.concatenate([np.full(num_columns, -1), timeline.totals])
    order = np.lexsort((height, columns_of))
    highest = order[np.append(np.diff(columns_of[order]) > 0, True)]
    table: NDArray[np.int64] = timeline.live[point[highest]]
    return table


def areas(step: StepMemory, frame: Frame, most: int = 1000) -> list[str]:
    """Draw one closed path per category, from the bottom of the stack to its top, of at most so many columns."""
    table = columns(step.timeline, min(most, round(frame.width)))
    tops = table.cumsum(axis=1)
    paths = []
    for index, category in enumerate(CATEGORIES):
        if not step.peaks[category]:
            continue
        upper, lower = tops[:, index], tops[:, index] - table[:, index]
        hint = f"{_words(category)}: {format_bytes(step.at_peak[category])} at the peak"
        path = f"M{frame.left:g} {_steps(upper, frame)}V{_steps(lower, frame, backwards=True)}Z"
        paths.append(f'<path fill="{CATEGORY_COLOURS[category]}" d="{path}"><title>{hint}</title></path>')
    return paths


def _steps(heights: NDArray[np.int64], frame: Frame, *, backwards: bool = False) -> str:
    """Return the outline of columns of these heights, from the first one's to the last one's or back."""
    changes = np.flatnonzero(np.diff(heights)) + 1  # columns higher or lower than the one before
    runs = [0, *changes.tolist()]
    places = [frame.left + frame.width * run / len(heights) for run in runs] + [frame.right]
    levels = [frame.y(int(heights[run])) for run in runs]
    if backwards:
        levels.reverse()
        places = places[::-1][1:]
    else:
        places = places[1:]
    moves = [f"{level:.1f}H{place:.1f}" for level, place in zip(levels, places, strict=True)]
    return "V".join(moves)


def _phase_bands(timeline: MemoryTimeline, frame: Frame) -> list[str]:
    """Draw a strip for every phase, every other one shaded, with its name where there is room."""
    starts = [frame.x(mark.operation + 1) for mark in timeline.phases]
    ends = [*starts, frame.right][1:]
    bands = []
    for number, (mark, start, end) in enumerate(zip(timeline.phases, starts, ends, strict=True)):
        if end - start < _LEAST_BAND:
            continue
        shade = "band" if number % 2 else "faint-band"
        place = f'x="{start:.1f}" y="{frame.top - 22}" width="{end - start:.1f}" height="{frame.height + 22}"'
        bands.append(f'<rect {place} class="{shade}"><title>{mark.phase}</title></rect>')
        names = (mark.phase, mark.phase[:1])
        name = next((name for name in names if end - start > LETTER_WIDTH * len(name) + 6), "")
        bands += [text((start + end) / 2, frame.top - 7, name, "middle")] if name else []
    return bands


def _unit_strip(units: Sequence[PassSection], frame: Frame) -> list[str]:
    """Draw the units along the foot, with their names, or the numbers they end in, where there is room."""
    parts = []
    wide = [each for each in units if frame.x(each.end) - frame.x(each.begin) > 0.5]
    for number, each in enumerate(wide):
        start, end = frame.x(each.begin), frame.x(each.end)
        place = f'x="{start:.1f}" y="{frame.foot + 3:.1f}" width="{end - start:.1f}" height="{_STRIP}"'
        hint = f"<title>{escape(each.unit)}, {each.phase}, operations {each.begin} to {each.end}</title>"
        parts.append(f'<rect class="{"faint-band" if number % 2 else "line-band"}" {place}>{hint}</rect>')
        names = (each.unit, each.unit.rpartition(".")[2])
        name = next((name for name in names if end - start > LETTER_WIDTH * len(name) + 4), "")
        parts += [text((start + end) / 2, frame.foot + _STRIP - 1, name, "middle")] if name else []
    return parts


def bytes_grid(frame: Frame, *, named: bool = True) -> list[str]:
    """Draw lines at round numbers of bytes, with the numbers in front if `named`."""
    lines = []
    for nbytes in range(0, int(frame.top_bytes) + 1, 2 ** max(math.ceil(math.log2(frame.top_bytes / 6)), 0)):
        y = frame.y(nbytes)
        lines.append(f'<path class="line" d="M{frame.left:g} {y:.1f}h{frame.width:g}" stroke-width="0.7"/>')
        lines += [text(frame.left - 8, y + 4, format_bytes(nbytes), "end")] if named else []
    return lines


def _operations(frame: Frame, y: float) -> list[str]:
    """Write round numbers of operations along the bottom."""
    step = max(round(round_up(frame.operations / 12)), 1)
    return [text(frame.x(number), y, str(number), "middle") for number in range(0, frame.operations, step)]


def _room_line(room: int, frame: Frame) -> list[str]:
    words = f"a device less its constants: {format_bytes(room)}"
    if room > frame.top_bytes:
        return [text(frame.right, 9, f"{words}, above this picture", "end")]
    y = frame.y(room)
    return [
        f'<path class="room" d="M{frame.left:g} {y:.1f}h{frame.width:g}" stroke="{_ROOM}" stroke-width="1.6"/>',
        text(frame.left + 8, y + (14 if y < frame.top + 16 else -5), words, "strong"),
    ]


def _peak_mark(step: StepMemory, frame: Frame, place: str) -> list[str]:
    x, y = frame.x(step.peak_operation + 0.5), frame.y(step.peak_bytes)
    is_right = x > frame.left + frame.width / 2
    label = f"peak {format_bytes(step.peak_bytes)}" + (place and f", in {place}")
    return [
        f'<path class="ink" d="M{x:.1f} {frame.top}V{frame.foot}" stroke-dasharray="3 3"/>',
        text(x + (-7 if is_right else 7), y - 6, label, "strong end" if is_right else "strong"),
    ]


def _memory_table(step: StepMemory) -> str:
    """Format the key to the colours, in the order of the stack from its top."""
    rows = [
        f'<tr><td><span class="swatch" style="background:{CATEGORY_COLOURS[category]}"></span>{_words(category)}</td>'
        + _figures(format_bytes(step.at_peak[category]), format_bytes(step.peaks[category]))
        for category in reversed(CATEGORIES)
        if step.peaks[category]
    ]
    return _table(("category",), ("at the peak", "most at any moment"), rows)


def _traffic_table(traffic: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        f"<tr><td>{escape(axis)}</td><td>{_words(collective)}</td>"
        + _figures(str(sent["messages"]), format_bytes(sent["bytes"]))
        for axis, by_collective in traffic.items()
        for collective, sent in by_collective.items()
    ]
    return _table(("axis", "collective"), ("messages", "sent"), rows) if rows else ""


def _table(words: Sequence[str], figures: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{word}</th>" for word in words) + "".join(
        f'<th class="figure">{word}</th>' for word in figures
    )
    return f"<table><tr>{head}</tr>\n" + "\n".join(rows) + "</table>\n"


def _figures(*cells: str) -> str:
    return "".join(f'<td class="figure">{cell}</td>' for cell in cells) + "</tr>"


def _words(name: str) -> str:
    return escape(name.replace("_", " "))
