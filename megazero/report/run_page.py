"""A run as one HTML page: its outcome, curves, throughput, memory, layout, events and configuration.

The page needs nothing but itself: pictures are inline SVG, and there are no scripts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology
from megazero.report.history import History
from megazero.report.pictures.chart import PlottedCurve, bars, curves
from megazero.report.pictures.layout_picture import MOST_RANKS, layout_parts
from megazero.report.pictures.ledger_picture import CATEGORY_COLOURS
from megazero.report.summary import RunSummary
from megazero.svg import CLASSES, COLOURS, part_of_page
from megazero.units import format_bytes, format_count, format_duration

LOSS_TITLE = "Loss, nats per token"
_MOST_RANKS = 24  # bars
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1100px;
       margin: 24px auto; padding: 0 16px; }
h1 { font-size: 21px; margin: 0; }
h2 { font-size: 16px; margin: 30px 0 8px; border-bottom: 1px solid var(--line); }
p { margin: 4px 0; color: var(--soft); }
svg { width: 100%; height: auto; display: block; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0; }
.tile { background: var(--band); border-radius: 6px; padding: 8px 16px; }
.tile b { display: block; font-size: 18px; font-weight: 600; }
.tile span { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 12px 20px; }
pre { background: var(--band); border-radius: 6px; padding: 10px 14px; overflow-x: auto; font-size: 12.5px; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: 2px 22px 2px 0; }
th { font-weight: 600; border-bottom: 1px solid var(--line); }
td:first-child { white-space: nowrap; }
summary { cursor: pointer; color: var(--soft); }
"""


@dataclass(frozen=True)
class RunStory:
    """The parts of a run that the page shows; what is missing is left out.

    history: None where no figures are known.  events: the journal's, each with `time` and `event`.  layout: the
    drawing's lines.  places: the topology and the nodes, for a picture.  configuration: the YAML file.
    """

    name: str
    history: History | None
    events: Sequence[Mapping[str, Any]]
    layout: Sequence[str]
    configuration: str
    places: tuple[Topology, Nodes] | None = None


def run_page(story: RunStory) -> str:
    """Return the HTML page."""
    history, title = story.history, escape(story.name)
    sections = [("Curves", _curves(history))] if history else []
    sections += [("Memory and traffic of a step", _memory(history.ranks))] if history and history.ranks else []
    sections += [("Layout", _layout(story))]
    sections += [("Events", _events(story.events)), ("Configuration", _configuration(story.configuration))]
    body = "\n".join(f"<h2>{heading}</h2>\n{content}" for heading, content in sections if content)
    missing = "<p>No curves: the run has no curves.jsonl, and no file of --metrics-file was read.</p>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<style>{COLOURS}{CLASSES}{_STYLE}</style></head>\n<body><h1>{title}</h1>\n<p>{_lead(story.events)}</p>\n"
        f"{_tiles(history.summary) if history else missing}\n{body}\n</body></html>\n"
    )


def _lead(events: Sequence[Mapping[str, Any]]) -> str:
    """Return where and when the run was started first, and how it ended."""
    starts = [event for event in events if event["event"] == "start"]
    if not starts:
        return ""
    times = f", {len(starts)} times" if len(starts) > 1 else ""
    begun = f"Run {starts[0].get('run', '-')}, started {_time(starts[0])} on {starts[0].get('host', '-')}{times}"
    last = events[-1]
    ended = f"{_time(last)}: {last.get('reason', '-')}" if last["event"] == "stop" else "no end is written down"
    return escape(f"{begun}. Last: {ended}.")


def _tiles(summary: RunSummary) -> str:
    tiles = [
        (format_count(summary.num_steps), "steps" + f", {summary.num_skipped} skipped" * (summary.num_skipped > 0)),
        (format_duration(summary.train_seconds), "in steps"),
        (format_count(summary.tokens_per_second), "tokens/s"),
    ]
    for title, name in (("validation loss", "loss"), ("perplexity", "perplexity"), ("bits per byte", "bits_per_byte")):
        ends = [record and record.get(name) for record in (summary.before, summary.after)]
        figures = [f"{value:.4g}" for value in ends if isinstance(value, float)]
        if figures:
            tiles.append((" → ".join(figures if figures[0] != figures[-1] else figures[-1:]), title))
    return "".join(f'<div class="tile"><b>{figure}</b><span>{title}</span></div>' for figure, title in tiles).join(
        ('<div class="tiles">', "</div>")
    )


def loss_lines(history: History) -> list[PlottedCurve]:
    """Return the loss of training, and that of every split that was evaluated."""
    evaluated = (
        PlottedCurve(split, np.array([at for at, _ in found], np.float64), np.array([loss for _, loss in found]), True)
        for split, found in history.evaluations.items()
    )
    return [_of(history, "loss", "training"), *evaluated]


def _curves(history: History) -> str:
    seconds = [_of(history, "step_seconds", "step"), _of(history, "data_wait_seconds", "wait for data")]
    charts = (
        curves(LOSS_TITLE, loss_lines(history)),
        curves("Gradient norm, before clipping", [_of(history, "grad_norm")]),
        curves("Learning rate", [_of(history, "lr")]),
        curves("Tokens per second, of the whole run", [_of(history, "tokens_per_second")], shown=format_count),
        curves("Seconds per step", seconds),
        curves("Memory of the process that has used most, MiB", _peaks(history)),
    )
    means = f"<p>A point is the mean of up to {history.most_steps} steps; --metrics-file FILE keeps every step.</p>"
    lead = means if history.most_steps > 1 else ""
    return f'{lead}<div class="charts">{"".join(f"<div>{chart}</div>" for chart in charts if chart)}</div>'


def _of(history: History, name: str, title: str = "") -> PlottedCurve:
    return PlottedCurve(title or name, history.iterations.astype(np.float64), history.figures[name])


def _peaks(history: History) -> list[PlottedCurve]:
    """Return the memory in MiB, with a mark at every point where checkpoints alone have it; none if none is counted."""
    iterations, peaks = np.array(history.peaks, np.float64).reshape(-1, 2).T
    dotted = len(peaks) < len(history.iterations)
    return [PlottedCurve("peak", iterations, peaks / 2**20, dotted)] if peaks.any() else []


def _memory(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Draw every rank's memory: by the ledger at its peak, or without a ledger the model states."""
    has_ledger = all(rank.get("ledger") for rank in ranks)
    named = [
        (f"rank {rank['rank']}", rank["ledger"]["at_peak"] if has_ledger else rank["model_state_bytes"])
        for rank in ranks[:_MOST_RANKS]
    ]
    which = "All that is alive at the step's peak, by the ledger" if has_ledger else "Model states"
    peak = max(int(rank["peak_memory_bytes"]) for rank in ranks)
    first = f" The first {_MOST_RANKS} of {len(ranks)} ranks." if len(ranks) > _MOST_RANKS else ""
    most = f" Most that a process has used: {format_bytes(peak)}." if peak else ""  # 0: the system does not count it
    lead = f"{which}.{first}{most}"
    return f"<p>{lead}</p>{bars(named, CATEGORY_COLOURS, shown=format_bytes)}{_traffic(ranks)}"


def _traffic(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the most bytes that any rank sent by each collective of each axis, and to other nodes."""
    most = _most_sent(rank["comm_bytes"] for rank in ranks)
    across = _most_sent(rank.get("bytes_across_nodes", {}) for rank in ranks)
    head = ["axis", "collective", "sent by a rank in a step, at most", *(["to other nodes, at most"] if across else [])]
    rows = [
        (key[0], key[1].replace("_", " "), *(format_bytes(table.get(key, 0)) for table in (most, across) if table))
        for key, sent in most.items()
        if sent
    ]
    return _table(head, rows) if rows else ""


def _most_sent(tables: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[tuple[str, str], int]:
    """Return {(axis, collective): the most bytes that any rank sent}."""
    most: dict[tuple[str, str], int] = {}
    for table in tables:
        for axis, sent in table.items():
            for collective, nbytes in sent.items():
                most[axis, collective] = max(most.get((axis, collective), 0), nbytes)
    return most


def _layout(story: RunStory) -> str:
    """Draw the layout, as a picture where its ranks have room, and as text."""
    lines = f"<pre>{escape(chr(10).join(story.layout))}</pre>" if story.layout else ""
    if story.places is None or story.places[0].world_size > MOST_RANKS:
        return lines
    width, height, parts = layout_parts(*story.places)
    drawn = part_of_page(width, height, parts, label="the layout")
    return f'<div style="max-width: {width:g}px">{drawn}</div>{lines}'


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    rows = [(_time(event), str(event["event"]), " | ".join(_facts(event))) for event in events]
    return _table(("time (UTC)", "event", ""), rows) if rows else ""


def _facts(event: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts of an event as text, without those that are not known; a setting may have become none."""
    for name, value in event.items():
        is_known = (value not in ("", None) and value is not False) or event["event"] == "change"
        if name not in ("time", "event") and is_known:
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield f"{name.replace('_', ' ')} {text if len(text) <= 300 else text[:297] + '...'}"


def _time(event: Mapping[str, Any]) -> str:
    return str(event.get("time", "-"))[:19].replace("T", " ")


def _configuration(text: str) -> str:
    return f"<details><summary>config.yaml</summary><pre>{escape(text)}</pre></details>" if text else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table><tr>{''.join(f'<th>{title}</th>' for title in head)}</tr>\n{chr(10).join(cells)}</table>"
