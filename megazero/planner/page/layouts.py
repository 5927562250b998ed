"""Advice as one HTML page: all layouts that were run dry as points of memory and time, and as a table with commands.

A point is a link to its row, so that it is reached by keyboard, and the page needs no script.
"""

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from megazero.planner.advice.advise import Advice, to_json
from megazero.planner.advice.search import Found
from megazero.planner.advice.show import command_lines, lines
from megazero.planner.page.document import document
from megazero.planner.page.tables import figure, folded, nbytes, table, word
from megazero.svg import legend, part_of_page, round_numbers, text
from megazero.units import format_bytes

_LEFT, _TOP, _WIDTH, _HEIGHT = 60.0, 46.0, 1000.0, 400.0
_GIB = 1 << 30
_ROOM = 1.06  # of the axes beyond the farthest point
_COLOURS = ("#3d8bd4", "#e0702f", "#1b998b", "#9a7fd1", "#b9803f", "#d1495b", "#8a8f2e")
_OTHERS = "#7d8590"


class LayoutPoint(NamedTuple):
    """A layout that was run dry.  number: its place among the fastest that fit; 0 for one that is not among them."""

    number: int
    found: Found
    fits: bool

    @property
    def seconds(self) -> float:
        return self.found.measured.seconds

    @property
    def nbytes(self) -> int:
        return self.found.measured.total

    @property
    def binding(self) -> str:
        return self.found.measured.step.binding

    @property
    def title(self) -> str:
        """The point in words."""
        place = f"{self.number}: " if self.number else ""
        fits = "fits" if self.fits else "does not fit"
        return f"{place}{self.found.choice.describe()}, {self.seconds:.3g} s, {format_bytes(self.nbytes)}, {fits}"


def layout_points(advice: Advice) -> list[LayoutPoint]:
    """Return the layouts on as many nodes as there are, and those of the fastest: first these, then by their times."""
    fastest, hardware = list(advice.outcome.found), advice.search.hardware
    places = {(each.choice, each.nodes): number for number, each in enumerate(fastest, start=1)}
    counts = {advice.nodes.count, *(each.nodes.count for each in fastest)}
    tried = [
        Found(*layout, measured)
        for layout, measured in advice.search.tried.items()
        if measured is not None and layout[1].count in counts
    ]
    found = [LayoutPoint(places.get(each[:2], 0), each, each.measured.fits(hardware)) for each in tried]
    return sorted(found, key=lambda point: (point.number or len(found), point.seconds))


def layouts_page(advice: Advice, command: str) -> str:
    """Return the HTML page."""
    points, hardware = layout_points(advice), advice.search.hardware
    text_of_all = "\n".join(lines(advice)).partition("\n# ")[0]
    lead = (
        "Every layout that was run dry. Its step is predicted; its memory is that of the fullest device, whose limit is"
        " the dashed line. Full points fit, rings do not, and the numbered ones are the fastest that do. A point is a"
        " link to its row. Of a layout that is not here, bounds alone were computed."
    )
    drawn = "<p>No layout of these nodes was run dry.</p>"
    if points:
        drawn = f"<figure>{drawn_points(points, hardware.memory_bytes)}</figure>\n{_table(points)}"
    body = (
        f'<section aria-label="Layouts"><h2>Layouts</h2>\n<p>{escape(lead)}</p>\n'
        f"{drawn}</section>\n"
        f'<section aria-label="Commands"><h2>Commands</h2>\n{_commands(advice)}</section>\n'
        f'<section aria-label="All of it"><h2>All of it</h2>\n<pre>{escape(text_of_all)}</pre></section>'
    )
    return document(
        f"Layouts for {hardware.name}, {advice.nodes.describe()}", command, body, data={"advice": to_json(advice)}
    )


def drawn_points(points: Sequence[LayoutPoint], limit: int) -> str:
    """Draw layouts by memory and time, with the memory that a device has."""
    most_bytes = max(limit, *(point.nbytes for point in points)) * _ROOM
    times = [point.seconds for point in points]
    low, high = min(times) / _ROOM, max(times) * _ROOM

    def across(amount: float) -> float:
        return _LEFT + _WIDTH * amount / most_bytes

    def down(seconds: float) -> float:
        return _TOP + _HEIGHT * (high - seconds) / (high - low)

    kinds = list(dict.fromkeys(point.binding for point in points))
    colours = {kind: _COLOURS[at] if at < len(_COLOURS) else _OTHERS for at, kind in enumerate(kinds)}
    parts = [*legend(_LEFT, 22, colours.items())]
    for value in round_numbers(0, most_bytes / _GIB, 10):
        x, foot = across(value * _GIB), _TOP + _HEIGHT
        parts.append(f'<path class="faint" d="M{x:.1f} {_TOP:g}V{foot:g}"/>')
        parts.append(text(x, foot + 18, f"{value:g}", "middle"))
    for value in round_numbers(low, high, 8):
        parts.append(f'<path class="faint" d="M{_LEFT:g} {down(value):.1f}h{_WIDTH:g}"/>')
        parts.append(text(_LEFT - 8, down(value) + 4, f"{value:g}", "end"))
    parts.append(text(_LEFT + _WIDTH, _TOP + _HEIGHT + 36, "GiB of a device", "end"))
    parts.append(text(8, _TOP - 10, "s a step"))
    parts.append(
        f'<path class="ink" d="M{across(limit):.1f} {_TOP:g}v{_HEIGHT:g}" stroke-dasharray="6 4" stroke-width="1.5"/>'
    )
    parts.append(text(across(limit) - 6, _TOP + 12, f"a device has {format_bytes(limit)}", "end"))
    parts += _marks(points, [(across(p.nbytes), down(p.seconds)) for p in points], [colours[p.binding] for p in points])
    label = "layouts by the memory of a device and the time of a step"
    return part_of_page(_LEFT + _WIDTH + 20, _TOP + _HEIGHT + 46, parts, label=label, role="group")


def _marks(
    points: Sequence[LayoutPoint], places: Sequence[tuple[float, float]], colours: Sequence[str]
) -> Iterator[str]:
    """Yield a link with a full point or a ring for every layout, the first last, so that it lies on top."""
    for at in reversed(range(len(points))):
        point, (x, y), colour = points[at], places[at], colours[at]
        fill = colour if point.fits else "none"
        mark = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{fill}" stroke="{colour}" stroke-width="2"/>'
        if not point.fits:  # the whole of a ring is to be hit
            mark += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="transparent"/>'
        number = text(x, y - 10, str(point.number), "strong middle") if point.number else ""
        title = escape(point.title)
        yield f'<a href="#layout-{at + 1}" aria-label="{title}"><title>{title}</title>{mark}{number}</a>'


def _table(points: Sequence[LayoutPoint]) -> str:
    head = ("layout", "", "nodes", "a step", "tokens/s", "MFU", "memory", "of the host", "binds", "")
    rows = []
    for at, point in enumerate(points, start=1):
        measured, choice = point.found.measured, point.found.choice
        rate = measured.tokens / measured.seconds
        rows.append(
            (
                f'<span id="layout-{at}"></span>{escape(choice.describe())}',
                word(str(point.number or "")),
                figure(point.found.nodes.count, str(point.found.nodes.count)),
                figure(measured.seconds, f"{measured.seconds:.3g} s"),
                figure(rate, f"{rate:,.0f}"),
                figure(measured.mfu, f"{100 * measured.mfu:.1f} %"),
                nbytes(measured.total),
                nbytes(measured.host_bytes),
                word(point.binding),
                word(("fits" if point.fits else "too large") + ", rounds numbers" * choice.rounds),
            )
        )
    return table("Layouts that were run dry", head, rows)


def _commands(advice: Advice) -> str:
    shown = (
        folded(
            f"{number}: {found.choice.describe()}",
            f"<pre>{escape(chr(10).join(command_lines(advice.search, found, '')))}</pre>",
        )
        for number, found in enumerate(advice.outcome.found, start=1)
    )
    return "\n".join(shown) or "<p>No layout fits.</p>"
