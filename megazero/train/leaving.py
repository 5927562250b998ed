"""The page that a run leaves under --save, made of the files that lie there: `run.html`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megazero.checkpoint.journal import read_journal
from megazero.command_line.parse import from_yaml
from megazero.config.run import RunConfig
from megazero.errors import UserError, first_line
from megazero.files import written_aside
from megazero.parallel.drawing import draw_layout
from megazero.parallel.nodes import Nodes, parse_tasks_per_node
from megazero.parallel.topology import Topology
from megazero.report.history import read_history
from megazero.report.run_page import RunStory, run_page
from megazero.train.check import topology

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
        metrics_file = _metrics_file(saved.config)
        if metrics_file is not None and metrics_file.stat().st_size > _MOST_BYTES:
            return f"no {root / PAGE}, for {metrics_file} is long; megazero summarize --html makes it"
        _write(root / PAGE, root, metrics_file, saved)
        curves = ", without curves, which --metrics-file FILE is for" if metrics_file is None else ""
        return f"the run as a page: {root / PAGE}{curves}"
    except Exception as error:  # the end of a run, or the error that has ended it, is worth more than its page
        return f"no {root / PAGE}: {first_line(error)}"


def write_page(path: Path, root: Path | None, metrics_file: Path | None) -> None:
    """Write the page of the run under `root` as `path`, with the figures of `metrics_file`, where there is one.

    Raises DataError if the page cannot be written, or the metrics file not be read.
    """
    _write(path, root, metrics_file, _Saved("", None) if root is None else _configuration(root))


def _write(path: Path, root: Path | None, metrics_file: Path | None, saved: _Saved) -> None:
    events = [] if root is None else list(read_journal(root))
    places = _places(saved.config, events)
    story = RunStory(
        name=str(root or metrics_file),
        history=None if metrics_file is None else read_history(metrics_file),
        events=events,
        layout=[] if places is None else draw_layout(*places),
        configuration=saved.text,
        places=places,
    )
    with written_aside(path) as stream:
        stream.write(run_page(story).encode("utf-8", errors="replace"))


def metrics_file_of(root: Path) -> Path | None:
    """Return the metrics file that the configuration of the run under `root` names, if it is there."""
    return _metrics_file(_configuration(root).config)


def _metrics_file(config: RunConfig | None) -> Path | None:
    given = None if config is None else config.logging.metrics_file
    return given if given is not None and given.is_file() else None


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
        return (layout, nodes) if layout.world_size == world_size == sum(nodes.ranks_per_node) else None
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # the journal of another version
        return None
