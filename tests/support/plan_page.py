"""A plan and its page, made once in a process, and a reader of such pages."""

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from html.parser import HTMLParser
from typing import NamedTuple

from megazero.parallel.nodes import Nodes
from megazero.planner.dry.rank import DryJob
from megazero.planner.job_plan import Plan, make_plan
from megazero.planner.machines import MACHINES
from megazero.planner.page.page import PageStory, plan_page
from megazero.planner.page.what_if import Point, points
from megazero.planner.predict import forecast_of
from megazero.planner.words import read_run

WORDS = shlex.split(
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 --micro-batch-size 1"
    " --global-batch-size 64 --train-iters 10 --lr 1e-4 --zero-stage 1 --eval-iters 0"
    " --offload-optimizer cpu --precision bf16 --recompute-granularity full"
)


VOID = ("meta", "br", "input")


class Reader(HTMLParser):
    """A reader of elements, tables by caption, and what is open at the end."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, Mapping[str, str | None]]] = []
        self.tables: dict[str, dict[tuple[str, ...], list[float]]] = defaultdict(dict)
        self.texts: list[str] = []
        self._caption = ""
        self._row: list[str] = []
        self._figures: list[float] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag in VOID else [tag]
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self._caption = ""
        if tag == "tr":
            self._row, self._figures = [], []
        if tag == "data":
            self._figures.append(float(dict(attrs)["value"] or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"
        if tag == "tr" and self._figures:
            self.tables[self._caption][tuple(self._row)] = self._figures

    def handle_data(self, data: str) -> None:
        if "caption" in self.open:
            self._caption += data
        elif self.open and self.open[-1] in ("td", "th"):
            self._row.append(data)
        self.texts.append(data)


class Drawn(NamedTuple):
    """A plan, the runs of its controls, and its page."""

    plan: Plan
    points: Sequence[Point]
    page: str


@cache
def drawn_plan() -> Drawn:
    """Return the plan of 16 data-parallel ranks on two nodes, with its stages to try."""
    wanted = read_run(WORDS, Nodes((8, 8)))
    plan = make_plan(DryJob(wanted.config, wanted.vocab_size, wanted.nodes, is_gpu=True), MACHINES["dgx-a100"])
    tried = points(plan, ("micro-batch", "stage"))
    return Drawn(plan, tried, plan_page(PageStory(plan, forecast_of(plan, draws=True), tried, (), "megazero plan <x>")))
