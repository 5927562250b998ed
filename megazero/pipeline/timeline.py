"""Simulated timelines of schedules, and the idle share of stages: by simulation, and by formula.  Pure.

Durations are those of one chunk, in any unit; the idle share is 1 - (all stages' busy time) / (p x the step's time).
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from megazero.pipeline.schedule import Action, Kind, Shape

# A backward is two matrix products for each of the forward: one for the input, one for the weight.
EQUAL_PARTS: Mapping[Kind, float] = MappingProxyType(
    {
        Kind.FORWARD: 1,
        Kind.BACKWARD: 2,
        Kind.INPUT_GRADIENT: 1,
        Kind.WEIGHT_GRADIENT: 1,
    }
)
_THIRDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class Span(NamedTuple):
    """A computation with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The computations of every stage with their times; `str` draws them."""

    stages: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """The time of the step: the end of the last computation."""
        return max(span.end for spans in self.stages for span in spans)

    @property
    def idle_share(self) -> float:
        """The share of the stages' time in which they wait, 0 to 1."""
        total = self.makespan * len(self.stages)
        busy = sum(span.end - span.start for spans in self.stages for span in spans)
        return (total - busy) / total

    def __str__(self) -> str:
        """Draw one line a stage, one column a time unit: the computation that runs at its beginning, or a dot."""
        rows = [self._row(spans) for spans in self.stages]
        width = max(len(cell) for row in rows for cell in row)
        label = len(str(len(rows) - 1))
        return "\n".join(
            f"stage {stage:>{label}}   {' '.join(f'{cell:>{width}}' for cell in row)}" for stage, row in enumerate(rows)
        )

    def _row(self, spans: Sequence[Span]) -> list[str]:
        row, time = [], 0
        while time < self.makespan:
            running = [str(span.action) for span in spans if span.start <= time < span.end]
            row.append(running[0] if running else ".")
            time += 1
        return row


def simulate(
    all_stages: Sequence[Sequence[Action]],
    shape: Shape,
    durations: Mapping[Kind, float] = EQUAL_PARTS,
    exchange: float = 0,
) -> Timeline:
    """Schedule every computation as early as its stage and its input allow; exchange: the time between stages.

    Exchanges and windows among the actions take no time of the stage.  Raises ValueError on a deadlock.
    """
    left = [deque(action for action in actions if action.kind.is_computation) for actions in all_stages]
    spans: list[list[Span]] = [[] for _ in left]
    ends: dict[_Step, float] = {}
    while any(left):
        moved = False
        for stage, actions in enumerate(left):
            while actions and ends.keys() >= (inputs := _inputs(actions[0], shape, stage)).keys():
                action = actions.popleft()
                free = spans[stage][-1].end if spans[stage] else 0
                start = max([free, *(ends[step] + exchange * crosses for step, crosses in inputs.items())])
                spans[stage].append(Span(action, start, start + durations[action.kind]))
                ends[_step(action, shape, stage)] = spans[stage][-1].end
                moved = True
        if not moved:
            raise ValueError(f"these wait for ever: {[str(actions[0]) for actions in left if actions]}")
    return Timeline(tuple(map(tuple, spans)))


def predicted_idle_share(name: str, shape: Shape, durations: Mapping[Kind, float] = EQUAL_PARTS) -> float:
    """Return the idle share by formula, where exchanges take no time; `simulate` agrees.

    gpipe, 1f1b   (p - 1) / (m + p - 1): beside m forwards and backwards, a stage waits p - 1 times for both
                  (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1, there relative to the work)
    interleaved   (p - 1) / (v m + p - 1): the same wait, but for chunks of a v-th of the time (section 2.2.2)
    zero-bubble   (p - 1)(F + I - W) / (m (F + I + W) + (p - 1)(F + I - W)) from m = p on: a stage fills the wait for F
                  and I with a W (H1 of Qi et al. 2024, arXiv 2401.10241, table 2), so with equal times it is
                  (p - 1) / (3 m + p - 1).  Below, there are too few W to fill it: the last micro-batch's way through
                  all stages ends with its own W.  Exact where W takes no longer than F and I, else a lower bound.
    """
    p, m, v = shape.num_stages, shape.num_micro_batches, shape.num_chunks
    if name == "zero-bubble":
        forward, inputs, weights = (durations[kind] for kind in _THIRDS)
        makespan = (m + p - 1) * (forward + inputs) + max(m - p + 1, 1) * weights
        return (makespan - m * (forward + inputs + weights)) / makespan
    return (p - 1) / ({"gpipe": 1, "1f1b": 1, "interleaved": v}[name] * m + p - 1)


class StageMessage(NamedTuple):
    """A tensor between two stages: when the computation that made it ended, and when the one that needs it began."""

    sender: int
    sent: float
    receiver: int
    used: float


def messages(timeline: Timeline) -> Iterator[StageMessage]:
    """Yield the messages between the computations of a timeline."""
    spans = [(stage, span) for stage, of_stage in enumerate(timeline.stages) for span in of_stage]
    actions = [span.action for _, span in spans]
    num_micro_batches = 1 + max(action.micro_batch for action in actions)
    shape = Shape(len(timeline.stages), num_micro_batches, 1 + max(action.chunk for action in actions))
    made = {_step(span.action, shape, stage): (stage, span.end) for stage, span in spans}
    for stage, span in spans:
        for step, crosses in _inputs(span.action, shape, stage).items():
            if crosses and step in made:
                yield StageMessage(*made[step], stage, span.start)


def without_waits(timeline: Timeline, shape: Shape, durations: Mapping[Kind, float]) -> Timeline:
    """Return the timeline of the same computations in the same order if messages took no time."""
    return simulate([[span.action for span in spans] for spans in timeline.stages], shape, durations)


_Step = tuple[str, int, int]  # the way ("F", "B", "W") through a micro-batch and a global chunk


def _step(action: Action, shape: Shape, stage: int) -> _Step:
    """Return what a computation makes available; BACKWARD and INPUT_GRADIENT both make the gradient of the input."""
    way = {Kind.FORWARD: "F", Kind.WEIGHT_GRADIENT: "W"}.get(action.kind, "B")
    return way, action.micro_batch, shape.global_chunk(stage, action.chunk)


def _inputs(action: Action, shape: Shape, stage: int) -> dict[_Step, bool]:
    """Return the computations whose results this one needs, and whether each comes from another stage."""
    way, micro_batch, chunk = _step(action, shape, stage)
    crosses = shape.num_stages > 1
    if way == "F":
        return {} if shape.is_first(stage, action.chunk) else {("F", micro_batch, chunk - 1): crosses}
    if way == "W":
        return {("B", micro_batch, chunk): False}
    own: dict[_Step, bool] = {("F", micro_batch, chunk): False}
    return own if shape.is_last(stage, action.chunk) else own | {("B", micro_batch, chunk + 1): crosses}
