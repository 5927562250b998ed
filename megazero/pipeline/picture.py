"""Draws a step's timeline as SVG, one row for each pipeline stage.  Pure.

A box is a computation, drawn to scale in the colour of its kind and with its micro-batch (`3`, or `3.1` for micro-batch
3 through local chunk 1) where there is room; later chunks are paler.  A line leads from a computation to the one of
another stage that needs its result.  What stays empty is idle.  Beneath stands the ideal without time for messages.
"""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from megazero.pipeline.schedule import Kind
from megazero.pipeline.timeline import Span, Timeline, messages
from megazero.svg import LETTER_WIDTH, legend, round_up, text
from megazero.svg import picture as svg_picture

_LEFT, _RIGHT, _TOP = 72, 24, 84
_ROW, _GAP = 30, 14
_AXIS = 44
_IDEAL = 34  # the title of the ideal
_CAPTION_LINE = 18
_NARROWEST, _WIDEST = 1000, 4000
_BOX_WIDTH = 26  # pixels that a box needs on average for its number
_MOST_MESSAGES = 600  # lines; more would hide the boxes

_STYLE = """
.row { font-weight: 600; fill: var(--ink); }
.box { stroke: var(--paper); stroke-width: 0.5; }
.number { font-size: 11px; text-anchor: middle; fill: #1c2530; }
.light { fill: #fff; }
.pale { fill: var(--ink); }
.tick { text-anchor: middle; }
.message { stroke: var(--soft); stroke-width: 0.8; fill: none; }
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


def picture(timeline: Timeline, *, title: str, predicted: float | None = None, ideal: Timeline | None = None) -> str:
    """Return the SVG file of a timeline in seconds.

    predicted: the idle share by formula, for the caption.  ideal: a timeline to draw beneath, to the same scale.
    """
    scale = _scale(timeline)
    rows_end = _TOP + len(timeline.stages) * (_ROW + _GAP)
    ideal_top = rows_end + _AXIS + _IDEAL
    end = rows_end + _AXIS if ideal is None else ideal_top + len(ideal.stages) * (_ROW + _GAP)
    width, height = _LEFT + scale.width + _RIGHT, end + _CAPTION_LINE
    parts = [
        text(_LEFT, 24, title, "title"),
        *_legend(timeline),
        *_axis(scale, rows_end),
        *_rows(timeline, _TOP, scale),
    ]
    if ideal is not None:
        share = f"idle {100 * ideal.idle_share:.1f} %"
        parts.append(
            text(_LEFT, ideal_top - 12, f"ideal, if messages took no time and alike computations as long: {share}")
        )
        parts += _rows(ideal, ideal_top, scale)
    parts.append(text(_LEFT, height - 12, caption(timeline, predicted)))
    return svg_picture(width, height, parts, label=title, style=_STYLE)


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
    """Draw a square and a word for every kind that occurs and for idle time; explain numbers and lines."""
    spans = [span for spans in timeline.stages for span in spans]
    found = {span.action.kind for span in spans}
    entries = [(look.name, look.colour) for kind, look in _LOOKS.items() if kind in found]
    yield from legend(_LEFT, 48, [*entries, ("idle", "transparent")])
    has_chunks = any(span.action.chunk for span in spans)
    number = (
        "3: micro-batch 3"
        if not has_chunks
        else "3.1: micro-batch 3 in the stage's chunk 1 of layers (paler); 3: in chunk 0"
    )
    line = "; a line: a message, from the computation that sends it to the one that waits for it"
    yield text(_LEFT, 68, number + line * (len(timeline.stages) > 1))


def _rows(timeline: Timeline, top: float, scale: _Scale) -> Iterator[str]:
    """Draw the rows of all stages, and the messages between them."""
    for stage in range(len(timeline.stages)):
        yield from _row(timeline, stage, top + stage * (_ROW + _GAP), scale)
    found = list(messages(timeline))
    for message in found if len(found) <= _MOST_MESSAGES else ():
        goes_down = message.receiver > message.sender
        begin, end = (top + stage * (_ROW + _GAP) for stage in (message.sender, message.receiver))
        y, to = (begin + _ROW, end) if goes_down else (begin, end + _ROW)
        yield f'<path class="message" d="M{scale.x(message.sent):.1f} {y:g}L{scale.x(message.used):.1f} {to:g}"/>'


def _row(timeline: Timeline, stage: int, y: float, scale: _Scale) -> Iterator[str]:
    """Draw a stage's frame with its name in front and its boxes inside."""
    spans = timeline.stages[stage]
    num_chunks = 1 + max((span.action.chunk for span in spans), default=0)
    yield text(_LEFT - 8, y + _ROW / 2 + 4, f"stage {stage}", "row end")
    for span in spans:
        yield from _box(span, y, num_chunks, scale)
    yield f'<rect x="{_LEFT}" y="{y:g}" width="{scale.width:g}" height="{_ROW}" fill="none" class="edge"/>'


def _box(span: Span, y: float, num_chunks: int, scale: _Scale) -> Iterator[str]:
    action, look = span.action, _LOOKS[span.action.kind]
    x, width = scale.x(span.start), scale.x(span.end) - scale.x(span.start)
    opacity = "" if not action.chunk else f' fill-opacity="{1 - 0.6 * action.chunk / num_chunks:.2f}"'
    hint = f"{action}: {scale.text(span.start)} to {scale.text(span.end)} {scale.unit}"
    place = f'x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_ROW}"'
    yield f'<rect class="box" {place} fill="{look.colour}"{opacity}><title>{hint}</title></rect>'
    number = str(action)[len(action.kind.value) :]
    if width > LETTER_WIDTH * len(number) + 2:
        kind = "number pale" if action.chunk else "number light" if look.is_dark else "number"
        yield text(x + width / 2, y + _ROW / 2 + 4, number, kind)


def _axis(scale: _Scale, y: float) -> Iterator[str]:
    """Draw lines at round times, and the unit."""
    step = round_up(scale.makespan / 12)
    for count in range(int(scale.makespan / step) + 1):
        x = scale.x(count * step)
        yield f'<path class="faint" d="M{x:.1f} {_TOP - 4}V{y - _GAP:g}"/>'
        yield text(x, y + 2, scale.text(count * step), "tick")
    yield text(_LEFT + scale.width, y + 20, f"time, {scale.unit}", "end")
