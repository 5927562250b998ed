"""Collects lines of the input that cannot be used, instead of raising them as errors (--skip-bad-lines)."""

from collections.abc import Callable

from megazero.files import cannot_read
from megazero.prepare.text.inputs import InputFile

READ_BYTES = 1 << 20


class LineCounter:
    """A counter of line ends in the beginnings of files.

    It continues after the last position: positions in ascending order cost one pass over a file, however many.
    """

    def __init__(self) -> None:
        self._path, self._position, self._count = "", 0, 0

    def before(self, file: InputFile, stop: int) -> int:
        """Return the number of line ends in the first `stop` bytes; raise DataError if the file cannot be read."""
        if file.path != self._path or stop < self._position:
            self._path, self._position, self._count = file.path, 0, 0
        try:
            with open(file.path, "rb") as stream:
                stream.seek(self._position)
                # Read in pieces, because the bytes may be more than memory holds.
                for start in range(self._position, stop, READ_BYTES):
                    self._count += stream.read(min(READ_BYTES, stop - start)).count(b"\n")
        except OSError as error:
            raise cannot_read(file.path, error) from error
        self._position = stop
        return self._count


def line_numbers(data: bytes, first: Callable[[], int]) -> Callable[[int], int]:
    """Return a function from offsets in `data`, in ascending order, to numbers of lines.

    first: a function that returns the number of the first line; it is called once at most.
    """
    offset, line = 0, 0

    def number(position: int) -> int:
        nonlocal offset, line
        line = (line or first()) + data.count(b"\n", offset, position)
        offset = position
        return line

    return number


class BadLines:
    """A list of the lines, rows or documents that were skipped, with reasons; in the order of the input.

    counter: the counter of line ends that gives them their numbers.
    """

    def __init__(self) -> None:
        self.counter = LineCounter()
        self._lines: list[str] = []

    @property
    def count(self) -> int:
        """The number of skipped lines."""
        return len(self._lines)

    def add(self, where: str, reason: str) -> None:
        """Record a skipped line.  where: file and line."""
        self._lines.append(f"{where}: {reason}")

    def lines(self) -> list[str]:
        """Return every skipped line as FILE:LINE: REASON."""
        return list(self._lines)

    def pop_lines(self) -> list[str]:
        """Return the same as `lines`, and clear the list."""
        lines, self._lines = self._lines, []
        return lines
