"""The pictures of a plan's page: a rank's memory through a step, the timeline of the stages, and traffic by link."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from types import MappingProxyType

from megazero.planner.page.stages import Lane, LanesOfStage
from megazero.report.pictures.chart import bars
from megazero.svg import LETTER_WIDTH, legend, part_of_page, round_numbers, text
from megazero.units import format_bytes

# By the beginning of a span's name: the letter of an action (`pipeline.schedule.Kind`), or a phase.
WORK_COLOURS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "F": ("forward", "#3d8bd4"),
        "B": ("backward", "#e0702f"),
        "I": ("gradient of the input", "#e0702f"),
        "W": ("gradient of the weights", "#b9803f"),
        "reduce": ("reduce", "#9a7fd1"),
        "update": ("update", "#1b998b"),
        "": ("before and between", "#7d8590"),
    }
)
_MESSAGE = "#8a8f2e"
LINK_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "inside a node": "#3d8bd4",
        "between nodes": "#e0702f",
        "host memory": "#1b998b",
        "files": "#9a7fd1",
    }
)
_LEFT, _WIDTH, _ROW, _GAP = 150.0, 930.0, 16, 3
_NARROW = 4.0  # pixels


def timeline(stages: Sequence[LanesOfStage], seconds: float) -> str:
    """Draw the lanes of some pipeline stages over one step: the device, and each channel that it has waited for.

    A thin line leads from the end of a message to the place where the device went on after a wait for it.
    """
    parts: list[str] = []
    y = 46.0
    unit, factor = ("ms", 1000.0) if seconds < 10 else ("s", 1.0)
    used: dict[str, None] = {}
    for stage in stages:
        parts.append(text(8, y + 12, f"stage {stage.number}", "strong"))
        device_y = y
        for number, lane in enumerate(stage.lanes):
            parts.append(text(_LEFT - 8, y + 12, lane.name, "end"))
            parts.append(f'<rect class="band" x="{_LEFT:g}" y="{y:g}" width="{_WIDTH:g}" height="{_ROW}"/>')
            parts += _spans(lane, seconds, y, used, is_device=number == 0)
            parts += _waited(stage, lane.name, seconds, y, device_y) if number else []
            y += _ROW + _GAP
        y += 10
    foot = y + 4
    marks = []
    for value in round_numbers(0, seconds * factor, 10):
        x = _LEFT + _WIDTH * value / factor / seconds
        marks.append(f'<path class="line" d="M{x:.1f} 40V{foot - 8:.1f}" stroke-width="0.5"/>')
        marks.append(text(x, foot + 8, f"{value:g}", "middle"))
    entries = [(name, dict(WORK_COLOURS.values())[name]) for name in used] + [("message or copy", _MESSAGE)]
    parts = [*legend(_LEFT, 22, entries), *marks, text(_LEFT + _WIDTH, foot + 24, unit, "end"), *parts]
    return part_of_page(_LEFT + _WIDTH + 20, foot + 30, parts, label="timeline of one step, by pipeline stage")


def _spans(lane: Lane, seconds: float, y: float, used: dict[str, None], *, is_device: bool) -> Iterator[str]:
    """Draw a lane's spans: wide ones each with its name, all narrow ones of a colour as one path."""
    narrow: dict[str, list[str]] = {}
    for name, start, end in _joined(lane, seconds / _WIDTH / 2):
        x, width = _LEFT + _WIDTH * start / seconds, max(_WIDTH * (end - start) / seconds, 0.5)
        title, colour = _work(name) if is_device else (lane.name, _MESSAGE)
        if is_device:
            used[title] = None
        if width < _NARROW:
            narrow.setdefault(colour, []).append(f"M{x:.1f} {y:g}h{width:.1f}v{_ROW}h-{width:.1f}z")
            continue
        what = name or title if is_device else f"{lane.name}, waited for in {name}" if name else lane.name
        hint = f"{what}: {1000 * start:.3f} to {1000 * end:.3f} ms"
        place = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{_ROW}"'
        yield f'<rect {place} fill="{colour}"><title>{escape(hint)}</title></rect>'
        if is_device and width > LETTER_WIDTH * len(name) + 3:
            yield text(x + width / 2, y + 12, name, "middle on-colour")
    for colour, outlines in narrow.items():
        yield f'<path fill="{colour}" d="{"".join(outlines)}"/>'


def _joined(lane: Lane, least: float) -> Iterator[tuple[str, float, float]]:
    """Yield the spans with those of one name joined where less than `least` seconds are between them."""
    held: tuple[str, float, float] | None = None
    for span in lane.spans:
        name = span.name if span.end - span.start >= least or held is None else held[0]
        if held is not None and held[0] == name and span.start - held[2] < least:
            held = name, held[1], max(held[2], span.end)
            continue
        if held is not None:
            yield held
        held = span.name, span.start, span.end
    if held is not None:
        yield held


def _work(name: str) -> tuple[str, str]:
    return WORK_COLOURS.get(name) or WORK_COLOURS.get(name[:1], WORK_COLOURS[""])


def _waited(stage: LanesOfStage, kind: str, seconds: float, y: float, device_y: float) -> Iterator[str]:
    """Draw a line from every message to the device's place behind the wait for it, at most one in a pixel."""
    long = (wait for wait in stage.waits if wait.kind == kind and wait.end - wait.start > seconds / _WIDTH / 3)
    pixels = dict.fromkeys(round(_WIDTH * wait.end / seconds) for wait in long)
    if pixels:
        lines = "".join(f"M{_LEFT + pixel:g} {y:g}V{device_y + _ROW:g}" for pixel in pixels)
        yield f'<path class="ink" d="{lines}" stroke-width="0.8"/>'


def traffic(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Draw a bar for every axis: bytes by the link that they pass."""
    return bars(rows, LINK_COLOURS, shown=format_bytes, label="bytes sent in a step, by axis and link")
