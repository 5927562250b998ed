"""Reads and writes drawings of schedules: `F3` is the forward of micro-batch 3, `F3.1` that through local chunk 1."""

import re

from megazero.pipeline.schedule import Action, Kind, Shape, schedule


def parse(drawing: str) -> tuple[Action, ...]:
    """Return the actions of one stage's drawing, without the dots (idle time) between them."""
    matches = (re.fullmatch(r"([A-Za-z]+)(\d*)(?:\.(\d+))?", word) for word in drawing.split() if word != ".")
    return tuple(Action(Kind(m[1]), int(m[2] or -1), int(m[3] or 0)) for m in matches if m)


def parse_stages(drawing: str) -> list[tuple[Action, ...]]:
    """Return the actions of every stage of a drawing that has one line a stage, each after its `stage 0`."""
    return [parse(line.split(maxsplit=2)[2]) for line in drawing.strip().splitlines()]


def draw(actions: tuple[Action, ...]) -> str:
    """Return the drawing of one stage's actions, separated by spaces."""
    return " ".join(map(str, actions))


def computations(name: str, shape: Shape) -> list[tuple[Action, ...]]:
    """Return the computations of every stage under a schedule."""
    return [schedule(name, shape, stage) for stage in range(shape.num_stages)]


def shapes_of(name: str, stages: range, chunks: range, micro_batches: range) -> list[Shape]:
    """Return the shapes that a schedule supports, of all combinations of the ranges."""
    interleaved = name == "interleaved"
    return [
        Shape(p, m, v)
        for p in stages
        for v in chunks
        for m in micro_batches
        if (v > 1) == interleaved and (p > 1 or v == 1) and (m % p == 0 or not interleaved)
    ]
