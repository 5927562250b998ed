"""The page that a run leaves under --save, made of the files that lie there: `run.html`.

Its figures are those of `curves.jsonl` there, or of the run's --metrics-file, which has every step.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megazero.checkpoint.journal import read_journal
from megazero.checkpoint.runs import read_run
from megazero.command_line.parse import from_yaml
from megazero.config.run import RunConfig
from megazero.errors import DataError, UserError, first_line
from megazero.files import written_aside
from megazero.parallel.drawing import draw_layout
from megazero.parallel.nodes import Nodes, parse_tasks_per_node
from megazero.parallel.topology import Topology
from megazero.report.curves_file import CURVES
from megazero.report.history import read_history
from megazero.report.metrics_file import iteration_of
from megazero.report.run_page import RunStory, run_page
from megazero.report.summary import read_records
from megazero.train.start.check import topology

PAGE = "run.html"
# A longer metrics file takes more than some seconds to read, which the end of a run does not wait for.
_MOST_BYTES = 64 << 20


class _Saved(NamedTuple):
    """The configuration that a run has saved, as text and read; None if another version wrote it."""

    text: str
    config: RunConfig | None


def leave_page(root: Path) -> str:
    """Write the page of the run under `root`; return a line on it, or on why there is none, and raise no error."""
    try:
        saved = _configuration(root)
        _write(root / PAGE, root, _figures(root, saved.config, most_bytes=_MOST_BYTES), saved)
        return f"the run as a page: {root / PAGE}"
    except Exception as error:  # the end of a run, or the error that has ended it, is worth more than its page
        return f"no {root / PAGE}: {first_line(error)}"


def write_page(path: Path, root: Path | None, figures: Path | None) -> None:
    """Write the page of the run under `root` as `path`, with the curves of the file `figures`, where there is one.

    Raises DataError if the page cannot be written, or the file not be read, or if that is of another run.
    """
    _write(path, root, figures, _Saved("", None) if root is None else _configuration(root))


def _write(path: Path, root: Path | None, figures: Path | None, saved: _Saved) -> None:
    events = [] if root is None else list(read_journal(root))
    places = _places(saved.config, events)
    story = RunStory(
        name=str(root or figures),
        history=None if figures is None else read_history(figures, run_id(root)),
        events=events,
        layout=[] if places is None else draw_layout(*places),
        configuration=saved.text,
        places=places,
    )
    with written_aside(path) as stream:
        stream.write(run_page(story).encode("utf-8", errors="replace"))


def run_id(root: Path | None) -> str:
    """Return the id of the run whose checkpoints lie under `root`; "" if it is not known."""
    run = None if root is None else read_run(root)
    return "" if run is None else run.id


def figures_of(root: Path) -> Path | None:
    """Return the file with most of the figures of the run under `root`; None if it has none."""
    return _figures(root, _configuration(root).config)


def _figures(root: Path, config: RunConfig | None, *, most_bytes: int | None = None) -> Path | None:
    """Return the metrics file; or the curves if it is another run's, begins later than they do, or is too long."""
    files = [root / CURVES] if config is None else [config.logging.metrics_file, root / CURVES]
    begins = {file: _beginning(file, run_id(root)) for file in files if file is not None and file.is_file()}
    known = {file: first for file, first in begins.items() if first is not None}
    short = [file for file in known if most_bytes is None or file.stat().st_size <= most_bytes]
    return min(short, key=known.__getitem__, default=None)  # of equals the first


def _beginning(path: Path, run: str) -> int | None:
    """Return the first iteration of a file of figures; None if it has none, or another run's."""
    try:
        record = next(read_records(path, run), None)
        return None if record is None else iteration_of(record)
    except DataError:
        return None


def _configuration(root: Path) -> _Saved:
    file = root / "config.yaml"
    if not file.is_file():
        return _Saved("", None)
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        return _Saved(text, from_yaml(text, origin=str(file)))
    except UserError:
        return _Saved(text, None)


def _places(config: RunConfig | None, events: Sequence[Mapping[str, Any]]) -> tuple[Topology, Nodes] | None:
    """Return the layout and the nodes of the last start; None where they are not known."""
    start = next((event for event in reversed(events) if event["event"] == "start"), None)
    if config is None or start is None:
        return None
    try:
        world_size = int(start["world_size"])
        nodes = Nodes(parse_tasks_per_node(start["ranks_per_node"]))
        layout = topology(config, world_size)
        return (layout, nodes) if layout.world_size == world_size == nodes.world_size else None
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # the journal of another version
        return None
