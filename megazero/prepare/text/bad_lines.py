"""Lines of the input that cannot be used, noted instead of refused (--skip-bad-lines)."""

from collections.abc import Callable

from megazero.files import cannot_read
from megazero.prepare.text.inputs import InputFile

READ_BYTES = 1 << 20


class LineCounter:
    """Counts line ends in the beginnings of files.

    It goes on from where it was asked last: places in order cost one pass over a file, however many they are.
    """

    def __init__(self) -> None:
        self._path, self._place, self._count = "", 0, 0

    def before(self, file: InputFile, stop: int) -> int:
        """Line ends in the first `stop` bytes; raises DataError when the file cannot be read."""
        if file.path != self._path or stop < self._place:
            self._path, self._place, self._count = file.path, 0, 0
        try:
            with open(file.path, "rb") as stream:
                stream.seek(self._place)
                # In pieces, because they may be more than memory holds.
                for start in range(self._place, stop, READ_BYTES):
                    self._count += stream.read(min(READ_BYTES, stop - start)).count(b"\n")
        except OSError as error:
            raise cannot_read(file.path, error) from error
        self._place = stop
        return self._count


def line_numbers(data: bytes, first: Callable[[], int]) -> Callable[[int], int]:
    """A function from offsets in `data`, asked for in order, to numbers of lines.

    first: tells that of the first line; called once at most.
    """
    offset, line = 0, 0

    def number(place: int) -> int:
        nonlocal offset, line
        line = (line or first()) + data.count(b"\n", offset, place)
        offset = place
        return line

    return number


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
