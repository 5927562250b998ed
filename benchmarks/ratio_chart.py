"""A chart of ratios: horizontal bars in panels, with quartiles as a line through each bar's end; SVG.  Pure.

A line stands at 1, the system that others are measured by.  Bars of megazero's own systems have its colour.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

_LEFT, _RIGHT, _TOP = 220, 70, 56
_WIDTH = 620
_ROW, _BAR = 24, 14
_HEAD, _GAP = 30, 18
_OURS, _OTHERS = "#1b998b", "#9fb3c8"

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #4b5866; }
.title { font-size: 15px; font-weight: 600; fill: #1c2530; }
.panel { font-weight: 600; fill: #1c2530; }
.name, .end { text-anchor: end; }
.tick { text-anchor: middle; }
"""


class Bar(NamedTuple):
    """A system's first quartile, median and third quartile, as ratios."""

    name: str
    low: float
    middle: float
    high: float


class Panel(NamedTuple):
    """The systems of one run."""

    title: str
    bars: Sequence[Bar]

    @property
    def height(self) -> int:
        return _HEAD + _ROW * len(self.bars)


def chart(title: str, panels: Sequence[Panel]) -> str:
    """The SVG file; all panels have one scale."""
    largest = max([1.0, *(bar.high for panel in panels for bar in panel.bars)])
    end = _TOP + sum(panel.height + _GAP for panel in panels)
    width, height = _LEFT + _WIDTH + _RIGHT, end + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="24" y="26">{escape(title)}</text>',
        *_axis(largest, end),
    ]
    y = _TOP
    for panel in panels:
        parts += _panel(panel, y, largest)
        y += panel.height + _GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(ratio: float, largest: float) -> float:
    return _LEFT + _WIDTH * ratio / largest


def _axis(largest: float, end: int) -> Iterator[str]:
    """Lines at round ratios; the one at 1 is darker."""
    step = 0.25 if largest <= 3 else 10.0 ** math.floor(math.log10(largest)) / (2 if largest < 5 else 1)
    for count in range(int(largest / step) + 1):
        ratio = count * step
        colour, stroke = ("#4b5866", 1.2) if ratio == 1 else ("#dde3e9", 0.7)
        x = _x(ratio, largest)
        yield f'<path d="M{x:.1f} {_TOP - 8}V{end - 4}" stroke="{colour}" stroke-width="{stroke}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{end + 12}">{ratio:g}</text>'


def _panel(panel: Panel, top: int, largest: float) -> Iterator[str]:
    yield f'<text class="panel" x="24" y="{top + 14}">{escape(panel.title)}</text>'
    for index, bar in enumerate(panel.bars):
        yield from _bar(bar, top + _HEAD + index * _ROW, largest)


def _bar(bar: Bar, top: int, largest: float) -> Iterator[str]:
    middle, width = top + _BAR / 2, _x(bar.middle, largest) - _LEFT
    colour = _OURS if bar.name.startswith("megazero") else _OTHERS
    low, high = _x(bar.low, largest), _x(bar.high, largest)
    yield f'<text class="name" x="{_LEFT - 8}" y="{middle + 4:g}">{escape(bar.name)}</text>'
    yield f'<rect class="bar" x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>'
    yield f'<path d="M{low:.1f} {middle:g}H{high:.1f}" stroke="#1c2530" stroke-width="1.2"/>'
    yield f'<text x="{max(high, _LEFT + width) + 6:.1f}" y="{middle + 4:g}">{bar.middle:.2f}</text>'
