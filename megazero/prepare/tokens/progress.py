"""Displays the progress of long work on text: a bar on a terminal, elsewhere a line at intervals."""

import time
from types import TracebackType
from typing import NamedTuple, Self

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from megazero.console import Console
from megazero.units import format_bytes, format_count, format_duration


class WorkCount(NamedTuple):
    """An amount of work; input_bytes: bytes of the files on the disk."""

    documents: int = 0
    tokens: int = 0
    input_bytes: int = 0


NOTHING = WorkCount()
BAR_WIDTH = 16


class TextProgress:
    """A context manager that counts documents, tokens and bytes of input, and shows them with their rates.

    total_bytes: bytes of all input, 0 if unknown.  interval: documents between two lines if there is no terminal.
    earlier: the work of an earlier process, which counts, but not for the rates.
    """

    def __init__(self, console: Console, total_bytes: int, interval: int, earlier: WorkCount = NOTHING) -> None:
        self._console = console
        self._total = total_bytes
        self._interval = interval
        self._started = time.monotonic()
        self._earlier = self._done = earlier
        self._bar: Progress | None = None
        if console.on_terminal:
            # In a narrow terminal only the text is cut off.
            share = TextColumn("{task.percentage:>3.0f}%", table_column=Column(min_width=4))
            bar = BarColumn(BAR_WIDTH, table_column=Column(min_width=BAR_WIDTH))
            self._bar = console.progress(share, bar, TextColumn("{task.description}"))
            self._task = self._bar.add_task("", total=total_bytes or None, completed=earlier.input_bytes)

    def advance(self, more: WorkCount) -> None:
        """Add to the counts."""
        before = self._done.documents
        self._done = WorkCount(*map(sum, zip(self._done, more, strict=True)))
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done.input_bytes, description=self._brief())
        elif self._done.documents // self._interval > before // self._interval:
            self._console.line(self._text())

    def _brief(self) -> str:
        """Return the text beside a bar."""
        documents, tokens, _ = map(format_count, self._done)
        return f"{documents} documents, {tokens} tokens{self._speed()}"

    def _text(self) -> str:
        done = self._done
        of_all = f" of {format_bytes(self._total)}" if self._total else ""
        documents = format_count((done.documents - self._earlier.documents) / self._seconds())
        return (
            f"{done.documents} documents, {format_count(done.tokens)} tokens, {format_bytes(done.input_bytes)}{of_all}"
            f" | {documents} documents/s{self._speed()}"
        )

    def _speed(self) -> str:
        rate = (self._done.input_bytes - self._earlier.input_bytes) / self._seconds()
        left = max(0, self._total - self._done.input_bytes) / max(rate, 1e-9)
        return f" | {rate / 1e6:.1f} MB/s" + (f" | ETA {format_duration(left)}" if self._total else "")

    def _seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
