"""The journal of a run: `journal.jsonl` beside its checkpoints, one JSON object a line, only ever appended to.

    {"time": "2026-11-22T03:01:30+00:00", "event": "start", "run": "7d1f...", "host": "node7", "world_size": 8, ...}
    {"time": ..., "event": "change", "setting": "lr", "from": 0.001, "to": 0.0005}
    {"time": ..., "event": "fallback", "report": ["WARNING: runs/a/step_0000500 is damaged: ...", ...]}
    {"time": ..., "event": "save", "iteration": 500, "checkpoint": "step_0000500", "seconds": 1.2}
    {"time": ..., "event": "pass over", "first": 401, "last": 450, "samples": 25600}
    {"time": ..., "event": "fault", "report": ["fault: rank 3 (host node8, process 4711): dead: ...", ...]}
    {"time": ..., "event": "stop", "iteration": 512, "reason": "asked to stop after iteration 512 (SIGUSR1)"}

A start without a stop was killed.  A change is a setting that differs from the checkpoint which a start resumes from.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

JOURNAL = "journal.jsonl"
_MAX_LINE_BYTES = 1 << 20


class Journal:
    """A writer of the journal under `root`: on rank 0, and on the rank that reports a fault; root None: no writer.

    A journal that cannot be written never ends a run: `report` gets one line the first time, and training goes on.
    """

    def __init__(self, root: Path | None, report: Callable[[str], None]) -> None:
        self._path = None if root is None else root / JOURNAL
        self._report = report
        self._has_failed = False

    def write(self, event: str, **facts: object) -> None:
        """Append a line with the time, the event and its facts, and bring it to the disk; numbers may be infinite."""
        if self._path is None:
            return
        entry = {"time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S+00:00}", "event": event, **facts}
        try:
            self._append(self._path, _line(entry))
        except OSError as error:
            if not self._has_failed:
                self._report(f"{self._path} cannot be written: {error.strerror or error}; training goes on without it")
            self._has_failed = True

    @staticmethod
    def _append(path: Path, line: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            # A process that was killed, or a full disk, may have left half a line.
            is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, b"\n" * is_torn + line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _line(entry: Mapping[str, object]) -> bytes:
    """Return the entry as a line of JSON, which has neither infinities nor NaN: they become text."""
    plain = json.loads(json.dumps(entry, default=str), parse_constant=str)
    return json.dumps(plain, allow_nan=False, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"


def read_journal(root: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of the journal under `root`, oldest first; a line that is no entry is left out."""
    path = root / JOURNAL
    if not path.is_file():
        return
    with path.open("rb") as stream:
        for line in iter(lambda: stream.readline(_MAX_LINE_BYTES), b""):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("event"), str):
                yield entry


def describe(entry: Mapping[str, Any]) -> str:
    """Return an entry as a line to read: time, event, and the facts as `name value`; empty texts are left out."""
    known = {name: value for name, value in entry.items() if name not in ("time", "event") and value != ""}
    facts = [f"{name} {_short(value)}" for name, value in known.items()]
    time = str(entry.get("time", "-"))[:19].replace("T", " ")
    return _printable(f"{time}  {str(entry['event'])[:20]:<7} {' | '.join(islice(facts, 20))}")


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
