"""Passes over lists of actions: exchanges between pipeline stages, windows of gathered parameters, counts.  Pure.

A *pass* takes a stage's actions and returns them with others inserted; the runtime executes the result.

`with_exchanges`, the last two of p = 3 stages under 1f1b with m = 2:

    rf0 rf1 F0 sf0 rb0 F1 sf1 rb1 B0 sb0 B1 sb1
    rf0 F0 rf1 B0 sb0 F1 B1 sb1

A receive is only posted, the computation that needs it waits; posted *before the computation in front* of that one, it
overlaps the transfer with that computation, and costs one buffer.  A send doesn't wait either.  An exchange has the
micro-batch and the local chunk of its own side's computation.

A *channel* carries the activations, or the gradients, from one stage to one other.  Messages have no names: the k-th
receive of a channel gets the k-th send, so both sides must list them in the same order.  Channels are
independent: a receive that waits must not hold up a send, nor gradients the activations between the same stages.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from megazero.pipeline.schedule import Action, Kind, Shape

# The exchanges around a computation: how its input comes in and its output goes out.
_RECEIVE = MappingProxyType(
    {
        Kind.FORWARD: Kind.RECEIVE_ACTIVATION,
        Kind.BACKWARD: Kind.RECEIVE_GRADIENT,
        Kind.INPUT_GRADIENT: Kind.RECEIVE_GRADIENT,
    }
)
_SEND = MappingProxyType(
    {
        Kind.FORWARD: Kind.SEND_ACTIVATION,
        Kind.BACKWARD: Kind.SEND_GRADIENT,
        Kind.INPUT_GRADIENT: Kind.SEND_GRADIENT,
    }
)
_ADDS_GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


def with_exchanges(computations: Iterable[Action], shape: Shape, stage: int) -> tuple[Action, ...]:
    """Return the computations with each receive posted one computation ahead, and each send right behind."""
    computations = tuple(computations)
    inputs = [*(_exchange(_RECEIVE, action, shape, stage) for action in computations), ()]
    result = [*inputs[0]]
    for action, next_input in zip(computations, inputs[1:], strict=True):
        result += (*next_input, action, *_exchange(_SEND, action, shape, stage))
    return tuple(result)


def with_windows(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return the actions with a GATHER before and a RELEASE after each window of a chunk.

    A *window* is a series of the stage's computations in which the chunk recurs with at most one other in between,
    the other half of a pair of a forward and a backward; so two chunks are gathered at once, never three.  A stage with
    one chunk has one window, the whole step; stage 0 of interleaved, p = 2, v = 2, m = 4, gathers chunk 0 four times:

        G F0 F1 R  G.1 F0.1 F1.1  G F2 B0.1 F3 R  B1.1 F2.1  G B0 F3.1 B1 R  B2.1 B3.1 R.1  G B2 B3 R
    """
    actions = tuple(actions)
    opening, closing = set(), set()
    for first, last in _windows(actions):
        opening.add(first)
        closing.add(last)
    result: list[Action] = []
    for position, action in enumerate(actions):
        result += [Action(Kind.GATHER, -1, action.chunk)] * (position in opening)
        result.append(action)
        result += [Action(Kind.RELEASE, -1, action.chunk)] * (position in closing)
    return tuple(result)


def num_windows(actions: Iterable[Action], chunk: int) -> int:
    """Return how often ZeRO stage 3 gathers a chunk's parameters in this step, if they are retained for each window."""
    actions = tuple(actions)
    return sum(actions[first].chunk == chunk for first, _ in _windows(actions))


def final_backwards(actions: Iterable[Action]) -> frozenset[Action]:
    """Return the last BACKWARD or WEIGHT_GRADIENT of each chunk, after which the chunk's gradients are complete."""
    return frozenset({action.chunk: action for action in actions if action.kind in _ADDS_GRADIENTS}.values())


def most_in_flight(actions: Iterable[Action]) -> dict[int, int]:
    """Return by local chunk the most micro-batches whose activations are held at once; see `most_in_flight_total`."""
    actions = tuple(actions)
    peaks = dict.fromkeys(sorted({action.chunk for action in actions}), 0)
    for held in _in_flight(actions):
        peaks |= {chunk: max(peaks[chunk], count) for chunk, count in held.items()}
    return peaks


def most_in_flight_total(actions: Iterable[Action]) -> int:
    """Return the most activations a stage holds at once, one for each micro-batch and chunk.

    They are held from the forward to the BACKWARD or WEIGHT_GRADIENT; a forward without either (evaluation) holds none.
    """
    return max((held.total() for held in _in_flight(tuple(actions))), default=0)


def _exchange(kinds: Mapping[Kind, Kind], action: Action, shape: Shape, stage: int) -> tuple[Action, ...]:
    """Return a computation's receive or send; none at the ends of the model, or where no neighbour is involved."""
    kind = kinds.get(action.kind)
    if kind is None:
        return ()
    at_the_end = shape.is_first if kind in (Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT) else shape.is_last
    return () if at_the_end(stage, action.chunk) else (action._replace(kind=kind),)


def _windows(actions: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """Yield the positions in `actions` of the first and the last computation of every window."""
    positions = [position for position, action in enumerate(actions) if action.kind.is_computation]
    open_windows: dict[int, tuple[int, int]] = {}  # by chunk: the first and the last computation so far, counted
    for count, position in enumerate(positions):
        chunk = actions[position].chunk
        first, last = open_windows.get(chunk, (count, count))
        if count - last > 2:
            yield positions[first], positions[last]
            first = count
        open_windows[chunk] = (first, count)
    yield from ((positions[first], positions[last]) for first, last in open_windows.values())


def _in_flight(actions: Sequence[Action]) -> Iterator[Counter[int]]:
    """Yield after each forward the number of micro-batches that are held, by chunk."""
    backwards = {(action.micro_batch, action.chunk) for action in actions if action.kind in _ADDS_GRADIENTS}
    held: Counter[int] = Counter()
    for action in actions:
        if action.kind is Kind.FORWARD and (action.micro_batch, action.chunk) in backwards:
            held[action.chunk] += 1
            yield held.copy()
        elif action.kind in _ADDS_GRADIENTS:
            held[action.chunk] -= 1
