"""Schedules written as drawings: `F3` is the forward of micro-batch 3, `F3.1` the same through local chunk 1."""

import re

from megazero.pipeline.schedule import Action, Kind, Shape, schedule


def parse(drawing: str) -> tuple[Action, ...]:
    """The actions of one stage; dots between them (idle time) are left out."""
    matches = (re.fullmatch(r"([A-Za-z]+)(\d*)(?:\.(\d+))?", word) for word in drawing.split() if word != ".")
    return tuple(Action(Kind(m[1]), int(m[2] or -1), int(m[3] or 0)) for m in matches if m)


def parse_stages(drawing: str) -> list[tuple[Action, ...]]:
    """The actions of every stage: a line each, after `stage 0`."""
    return [parse(line.split(maxsplit=2)[2]) for line in drawing.strip().splitlines()]


def draw(actions: tuple[Action, ...]) -> str:
    """The words, with a space between."""
    return " ".join(map(str, actions))


def computations(name: str, shape: Shape) -> list[tuple[Action, ...]]:
    """What every stage computes under a schedule."""
    return [schedule(name, shape, stage) for stage in range(shape.num_stages)]


def shapes_of(name: str, stages: range, chunks: range, micro_batches: range) -> list[Shape]:
    """Those of all combinations that a schedule can do."""
    interleaved = name == "interleaved"
    return [
        Shape(p, m, v)
        for p in stages
        for v in chunks
        for m in micro_batches
        if (v > 1) == interleaved and (p > 1 or v == 1) and (m % p == 0 or not interleaved)
    ]
