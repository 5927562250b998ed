"""Lines of the input that cannot be used, noted instead of refused (--skip-bad-lines)."""

from collections.abc import Iterable

from megazero.data.line_numbers import LineCounter
from megazero.errors import DataError


class BadLines:
    """Where a line, row or document was passed over, and why; in the order of the input.

    counter: tells their numbers.
    """

    def __init__(self) -> None:
        self.counter = LineCounter()
        self._lines: list[str] = []

    @property
    def count(self) -> int:
        """How many."""
        return len(self._lines)

    def note(self, where: str, reason: str) -> None:
        """Pass one over.  where: file and line."""
        self._lines.append(f"{where}: {reason}")

    def note_error(self, error: DataError) -> None:
        """Pass over what an error tells of."""
        for problem in error.problems:
            self.note(problem.given, problem.rule)

    def extend(self, lines: Iterable[str]) -> None:
        """Take over what `lines` of another one gave."""
        self._lines.extend(lines)

    def lines(self) -> list[str]:
        """Each as FILE:LINE: REASON."""
        return list(self._lines)

    def take(self) -> list[str]:
        """The same, and forget them."""
        lines, self._lines = self._lines, []
        return lines
