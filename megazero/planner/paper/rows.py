"""Rows of figures beside the paper's, and how they are printed.  Pure."""

from collections.abc import Iterator
from typing import Any, NamedTuple

HEAD = f"{'':<36}{'this code':>14} {'the paper':>12}"


class PaperFigure(NamedTuple):
    """A figure: of what, by this code, by the paper (None where it has none), and the unit.

    sign: how the paper's text has its figure: "" for a value, ">" for more than it, "<" for less, "~" for about.
    is_measured: the paper's is a measurement, which this code's is a prediction of.  note: what else there is to say.
    """

    name: str
    ours: float
    papers: float | None
    unit: str
    sign: str = ""
    is_measured: bool = False
    note: str = ""

    @property
    def error(self) -> float | None:
        """The relative error of a prediction; None where the paper has no measurement."""
        return self.ours / self.papers - 1 if self.is_measured and self.papers else None

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "error": self.error}


class Table(NamedTuple):
    """A table or a figure of the paper."""

    title: str
    rows: tuple[PaperFigure, ...]


def lines_of(found: Table) -> Iterator[str]:
    """Yield a table as text: every figure of this code with the paper's beside it."""
    yield found.title
    for row in found.rows:
        papers = "" if row.papers is None else f"{row.sign}{row.papers:,.6g}"
        error = "" if row.error is None else f"{100 * row.error:+.0f} %"
        more = "; ".join(part for part in (error, row.note) if part)
        yield f"  {row.name:<34}{row.ours:>14,.4f} {papers:>12}  {row.unit:<20}{more}".rstrip()
