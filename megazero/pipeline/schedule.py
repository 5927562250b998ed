"""Schedules as data: what a pipeline stage computes in one step, as a list of actions.  Pure.

The model is cut into chunks; the global chunk c lies on pipeline stage c mod p, as its *local chunk* c // p, so each of
p stages has v of them.  A schedule orders the forwards and backwards of m micro-batches; exchanges between stages and
windows of gathered parameters are inserted by `passes`.  In the drawings `F3` is the forward of micro-batch 3 through
local chunk 0 and `F3.1` through chunk 1; a column is a unit of time, and a backward takes two.

*gpipe* (Huang et al. 2019, arXiv 1811.06965): all forwards, then all backwards; holds the activations of all m.

    stage 0   F0 F1 F2 F3  .  .  .  .  .  . B0 B0 B1 B1 B2 B2 B3 B3
    stage 1    . F0 F1 F2 F3  .  .  . B0 B0 B1 B1 B2 B2 B3 B3  .  .
    stage 2    .  . F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3  .  .  .  .

*1f1b* (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1): a stage *warms up* with one forward for each stage
behind it, then alternates.  Takes as long, but stage s holds the activations of p - s micro-batches at most.

    stage 0   F0 F1 F2  .  .  .  . B0 B0 F3 B1 B1  . B2 B2  . B3 B3
    stage 1    . F0 F1  .  . B0 B0 F2 B1 B1 F3 B2 B2  . B3 B3  .  .
    stage 2    .  . F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  .  .  .  .

*zero-bubble* (H1 of Qi et al. 2024, arXiv 2401.10241): 1f1b whose backward is cut in two.  The gradient of the input
(I) is what the stage before waits for; that of the weights (W) can wait, and stage s lets s of them wait for the end,
where it would idle.  No stage holds more than p micro-batches, counted until their W.

    stage 0   F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
    stage 1    . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2    .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

*interleaved* (Narayanan et al. 2021, section 2.2.2), p = 2, v = 2: 1f1b over chunks; p micro-batches go through one
chunk, then the same p through the next.  Idles for a v-th of the time.  Here the order alone:

    stage 0   F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3
    stage 1   F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The kind of an action; the letter stands for it in drawings of schedules."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"  # the backward as far as the previous chunk needs it; gradients of parameters are deferred
    WEIGHT_GRADIENT = "W"  # the deferred gradients of parameters
    RECEIVE_ACTIVATION = "rf"
    SEND_ACTIVATION = "sf"
    RECEIVE_GRADIENT = "rb"
    SEND_GRADIENT = "sb"
    GATHER = "G"  # ZeRO stage 3: a chunk's parameters are retained once they are gathered,
    RELEASE = "R"  # until they are released here

    @property
    def is_computation(self) -> bool:
        """True if the model computes; the other kinds move tensors."""
        return self in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class Action(NamedTuple):
    """An action on one micro-batch (-1 for GATHER and RELEASE) and one local chunk."""

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch < 0 else str(self.micro_batch)
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.value}{micro_batch}{chunk}"


@dataclass(frozen=True)
class Shape:
    """The parameters of a schedule: p pipeline stages, m micro-batches, v chunks on each stage."""

    num_stages: int
    num_micro_batches: int
    num_chunks: int = 1

    def __post_init__(self) -> None:
        assert min(self.num_stages, self.num_micro_batches, self.num_chunks) >= 1, f"{self} has a count below 1"
        assert self.num_stages > 1 or self.num_chunks == 1, f"one stage holds the model uncut, not {self}"

    def global_chunk(self, stage: int, chunk: int) -> int:
        """Return the position in the model of a stage's local chunk."""
        return chunk * self.num_stages + stage

    def is_first(self, stage: int, chunk: int) -> bool:
        """Return True if the model begins with this chunk."""
        return self.global_chunk(stage, chunk) == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        """Return True if the model ends with this chunk."""
        return self.global_chunk(stage, chunk) == self.num_stages * self.num_chunks - 1


def schedule(name: str, shape: Shape, stage: int) -> tuple[Action, ...]:
    """Return the computations of one stage in one step, in order; names as in --pipeline-schedule, without "auto".

    In every schedule each chunk has its backwards (or its WEIGHT_GRADIENTs) in the order of the micro-batches, so that
    gradients are added up in the same order, and are the same to the bit.
    """
    forwards = forward_only(shape, stage)
    last = shape.num_chunks - 1
    backwards = [Action(Kind.BACKWARD, forward.micro_batch, last - forward.chunk) for forward in forwards]
    actions = _alternate(forwards, backwards, warm_up=min(_warm_up(name, shape, stage), len(forwards)))
    return tuple(_split_backwards(actions, num_waiting=stage) if name == "zero-bubble" else actions)


def forward_only(shape: Shape, stage: int) -> tuple[Action, ...]:
    """Return the forwards of an evaluation: p micro-batches through each local chunk in turn, then the next p."""
    p, m = shape.num_stages, shape.num_micro_batches
    assert 0 <= stage < p, f"there is no stage {stage} among {p}"
    return tuple(
        Action(Kind.FORWARD, micro_batch, chunk)
        for first in range(0, m, p)
        for chunk in range(shape.num_chunks)
        for micro_batch in range(first, min(first + p, m))
    )


def _warm_up(name: str, shape: Shape, stage: int) -> int:
    """Return how many forwards a stage runs before its first pair of a forward and a backward."""
    p, m, v = shape.num_stages, shape.num_micro_batches, shape.num_chunks
    following = p - 1 - stage
    if name == "interleaved":
        assert v >= 2, f"interleaved takes turns between chunks, and {shape} has one on a stage"
        assert m % p == 0, f"interleaved takes micro-batches in groups of {p} (the stages); {m} is no multiple"
        return (v - 1) * p + 2 * following
    assert v == 1, f"{name} has one chunk on a stage, not {v}"
    return {"gpipe": m, "1f1b": following, "zero-bubble": following}[name]


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], *, warm_up: int) -> Iterator[Action]:
    """Yield `warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield from (forward, backward)
    yield from backwards[len(forwards) - warm_up :]


def _split_backwards(actions: Iterable[Action], *, num_waiting: int) -> Iterator[Action]:
    """Split BACKWARDs in two; `num_waiting` WEIGHT_GRADIENTs wait for the end, where the stage would idle."""
    waiting: deque[Action] = deque()
    for action in actions:
        if action.kind is not Kind.BACKWARD:
            yield action
            continue
        yield action._replace(kind=Kind.INPUT_GRADIENT)
        waiting.append(action._replace(kind=Kind.WEIGHT_GRADIENT))
        if len(waiting) > num_waiting:
            yield waiting.popleft()
    yield from waiting
