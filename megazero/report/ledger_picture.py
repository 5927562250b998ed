"""Draws one step's ledger: live bytes by category over the step's operations, as one HTML file.

Time is counted in operations, which, unlike seconds, are the same in every run.  A picture has a fixed number of
columns; where several moments fall into one, the highest is drawn, so the peak is never lost.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megazero.files import written_aside
from megazero.memory.ledger_figures import CATEGORIES, Category, PhaseMark, StepMemory, Timeline
from megazero.units import format_bytes

_COLUMNS = 1000
_HEIGHT = 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 20, 34, 48
_LETTER_WIDTH = 8

# Model states have cold colours, activations warm ones; neighbours in the stack differ in lightness.
_COLOURS: Mapping[Category, str] = MappingProxyType(
    {
        "parameters": "#1d4e89",
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
body { font: 14px/1.45 system-ui, sans-serif; color: #1c2530; background: #fff; max-width: 1120px; margin: 24px auto;
       padding: 0 16px; }
h1 { font-size: 19px; margin: 0; }
p { margin: 4px 0 14px; color: #4b5866; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: #4b5866; }
.tables { display: flex; flex-wrap: wrap; gap: 12px 56px; align-items: flex-start; }
table { border-collapse: collapse; margin-top: 14px; }
th { font-weight: 600; text-align: left; border-bottom: 1px solid #c6cdd5; }
th, td { padding: 3px 20px 3px 0; }
.figure { text-align: right; font-variant-numeric: tabular-nums; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 8px; }
"""


class _Scale(NamedTuple):
    """The scale of the drawing, which converts operations and bytes to coordinates."""

    operations: int
    top_bytes: float

    def x(self, operation: float) -> float:
        return _LEFT + _COLUMNS * min(operation / self.operations, 1.0)

    def y(self, nbytes: float) -> float:
        return _TOP + _HEIGHT * (1 - nbytes / self.top_bytes)


def write_picture(path: Path, step: StepMemory, traffic: Mapping[str, Mapping[str, Any]], *, title: str) -> None:
    """Write the page; it appears whole or not at all.  Raises DataError when it can't be written."""
    with written_aside(path) as stream:
        stream.write(page(step, traffic, title=title).encode())


def page(step: StepMemory, traffic: Mapping[str, Mapping[str, Any]], *, title: str) -> str:
    """Return the HTML page; traffic: {axis: {collective: {"messages": ..., "bytes": ...}}}."""
    where = step.peak_operation
    phase = phase_of(step.timeline.phases, where)
    peak = f"{format_bytes(step.peak_bytes)} ({step.peak_bytes} bytes)"
    subtitle = f"Peak {peak} after {where} of {step.timeline.num_operations} operations" + (phase and f", in {phase}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>Memory over one step: {escape(title)}</h1>\n<p>{subtitle}</p>\n"
        f'{drawing(step)}\n<div class="tables">{_memory_table(step)}{_traffic_table(traffic)}</div>\n</body></html>\n'
    )


def phase_of(phases: Sequence[PhaseMark], operation: int) -> str:
    """Return the phase in which the `operation`-th operation ran; empty before the first phase."""
    return next((mark.phase for mark in reversed(phases) if mark.operation < operation), "")


def drawing(step: StepMemory) -> str:
    """Return the SVG element."""
    timeline = step.timeline
    scale = _Scale(timeline.num_operations + 1, 1.06 * max(step.peak_bytes, 1))
    width, height = _LEFT + _COLUMNS + _RIGHT, _TOP + _HEIGHT + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        *_phase_bands(timeline, scale),
        *_grid(scale),
        *_areas(step, scale),
        *_peak_mark(step, scale),
        f'<text x="{_LEFT + _COLUMNS}" y="{height - 10}" text-anchor="end">operations run</text>',
        "</svg>",
    ]
    return "\n".join(parts)


def columns(timeline: Timeline) -> NDArray[np.int64]:
    """Return live bytes [num columns, len(CATEGORIES)]: each column's highest moment, or the last one before it."""
    num_columns = min(_COLUMNS, timeline.num_operations + 1)
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


def _areas(step: StepMemory, scale: _Scale) -> list[str]:
    """Draw one closed path per category, from the bottom of the stack to its top."""
    table = columns(step.timeline)
    tops = table.cumsum(axis=1)
    paths = []
    for index, category in enumerate(CATEGORIES):
        if not step.peaks[category]:
            continue
        upper, lower = tops[:, index], tops[:, index] - table[:, index]
        hint = f"{_words(category)}: {format_bytes(step.at_peak[category])} at the peak"
        path = f"M{_LEFT} {_steps(upper, scale)}V{_steps(lower, scale, backwards=True)}Z"
        paths.append(f'<path fill="{_COLOURS[category]}" d="{path}"><title>{hint}</title></path>')
    return paths


def _steps(heights: NDArray[np.int64], scale: _Scale, *, backwards: bool = False) -> str:
    """Return the outline of columns of these heights, from the first one's to the last one's or back."""
    changes = np.flatnonzero(np.diff(heights)) + 1  # columns higher or lower than the one before
    runs = [0, *changes.tolist()]
    places = [_LEFT + _COLUMNS * run / len(heights) for run in runs] + [_LEFT + _COLUMNS]
    levels = [scale.y(int(heights[run])) for run in runs]
    if backwards:
        levels.reverse()
        places = places[::-1][1:]
    else:
        places = places[1:]
    moves = [f"{level:.1f}H{place:.1f}" for level, place in zip(levels, places, strict=True)]
    return "V".join(moves)


def _phase_bands(timeline: Timeline, scale: _Scale) -> list[str]:
    """Draw a strip for every phase, every other one shaded, with its name where there is room."""
    starts = [scale.x(mark.operation + 1) for mark in timeline.phases]
    ends = [*starts, _LEFT + _COLUMNS][1:]
    bands = []
    for number, (mark, start, end) in enumerate(zip(timeline.phases, starts, ends, strict=True)):
        shade = "#f3f5f8" if number % 2 else "#e6eaef"
        place = f'x="{start:.1f}" y="{_TOP - 22}" width="{end - start:.1f}" height="{_HEIGHT + 22}"'
        bands.append(f'<rect {place} fill="{shade}"><title>{mark.phase}</title></rect>')
        if end - start > _LETTER_WIDTH * len(mark.phase):
            middle = f'x="{(start + end) / 2:.1f}" y="{_TOP - 7}" text-anchor="middle"'
            bands.append(f"<text {middle}>{mark.phase}</text>")
    return bands


def _grid(scale: _Scale) -> list[str]:
    """Draw lines at round numbers of bytes, and of operations along the bottom."""
    lines = []
    for nbytes in range(0, int(scale.top_bytes) + 1, 2 ** max(math.ceil(math.log2(scale.top_bytes / 6)), 0)):
        y = scale.y(nbytes)
        lines.append(f'<path d="M{_LEFT} {y:.1f}h{_COLUMNS}" stroke="#c9d1d9" stroke-width="0.7"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_bytes(nbytes)}</text>')
    for operation in range(0, scale.operations, _round_up(scale.operations / 12)):
        place = f'x="{scale.x(operation):.1f}" y="{_TOP + _HEIGHT + 18}"'
        lines.append(f'<text {place} text-anchor="middle">{operation}</text>')
    return lines


def _round_up(count: float) -> int:
    """Return the least of 1, 2, 5, 10, 20, 50, ... that is not below count."""
    power: int = 10 ** max(math.floor(math.log10(count)), 0)
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= count)


def _peak_mark(step: StepMemory, scale: _Scale) -> list[str]:
    x, y = scale.x(step.peak_operation + 0.5), scale.y(step.peak_bytes)
    side = "end" if x > _LEFT + _COLUMNS / 2 else "start"
    shift = -7 if side == "end" else 7
    return [
        f'<path d="M{x:.1f} {_TOP}V{_TOP + _HEIGHT}" stroke="#1c2530" stroke-dasharray="3 3"/>',
        f'<text x="{x + shift:.1f}" y="{y - 6:.1f}" text-anchor="{side}" style="fill:#1c2530;font-weight:600">'
        f"peak {format_bytes(step.peak_bytes)}</text>",
    ]


def _memory_table(step: StepMemory) -> str:
    """Format the key to the colours, in the order of the stack from its top."""
    rows = [
        f'<tr><td><span class="swatch" style="background:{_COLOURS[category]}"></span>{_words(category)}</td>'
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
