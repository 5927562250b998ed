"""Draws a step's timeline as SVG, one row for each pipeline stage.  Pure.

A box is a computation, drawn to scale in the colour of its kind and with its micro-batch (`3`, or `3.1` for micro-batch
3 through local chunk 1) where there is room; later chunks are paler.  What stays white is idle.
"""

import math
from collections.abc import Iterator, Mapping
from html import escape
from types import MappingProxyType
from typing import NamedTuple

from megazero.pipeline.schedule import Kind
from megazero.pipeline.timeline import Span, Timeline

_LEFT, _RIGHT, _TOP = 72, 24, 64
_ROW, _GAP = 30, 8
_AXIS = 44
_CAPTION_LINE = 18
_NARROWEST, _WIDEST = 1000, 4000
_BOX_WIDTH = 26  # pixels that a box needs on average for its number
_LETTER_WIDTH = 6.5

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #4b5866; }
.title { font-size: 15px; font-weight: 600; fill: #1c2530; }
.row { font-weight: 600; fill: #1c2530; }
.box { stroke: #fff; stroke-width: 0.5; }
.number { font-size: 11px; text-anchor: middle; fill: #1c2530; }
.light { fill: #fff; }
.tick { text-anchor: middle; }
.end { text-anchor: end; }
"""


class _Look(NamedTuple):
    name: str
    colour: str
    is_dark: bool


_LOOKS: Mapping[Kind, _Look] = MappingProxyType(
    {
        Kind.FORWARD: _Look("forward", "#5fa8e0", False),
        Kind.BACKWARD: _Look("backward", "#1b998b", True),
        Kind.INPUT_GRADIENT: _Look("gradient of the input", "#f08a4b", False),
        Kind.WEIGHT_GRADIENT: _Look("gradients of the weights", "#7b6db0", True),
    }
)

# Units by the longest axis that they serve, in seconds.
_UNITS = ((1e-3, "µs", 1e6), (1.0, "ms", 1e3), (math.inf, "s", 1.0))


class _Scale(NamedTuple):
    """The scale of the time axis: seconds to x coordinates; a unit of time has `per_second` in a second."""

    makespan: float
    width: float
    unit: str
    per_second: float

    def x(self, seconds: float) -> float:
        return _LEFT + self.width * seconds / self.makespan

    def text(self, seconds: float) -> str:
        return f"{seconds * self.per_second:.4g}"


def picture(timeline: Timeline, *, title: str, predicted: float | None = None) -> str:
    """Return the SVG file of a timeline in seconds; predicted: the idle share by formula, for the caption."""
    scale = _scale(timeline)
    rows_end = _TOP + len(timeline.stages) * (_ROW + _GAP)
    width, height = _LEFT + scale.width + _RIGHT, rows_end + _AXIS + _CAPTION_LINE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}"'
        ' role="img">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width:g}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
        *_legend(timeline),
        *_axis(scale, rows_end),
        *(part for stage in range(len(timeline.stages)) for part in _row(timeline, stage, scale)),
        f'<text x="{_LEFT}" y="{height - 12}">{caption(timeline, predicted)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def caption(timeline: Timeline, predicted: float | None = None) -> str:
    """Return the caption: `2 stages x 61.2 ms, idle 31.2 % (20.0 % by the formula)`."""
    scale, number = _scale(timeline), len(timeline.stages)
    stages = f"{number} pipeline stage{'s' * (number > 1)}"
    formula = "" if predicted is None else f" ({100 * predicted:.1f} % by the formula)"
    duration = f"{scale.text(timeline.makespan)} {scale.unit}"
    return f"{stages} x {duration}, idle {100 * timeline.idle_share:.1f} %{formula}"


def _scale(timeline: Timeline) -> _Scale:
    most = max(len(spans) for spans in timeline.stages)
    unit, per_second = next((name, factor) for limit, name, factor in _UNITS if timeline.makespan < limit)
    return _Scale(timeline.makespan, min(max(_NARROWEST, most * _BOX_WIDTH), _WIDEST), unit, per_second)


def _legend(timeline: Timeline) -> Iterator[str]:
    """Draw a square and a word for every kind that occurs, and for idle time."""
    found = {span.action.kind for spans in timeline.stages for span in spans}
    entries = [(look.name, look.colour) for kind, look in _LOOKS.items() if kind in found]
    x: float = _LEFT
    for name, colour in [*entries, ("idle", "#fff")]:
        yield f'<rect x="{x:.1f}" y="38" width="12" height="12" fill="{colour}" stroke="#c6cdd5"/>'
        yield f'<text x="{x + 18:.1f}" y="48">{name}</text>'
        x += 42 + _LETTER_WIDTH * len(name)


def _row(timeline: Timeline, stage: int, scale: _Scale) -> Iterator[str]:
    """Draw a stage's frame with its name in front and its boxes inside."""
    y = _TOP + stage * (_ROW + _GAP)
    spans = timeline.stages[stage]
    num_chunks = 1 + max((span.action.chunk for span in spans), default=0)
    yield f'<text class="row end" x="{_LEFT - 8}" y="{y + _ROW / 2 + 4:g}">stage {stage}</text>'
    for span in spans:
        yield from _box(span, y, num_chunks, scale)
    yield f'<rect x="{_LEFT}" y="{y}" width="{scale.width:g}" height="{_ROW}" fill="none" stroke="#c6cdd5"/>'


def _box(span: Span, y: float, num_chunks: int, scale: _Scale) -> Iterator[str]:
    action, look = span.action, _LOOKS[span.action.kind]
    x, width = scale.x(span.start), scale.x(span.end) - scale.x(span.start)
    opacity = "" if not action.chunk else f' fill-opacity="{1 - 0.6 * action.chunk / num_chunks:.2f}"'
    hint = f"{action}: {scale.text(span.start)} to {scale.text(span.end)} {scale.unit}"
    place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}"'
    yield f'<rect class="box" {place} fill="{look.colour}"{opacity}><title>{hint}</title></rect>'
    number = str(action)[len(action.kind.value) :]
    if width > _LETTER_WIDTH * len(number) + 2:
        classes = "number light" if look.is_dark and not action.chunk else "number"
        yield f'<text class="{classes}" x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 4:g}">{number}</text>'


def _axis(scale: _Scale, y: float) -> Iterator[str]:
    """Draw lines at round times, and the unit."""
    step = round_up(scale.makespan / 12)
    for count in range(int(scale.makespan / step) + 1):
        x = scale.x(count * step)
        yield f'<path d="M{x:.1f} {_TOP - 4}V{y}" stroke="#dde3e9" stroke-width="0.7"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{y + 12}">{scale.text(count * step)}</text>'
    yield f'<text class="end" x="{_LEFT + scale.width:g}" y="{y + 28}">time, {scale.unit}</text>'


def round_up(amount: float) -> float:
    """Return the least of ..., 0.1, 0.2, 0.5, 1, 2, 5, 10, ... that is not below amount."""
    power: float = 10.0 ** math.floor(math.log10(amount))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= amount * (1 - 1e-9))
