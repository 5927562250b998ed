"""The work and the waits of pipeline stages in a predicted step, as lanes to draw and shares to list.  Pure."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from megazero.planner.seconds import StepTime
from megazero.planner.timeline import LaneSpan, StageTime

DEVICE = "device"
_MOST_STAGES = 4


class Lane(NamedTuple):
    """The spans of the device, or of messages or copies of one kind, in the order of their starts."""

    name: str
    spans: Sequence[LaneSpan]


class LaneWait(NamedTuple):
    """A time in which the device waits for a message of this kind.

    Waits for a host that is late are parts of the device's spans.
    """

    kind: str
    start: float
    end: float


class LanesOfStage(NamedTuple):
    """A stage's lanes, the device's first, and its waits."""

    number: int
    lanes: Sequence[Lane]
    waits: Sequence[LaneWait]


def drawn_stages(count: int) -> list[int]:
    """Return the stages to draw of so many: all, or the first two, a middle one and the last."""
    return list(range(count)) if count <= _MOST_STAGES else [0, 1, count // 2, count - 1]


def lanes_of(step: StepTime) -> Iterator[LanesOfStage]:
    """Yield the lanes of the stages to draw, of a step that was simulated with `draws`."""
    for number in drawn_stages(len(step.stages)):
        spans = step.stages[number].spans
        kinds = dict.fromkeys(span.lane for span in spans if span.lane != DEVICE)
        names = (DEVICE, *kinds)
        lanes = [Lane(name, sorted((s for s in spans if s.lane == name), key=_start)) for name in names]
        yield LanesOfStage(number, lanes, list(_waits(lanes)))


def _start(span: LaneSpan) -> float:
    return span.start


def _waits(lanes: Sequence[Lane]) -> Iterator[LaneWait]:
    """Yield the gaps between the device's spans, each with the kind of the message that ends last in it."""
    messages = sorted((span for lane in lanes[1:] for span in lane.spans), key=lambda span: span.end)
    place = 0
    for before, after in pairwise([LaneSpan(DEVICE, "", 0.0, 0.0), *lanes[0].spans]):
        if after.start <= before.end:
            continue
        kind = ""
        while place < len(messages) and messages[place].end <= after.start:
            if messages[place].end > before.end:
                kind = messages[place].lane
            place += 1
        if kind:
            yield LaneWait(kind, before.end, after.start)


def shares_of(stage: StageTime, seconds: float) -> dict[str, float]:
    """Return the shares of a step of so many seconds that a stage works and waits, and idles when it is done.

    They add up to 1, but for what the host computes beside the device, the last of them.
    """
    own = ("products", "memory")
    found = {kind: stage.busy[kind] for kind in own if stage.busy[kind] > 0}
    found |= {f"waits: {kind}": spent for kind, spent in stage.waits.items() if spent > 0}
    found["done before others"] = max(seconds - stage.end, 0.0)
    found |= {f"{kind}, beside it": spent for kind, spent in stage.busy.items() if kind not in own and spent > 0}
    return {kind: spent / seconds for kind, spent in found.items()}
