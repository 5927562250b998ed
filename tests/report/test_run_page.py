"""The page of a run shows what its files hold, and stands alone."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.step_metrics import make_step

from megazero.parallel.drawing import draw_layout
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology
from megazero.report.history import History, read_history
from megazero.report.metrics import Evaluation, RankMetrics
from megazero.report.metrics_file import MetricsFile
from megazero.report.run_page import RunStory, run_page

EVENTS = [
    {
        "time": "2026-11-22T03:01:30+00:00",
        "event": "start",
        "run": "7d1f",
        "host": "node7",
        "job": "",
        "finetune": False,
    },
    {"time": "2026-11-22T03:01:31+00:00", "event": "change", "setting": "exit_interval", "from": 3, "to": None},
    {"time": "2026-11-22T03:05:00+00:00", "event": "fault", "report": ["rank 3: <dead>", "rank 4"]},
    {"time": "2026-11-22T04:01:30+00:00", "event": "stop", "iteration": 0, "reason": "finished 2 iterations"},
]


class Reader(HTMLParser):
    """A reader of text, tags and what they refer to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.references: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open += [] if tag in ("meta", "link", "img", "br") else [tag]
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "data")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.texts += [data.strip()] if data.strip() else []


def history(folder: Path, *, steps: int = 2, ranks: int = 2, **of_rank: Any) -> History:
    file = MetricsFile(folder / "m.jsonl")
    states = {"parameters": 1 << 20, "moments": 2 << 20}
    figures = [RankMetrics((index + 1) << 30, states, {"dp": {"all_gather": 512}}, **of_rank) for index in range(ranks)]
    file.evaluation(Evaluation(0, 0, "validation", loss=7.5, bytes_per_token=3.0))
    for iteration in range(1, steps + 1):
        file.step(make_step(iteration, loss=float("nan") if iteration == 2 else 5.0), figures)
    file.evaluation(Evaluation(steps, 8 * steps, "validation", loss=3.25, bytes_per_token=3.0))
    file.close()
    return read_history(folder / "m.jsonl")


def test_it_shows_what_the_files_hold(tmp_path: Path) -> None:
    story = RunStory("runs/a<b", history(tmp_path), EVENTS, ["rank 0", "rank 1"], "lr: 0.1 # <")
    page = run_page(story)
    reader = Reader(page)
    assert reader.open == [] and reader.references == [] and "script" not in reader.tags
    assert reader.tags.count("svg") == 7
    text = " ".join(reader.texts)
    for expected in (
        "runs/a<b",
        "Run 7d1f, started 2026-11-22 03:01:30 on node7. Last: 2026-11-22 04:01:30: finished 2 iterations.",
        "7.5 → 3.25",
        "rank 0\nrank 1",
        "report rank 3: <dead> rank 4",
        "iteration 0 | reason finished 2 iterations",
        "setting exit_interval | from 3 | to None",
        "lr: 0.1 # <",
        "all gather 512 B",
        "Most that a process has used: 2.0 GiB.",
    ):
        assert expected in text, expected
    assert "job" not in text and "finetune" not in text
    assert "prefers-color-scheme: dark" in page


def test_a_run_without_figures_has_the_rest() -> None:
    reader = Reader(run_page(RunStory("a", None, EVENTS[:1], [], "")))
    text = " ".join(reader.texts)
    assert "svg" not in reader.tags and "no end is written down" in text and "--metrics-file" in text
    assert "Layout" not in text and "Configuration" not in text


def test_many_ranks_and_a_ledger(tmp_path: Path) -> None:
    ledger = {"peak_bytes": 5 << 20, "at_peak": {"parameters": 1 << 20, "activations": 4 << 20}, "traffic": {}}
    text = " ".join(Reader(run_page(RunStory("a", history(tmp_path, ranks=30, ledger=ledger), [], [], ""))).texts)
    assert "The first 24 of 30 ranks." in text and "rank 23" in text and "rank 24" not in text
    assert "5.0 MiB" in text and "activations" in text and "moments" not in text


def test_traffic_to_other_nodes_has_a_column(tmp_path: Path) -> None:
    page = run_page(RunStory("a", history(tmp_path), [], [], ""))
    assert "all gather" in page and "to other nodes" not in page
    across = {"dp": {"all_gather": 300}}
    page = run_page(RunStory("a", history(tmp_path, bytes_across_nodes=across), [], [], ""))
    assert "to other nodes" in page and "512 B" in page and "300 B" in page


@pytest.mark.parametrize("steps", [1, 3, 1000])
def test_curves_are_well_formed_and_bounded(tmp_path: Path, steps: int) -> None:
    """A curve of thousands of points is drawn in some hundred columns; a loss that was not finite leaves no point."""
    page = run_page(RunStory("a", history(tmp_path, steps=steps, ranks=1), [], [], ""))
    pictures = ["<svg" + part.partition("</svg>")[0] + "</svg>" for part in page.split("<svg")[1:]]
    loss = ElementTree.fromstring(pictures[0])
    assert loss.get("aria-label") == "Loss, nats per token"
    lines = [path.get("d", "") for path in loss.iter() if path.get("stroke-width")]
    assert [min(line.count("L") + 1, 400) == line.count("L") + 1 for line in lines] == [True] * len(lines)
    assert lines[0].count("L") + 1 == {1: 1, 3: 2, 1000: 400}[steps]
    assert all("nan" not in picture for picture in pictures)


def test_a_layout_is_drawn_where_it_has_room() -> None:
    """Every rank is a box, in the frame of those that share its layers."""
    places = Topology(tp=2, dp=2, pp=2), Nodes((4, 4))
    page = run_page(RunStory("a", None, [], draw_layout(*places), "", places))
    drawn = ElementTree.fromstring("<svg" + page.partition("<svg")[2].partition("</svg>")[0] + "</svg>")
    hints = [title.text for title in drawn.iter() if title.tag.endswith("title")]
    assert hints[:3] == [
        "rank 0: stage 0, replica 0, part 0, node 0",
        "rank 1: stage 0, replica 0, part 1, node 0",
        "rank 2: stage 0, replica 1, part 0, node 0",
    ]
    assert len(hints) == 8 and "who talks to whom" in page
    many = Topology(dp=128), Nodes((128,))
    assert "<svg" not in run_page(RunStory("a", None, [], draw_layout(*many), "", many))
