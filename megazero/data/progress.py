"""How far a long piece of work on text is: a bar on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn

from megazero.console import Console
from megazero.units import format_bytes, format_count, format_duration


class TextProgress:
    """Counts documents, tokens and bytes of input, and shows their rates; as a context manager.

    total_bytes: of all input, 0 where nobody knows.  interval: documents between two lines where there is no terminal.
    """

    def __init__(self, console: Console, total_bytes: int, interval: int, *, done_bytes: int = 0) -> None:
        self._console = console
        self._total = total_bytes
        self._interval = interval
        self._started = time.monotonic()
        self._skipped = self._bytes = done_bytes
        self._documents = self._tokens = 0
        self._bar: Progress | None = None
        if console.on_terminal:
            columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}"))
            self._bar = console.progress(*columns)
            self._task = self._bar.add_task("", total=total_bytes or None, completed=done_bytes)

    def advance(self, documents: int, tokens: int, input_bytes: int) -> None:
        """Count some more."""
        before = self._documents
        self._documents += documents
        self._tokens += tokens
        self._bytes += input_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=self._bytes, description=self._text())
        elif self._documents // self._interval > before // self._interval:
            self._console.line(self._text())

    def _text(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = (self._bytes - self._skipped) / seconds
        of_all = f" of {format_bytes(self._total)}" if self._total else ""
        left = f" | ETA {format_duration(max(0, self._total - self._bytes) / max(rate, 1e-9))}" if self._total else ""
        return (
            f"{self._documents} documents, {format_count(self._tokens)} tokens, {format_bytes(self._bytes)}{of_all}"
            f" | {format_count(self._documents / seconds)} documents/s | {rate / 1e6:.1f} MB/s{left}"
        )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
