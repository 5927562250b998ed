"""The identity of a run, which every checkpoint carries in its manifest, and their root in the file `run.json`.

A run gets its id at its first start and keeps it through every later one, at any layout and with other data, length or
rates; training that begins anew, from initial weights or by --finetune, is another run.  Checkpoints of megazero
versions without ids, and imported weights, belong to *a run without an id*.

Nothing here needs torch, so that a start reads which checkpoints it would replace before it loads torch.
"""

import hashlib
import json
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megazero.checkpoint.folders import MANIFEST, StepFolder, list_steps
from megazero.files import open_regular, parse_json, read_bounded, written_aside

RUN_FILE = "run.json"
MAX_MANIFEST_BYTES = 512 << 20
MAX_TENSORS = 500_000  # in a manifest; more would take minutes to parse
PROGRESS_KEY = "run"  # in the progress of a manifest
TAG_KEY = "tag"  # likewise: the name that a user of the library has given a checkpoint
ONE_RUN = "only a run's own checkpoints are ever replaced, so a run saves into a folder without those of another"

# A manifest's progress lies at its beginning, before the table of tensors, which can take megabytes.
_HEAD_BYTES = 1 << 16
_PROGRESS = re.compile(r'"progress":\s*(?=\{)')
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class RunIdentity:
    """A run: its id, and the time (UTC) and the host of its first start, by which a person recognises it."""

    id: str
    started: str
    host: str

    def __str__(self) -> str:
        return f"run {self.id} (started {self.started} on {self.host})"

    def to_json(self) -> dict[str, str]:
        """Return the identity as checkpoints and run.json hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: object) -> "RunIdentity | None":
        """Return the identity in `saved`; None if it holds none."""
        if not isinstance(saved, Mapping):
            return None
        values = [saved.get(name) for name in ("id", "started", "host")]
        texts = [value for value in values if isinstance(value, str) and value.isprintable() and len(value) < 256]
        return cls(*texts) if len(texts) == 3 and _ID.fullmatch(texts[0]) else None


def new_run() -> RunIdentity:
    """Return the identity of a run that starts now, on this host."""
    return RunIdentity(secrets.token_hex(8), f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC", socket.gethostname())


def name_of(run: RunIdentity | None) -> str:
    """Return the words for a run in messages."""
    return "a run without an id" if run is None else str(run)


def run_of(folder: Path) -> RunIdentity | None:
    """Return the run that saved the checkpoint in a step folder; None if its manifest names none or is damaged."""
    return RunIdentity.from_json(_progress(folder).get(PROGRESS_KEY))


def tag_of(folder: Path) -> str | None:
    """Return the tag of the checkpoint in a step folder; None if it has none."""
    tag = _progress(folder).get(TAG_KEY)
    return tag if isinstance(tag, str) else None


def newest_by_run(root: Path, own: RunIdentity | None) -> dict[str, tuple[RunIdentity | None, StepFolder]]:
    """Return each run with checkpoints under `root`, and its newest one, by the run's id, "" for a run without one.

    own: the run for which the others are searched; a damaged manifest may name any other run, and does not count.
    """
    newest: dict[str, tuple[RunIdentity | None, StepFolder]] = {}
    for folder in list_steps(root):
        run = run_of(folder.path)
        if run is None or run == own or is_intact(folder.path):
            newest["" if run is None else run.id] = run, folder
    return newest


def _progress(folder: Path) -> Mapping[str, Any]:
    """Return the progress of the checkpoint in a step folder, which a user's own state may make long."""
    for limit in (_HEAD_BYTES, MAX_MANIFEST_BYTES):
        text = _read_head(folder / MANIFEST, limit)
        found = _PROGRESS.search(text)
        if found is None:
            return {}
        try:
            progress, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue
        return dict(progress)
    return {}


def is_intact(folder: Path) -> bool:
    """Return True if a step folder's manifest matches its hash; one bit can make `run_of` name another run."""
    try:
        content = read_bounded(folder / MANIFEST, MAX_MANIFEST_BYTES)
        if content.count(b'"dtype"') > MAX_TENSORS:
            return False
        body = parse_json(content)
        return bool(body.pop("sha256", None) == body_hash(body))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return False


def body_hash(body: dict[str, Any]) -> str:
    """Return the hash of a manifest's JSON without its entry `sha256`."""
    text = json.dumps(body, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_run(root: Path) -> RunIdentity | None:
    """Return the run in the root's run.json; None if there is no such file, or a damaged one."""
    try:
        return RunIdentity.from_json(json.loads(_read_head(root / RUN_FILE)))
    except (ValueError, RecursionError):
        return None


def write_run(root: Path, run: RunIdentity) -> None:
    """Write the root's run.json; raise DataError if it cannot be written."""
    with written_aside(root / RUN_FILE) as stream:
        stream.write(json.dumps(run.to_json(), indent=2).encode() + b"\n")


def _read_head(path: Path, limit: int = _HEAD_BYTES) -> str:
    """Return the beginning of a regular file; nothing of anything else, a pipe for example, or of a missing file."""
    try:
        with open_regular(path) as stream:
            return stream.read(limit).decode("utf-8", errors="replace")
    except OSError:
        return ""
