"""Lengths of documents as a person sees them: bars in the terminal, or an SVG file."""

import io
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from megazero.data.files import written_aside
from megazero.data.lengths import LengthRange, Lengths
from megazero.units import format_count

_BAR_WIDTH = 40
_LEFT, _RIGHT, _TOP, _BOTTOM = 24, 24, 64, 64
_COLUMN, _GAP, _HEIGHT = 52, 8, 260


def length_lines(lengths: Lengths) -> list[str]:
    """Figures, then a line with a bar for every range."""
    lines = [
        f"lengths        shortest {lengths.shortest}, median {lengths.median}, mean {lengths.mean:.1f}, "
        f"95th percentile {lengths.percentile_95}, longest {lengths.longest} tokens",
        f"empty          {lengths.empty} of {lengths.documents} documents",
    ]
    table = Table.grid(padding=(0, 2))
    heads = ("tokens", "documents", "share")
    for _ in heads:
        table.add_column(justify="right", no_wrap=True)
    table.add_row(*heads)
    most = max((found.documents for found in lengths.ranges), default=0)
    for found in lengths.ranges:
        share = f"{100 * found.documents / lengths.documents:.1f} %"
        table.add_row(found.name, str(found.documents), share, Bar(most, 0, found.documents, width=_BAR_WIDTH))
    text = io.StringIO()
    Console(file=text, width=10_000, color_system=None).print(table)
    return [*lines, *(line.rstrip() for line in text.getvalue().splitlines())]


def write_length_picture(path: Path, lengths: Lengths, *, title: str) -> None:
    """Write the histogram as SVG; it appears whole or not at all.  Raises DataError when it can't be written."""
    with written_aside(path) as stream:
        stream.write(length_picture(lengths, title=title).encode())


def length_picture(lengths: Lengths, *, title: str) -> str:
    """The SVG file: a column for every range, on a linear scale, with its count above."""
    width = max(_LEFT + len(lengths.ranges) * (_COLUMN + _GAP) + _RIGHT, 640)
    height = _TOP + _HEIGHT + _BOTTOM
    figures = (
        f"{format_count(lengths.documents)} documents, {format_count(lengths.tokens)} tokens; "
        f"median {lengths.median}, mean {lengths.mean:.1f}, 95th percentile {lengths.percentile_95}, "
        f"longest {lengths.longest}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img">',
        "<style>text { font: 12px system-ui, sans-serif; fill: #4b5866; } .middle { text-anchor: middle; }"
        " .title { font-size: 15px; font-weight: 600; fill: #1c2530; }</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="{_LEFT}" y="24">Documents by length: {escape(title)}</text>',
        f'<text x="{_LEFT}" y="42">{figures}</text>',
        *_columns(lengths.ranges),
        f'<text x="{_LEFT}" y="{height - 14}">tokens in a document, from each figure up to the next</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _columns(ranges: Sequence[LengthRange]) -> Iterator[str]:
    most = max((found.documents for found in ranges), default=0)
    foot = _TOP + _HEIGHT
    for number, found in enumerate(ranges):
        x = _LEFT + number * (_COLUMN + _GAP)
        tall = (_HEIGHT - 20) * found.documents / most
        top, middle = foot - tall, x + _COLUMN / 2
        hint = f"<title>{found.name} tokens: {found.documents} documents</title>"
        place = f'x="{x}" y="{top:.1f}" width="{_COLUMN}" height="{tall:.1f}"'
        yield f'<rect class="bar" {place} fill="#1b998b">{hint}</rect>'
        yield f'<text class="middle" x="{middle:g}" y="{top - 5:.1f}">{format_count(found.documents)}</text>'
        yield f'<text class="middle" x="{middle:g}" y="{foot + 16}">{_binary(found.shortest)}</text>'


def _binary(length: int) -> str:
    """1024 reads 1Ki; smaller ones, all of them powers of two, as they are."""
    for shift, unit in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if length >> shift:
            return f"{length >> shift}{unit}"
    return str(length)
