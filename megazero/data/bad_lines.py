"""Lines of the input that cannot be used, noted instead of refused (--skip-bad-lines)."""

from megazero.data.line_numbers import LineCounter


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

    def lines(self) -> list[str]:
        """Each as FILE:LINE: REASON."""
        return list(self._lines)

    def take(self) -> list[str]:
        """The same, and forget them."""
        lines, self._lines = self._lines, []
        return lines
