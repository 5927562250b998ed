"""Charts for pages: curves over iterations, and a stacked bar for every rank."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megazero.svg import legend, part_of_page, round_numbers, text
from megazero.units import format_count

CURVES_SIZE = _WIDTH, _HEIGHT = 540, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 52, 36
_COLUMNS = 400  # more points than this are drawn as a mean with the band from least to most
_ROW, _GAP = 16, 6

# Colours that differ from each other, and from a white and a black background.
PALETTE = ("#3d8bd4", "#e0702f", "#1b998b", "#9a7fd1")


class PlottedCurve(NamedTuple):
    """A line of points; NaN leaves a gap.  dotted: every point is marked, for curves of few points."""

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    dotted: bool = False


class _Binned(NamedTuple):
    """The points of a curve, column by column: where, and the mean, the least and the most there, all finite."""

    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def curves(title: str, lines: Sequence[PlottedCurve], *, shown: Callable[[float], str] = "{:.4g}".format) -> str:
    """Return an SVG element with the lines over iterations; empty if no line has a point.  shown: formats a value."""
    parts = curve_parts(title, lines, shown=shown)
    return part_of_page(*CURVES_SIZE, parts, label=title) if parts else ""


def curve_parts(
    title: str, lines: Sequence[PlottedCurve], *, shown: Callable[[float], str] = "{:.4g}".format
) -> list[str]:
    """Return the parts of a picture of `CURVES_SIZE` as `curves` draws it."""
    colours = dict(zip((line.name for line in lines), PALETTE, strict=False))
    drawn = {line.name: (line, _binned(line)) for line in lines if np.isfinite(line.y).any()}
    if not drawn:
        return []
    means = np.concatenate([binned.mean for _, binned in drawn.values()])
    places = np.concatenate([binned.x for _, binned in drawn.values()])
    left, right = float(places.min()), float(places.max())
    right = max(right, left + 1)
    bottom, top = _range(float(means.min()), float(means.max()))

    def x(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (values - left) / (right - left)

    def y(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (top - values.clip(bottom, top)) / (top - bottom)

    parts = [text(_LEFT, 20, title, "strong")]
    parts += legend(_LEFT, 40, [(name, colours[name]) for name in drawn]) if len(lines) > 1 else []
    for value in round_numbers(bottom, top, 5):
        at = float(y(np.array([value]))[0])
        parts.append(f'<path class="faint" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(text(_LEFT - 8, at + 4, shown(value), "end"))
    for value in round_numbers(left, right, 6):
        if value == int(value):
            parts.append(text(float(x(np.array([value]))[0]), _HEIGHT - 18, format_count(value), "middle"))
    parts.append(text(_WIDTH - _RIGHT, _HEIGHT - 3, "iteration", "end"))
    for name, (line, binned) in drawn.items():
        parts += _line(line, binned, colours[name], x, y)
    return parts


_Axis = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def _line(line: PlottedCurve, binned: _Binned, colour: str, x: _Axis, y: _Axis) -> Iterable[str]:
    places = x(binned.x)
    if (binned.low < binned.high).any():
        above, below = _points(places, y(binned.high)), _points(places[::-1], y(binned.low[::-1]))
        yield f'<path fill="{colour}" fill-opacity="0.25" d="M{above}L{below}Z"/>'
    yield f'<path fill="none" stroke="{colour}" stroke-width="1.8" d="M{_points(places, y(binned.mean))}"/>'
    if line.dotted or len(binned.x) == 1:
        for at, height in zip(places, y(binned.mean), strict=True):
            yield f'<circle cx="{at:.1f}" cy="{height:.1f}" r="3" fill="{colour}"/>'


def _points(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    return "L".join(f"{at:.1f} {height:.1f}" for at, height in zip(x, y, strict=True))


def _binned(line: PlottedCurve) -> _Binned:
    """Return the finite points, at most `_COLUMNS` of them: of more, those that fall into a column together."""
    finite = np.isfinite(line.y)
    x, y = line.x[finite].astype(np.float64), line.y[finite]
    if len(x) <= _COLUMNS:
        return _Binned(x, y, y, y)
    starts = np.unique(np.arange(_COLUMNS) * len(x) // _COLUMNS)
    counts = np.diff([*starts, len(x)])
    x_means, y_means = (np.add.reduceat(values, starts) / counts for values in (x, y))
    return _Binned(x_means, y_means, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts))


def _range(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis, a little beyond its values; one that begins near 0 begins at 0."""
    spread = high - low or abs(high) or 1.0
    begins_at_zero = 0 <= low < 0.3 * high
    return (0.0 if begins_at_zero else low - 0.05 * spread), high + 0.05 * spread


def bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    colours: Mapping[str, str],
    *,
    shown: Callable[[float], str],
    label: str = "memory of every rank",
) -> str:
    """Return an SVG element with a stacked bar for every (name, {part: amount}), longest = most, and its sum."""
    parts = {name for _, amounts in rows for name, amount in amounts.items() if amount}
    present = [name for name in colours if name in parts]
    most = max((sum(amounts.values()) for _, amounts in rows), default=0) or 1
    left, width = 80, 2 * _WIDTH
    room = width - left - 90
    drawn = legend(left, 16, [(name.replace("_", " "), colours[name]) for name in present])
    for number, (title, amounts) in enumerate(rows):
        y, x = 30 + number * (_ROW + _GAP), float(left)
        drawn.append(text(left - 8, y + 12, title, "end"))
        for name in present:
            length = room * amounts.get(name, 0) / most
            hint = f"<title>{name.replace('_', ' ')}: {shown(amounts.get(name, 0))}</title>"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{_ROW}" fill="{colours[name]}">{hint}</rect>'
            )
            x += length
        drawn.append(text(x + 8, y + 12, shown(sum(amounts.values()))))
    return part_of_page(width, 36 + len(rows) * (_ROW + _GAP), drawn, label=label)
