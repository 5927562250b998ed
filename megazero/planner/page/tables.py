"""Tables of a plan's page, whose cells carry the exact figures beside the readable ones.  Pure."""

from collections.abc import Iterable, Sequence
from html import escape

from megazero.units import format_bytes


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column names its rows.  rows: cells as HTML, as `word`, `figure` and the like make."""
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "\n".join(f'<tr><th scope="row">{row[0]}</th>{"".join(row[1:])}</tr>' for row in rows)
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{titles}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def folded(summary: str, content: str) -> str:
    """Return content that a reader unfolds."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>"


def word(content: str) -> str:
    """Return a cell of words."""
    return f"<td>{escape(content)}</td>"


def nbytes(amount: int) -> str:
    """Return a cell of bytes."""
    return figure(amount, format_bytes(amount))


def figure(amount: float, shown: str) -> str:
    """Return a cell of a figure."""
    return f'<td class="figure"><data value="{amount!r}">{escape(shown)}</data></td>'


def share(amount: float) -> str:
    """Return a cell of a share, 0 to 1."""
    return figure(amount, f"{100 * amount:.1f} %" if amount else "-")


def swatch(name: str, colour: str) -> str:
    """Return a name behind a square of its colour."""
    return f'<span class="swatch" style="background:{colour}"></span>{escape(name.replace("_", " "))}'
