"""Passes over lists of actions: exchanges between pipeline stages, windows of gathered parameters, counts.  Pure.

A *pass* takes a stage's actions and gives them back with others inserted; the runtime executes the result.

`with_exchanges`, the last two of p = 3 stages under 1f1b with m = 2:

    rf0 rf1 F0 sf0 rb0 F1 sf1 rb1 B0 sb0 B1 sb1
    rf0 F0 rf1 B0 sb0 F1 B1 sb1

A receive is only posted, the computation that needs it waits; posted *before the computation in front* of that one, it
lets the wire run beside the computing, and costs one buffer.  A send doesn't wait either.  An exchange bears the
micro-batch and the local chunk of its own side's computation.

A *channel* is the way of activations, or of gradients, from one stage to one other.  Messages bear no names: the k-th
receive of a channel gets the k-th send, so both sides must list them in the same order; `validate` proves it.  Channels
are independent: a receive that waits must not hold up a send, nor gradients the activations between the same stages.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from megazero.pipeline.schedule import Action, Kind, Shape

# The exchanges around a computation: how its input comes in and its output goes out.
_RECEIVE = {
    Kind.FORWARD: Kind.RECEIVE_ACTIVATION,
    Kind.BACKWARD: Kind.RECEIVE_GRADIENT,
    Kind.INPUT_GRADIENT: Kind.RECEIVE_GRADIENT,
}
_SEND = {
    Kind.FORWARD: Kind.SEND_ACTIVATION,
    Kind.BACKWARD: Kind.SEND_GRADIENT,
    Kind.INPUT_GRADIENT: Kind.SEND_GRADIENT,
}
_ADDS_GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


def with_exchanges(computations: Iterable[Action], shape: Shape, stage: int) -> tuple[Action, ...]:
    """The computations with the receives posted one computation ahead, and the sends right behind."""
    computations = tuple(computations)
    inputs = [*(_exchange(_RECEIVE, action, shape, stage) for action in computations), ()]
    result = [*inputs[0]]
    for action, next_input in zip(computations, inputs[1:], strict=True):
        result += (*next_input, action, *_exchange(_SEND, action, shape, stage))
    return tuple(result)


def with_windows(actions: Iterable[Action]) -> tuple[Action, ...]:
    """The actions with a GATHER before and a RELEASE after each window of a chunk.

    A *window* is a run of the stage's computations in which the chunk comes up again with at most one other in between,
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
    """How often ZeRO stage 3 gathers a chunk's parameters in this step, when they stay for a window each time."""
    actions = tuple(actions)
    return sum(actions[first].chunk == chunk for first, _ in _windows(actions))


def final_backwards(actions: Iterable[Action]) -> frozenset[Action]:
    """The last BACKWARD or WEIGHT_GRADIENT of each chunk: after it the chunk's gradients are complete."""
    return frozenset({action.chunk: action for action in actions if action.kind in _ADDS_GRADIENTS}.values())


def most_in_flight(actions: Iterable[Action]) -> dict[int, int]:
    """By local chunk, the most micro-batches whose activations are held at once; see `most_in_flight_total`."""
    actions = tuple(actions)
    peaks = dict.fromkeys(sorted({action.chunk for action in actions}), 0)
    for held in _in_flight(actions):
        peaks |= {chunk: max(peaks[chunk], count) for chunk, count in held.items()}
    return peaks


def most_in_flight_total(actions: Iterable[Action]) -> int:
    """The most activations a stage holds at once, one for each micro-batch and chunk.

    Held from the forward until the BACKWARD or the WEIGHT_GRADIENT; a forward without either (evaluation) leaves none.
    """
    return max((held.total() for held in _in_flight(tuple(actions))), default=0)


def _exchange(kinds: dict[Kind, Kind], action: Action, shape: Shape, stage: int) -> tuple[Action, ...]:
    """The receive or the send of a computation; none at the ends of the model, and for what needs no neighbour."""
    kind = kinds.get(action.kind)
    if kind is None:
        return ()
    at_the_end = shape.is_first if kind in (Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT) else shape.is_last
    return () if at_the_end(stage, action.chunk) else (action._replace(kind=kind),)


def _windows(actions: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """Positions in `actions` of the first and the last computation of every window."""
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
    """By chunk, the micro-batches that are held after each forward."""
    backwards = {(action.micro_batch, action.chunk) for action in actions if action.kind in _ADDS_GRADIENTS}
    held: Counter[int] = Counter()
    for action in actions:
        if action.kind is Kind.FORWARD and (action.micro_batch, action.chunk) in backwards:
            held[action.chunk] += 1
            yield held.copy()
        elif action.kind in _ADDS_GRADIENTS:
            held[action.chunk] -= 1


def validate(all_stages: Sequence[Sequence[Action]], shape: Shape, *, trains: bool = True) -> None:
    """Raise ValueError unless the stages' actions, exchanges among them, do a whole step together.

    Simulates them: every micro-batch goes forward (and, if `trains`, backward) through every chunk exactly once, after
    what it needs; gradients are added up in the order of the micro-batches; every receive gets the message it is meant
    for; nobody waits for ever.  With GATHERs, computations lie inside windows.
    """
    simulation = _Simulation(shape)
    simulation.run(all_stages)
    simulation.require_whole_step(trains=trains)


_Message = tuple[int, int]  # a micro-batch and the global chunk that waits for it
_Channel = tuple[int, int, bool]  # from a stage, to a stage, of activations (else of gradients)
_FORWARDS_ONLY = (Kind.FORWARD, Kind.RECEIVE_ACTIVATION, Kind.SEND_ACTIVATION)


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


class _Simulation:
    """Stages take their actions in order; a computation waits for its input, nothing else waits."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.done: defaultdict[Kind, set[_Message]] = defaultdict(set)  # micro-batch and global chunk
        self.added_up: defaultdict[int, list[int]] = defaultdict(list)  # by global chunk, the micro-batches in order
        self.sent: defaultdict[_Channel, list[_Message]] = defaultdict(list)
        self.posted: defaultdict[_Channel, list[_Message]] = defaultdict(list)
        self.tickets: dict[tuple[Kind, _Message], tuple[_Channel, int]] = {}  # a posted receive's place in its channel

    def run(self, all_stages: Sequence[Sequence[Action]]) -> None:
        """Let every stage go as far as it can until all are through, or none can move."""
        _require(len(all_stages) == self.shape.num_stages, f"{len(all_stages)} stages' actions for {self.shape}")
        for stage, actions in enumerate(all_stages):
            _require_windows(actions, stage)
        left = [deque(action for action in actions if action.micro_batch >= 0) for actions in all_stages]
        moves = True
        while moves:
            moves = False
            for stage, actions in enumerate(left):
                while actions and self.take(actions[0], stage):
                    actions.popleft()
                    moves = True
        stuck = [f"stage {stage} at {actions[0]}" for stage, actions in enumerate(left) if actions]
        _require(not stuck, f"these wait for ever: {', '.join(stuck)}")

    def take(self, action: Action, stage: int) -> bool:
        """Do one action; False while a computation's input isn't there."""
        here = f"stage {stage} at {action}"
        message = (action.micro_batch, self.shape.global_chunk(stage, action.chunk))
        _require(message not in self.done[action.kind], f"{here}: a second time")
        if action.kind.is_computation:
            if not self.has_input(action, stage, message):
                return False
            if action.kind in _ADDS_GRADIENTS:
                self.added_up[message[1]].append(action.micro_batch)
        elif action.kind in _RECEIVE.values():
            channel = self.channel(action.kind, stage)
            self.tickets[action.kind, message] = (channel, len(self.posted[channel]))
            self.posted[channel].append(message)
        else:
            self.send(action, stage, message)
        self.done[action.kind].add(message)
        return True

    def has_input(self, action: Action, stage: int, message: _Message) -> bool:
        """Whether a computation can start; an error if no waiting could help."""
        here = f"stage {stage} at {action}"
        needs = {
            Kind.BACKWARD: Kind.FORWARD,
            Kind.INPUT_GRADIENT: Kind.FORWARD,
            Kind.WEIGHT_GRADIENT: Kind.INPUT_GRADIENT,
        }
        if action.kind in needs:
            _require(message in self.done[needs[action.kind]], f"{here}: {needs[action.kind].value} is not done")
        for receive in _exchange(_RECEIVE, action, self.shape, stage):
            ticket = self.tickets.get((receive.kind, message))
            if ticket is None:
                raise ValueError(f"{here}: {receive} is not posted")
            channel, number = ticket
            if number >= len(self.sent[channel]):
                return False
            got = self.sent[channel][number]
            _require(got == message, f"{here}: gets what was sent for micro-batch {got[0]}, global chunk {got[1]}")
        return True

    def send(self, action: Action, stage: int, message: _Message) -> None:
        """Put a computation's output into the channel, under the name of the chunk that receives it."""
        sources = [kind for kind, send in _SEND.items() if send is action.kind]
        ready = any(message in self.done[kind] for kind in sources)
        _require(ready, f"stage {stage} at {action}: sends what is not computed")
        step = 1 if action.kind is Kind.SEND_ACTIVATION else -1
        self.sent[self.channel(action.kind, stage)].append((message[0], message[1] + step))

    def channel(self, kind: Kind, stage: int) -> _Channel:
        """The channel of a stage's receives or sends of one kind."""
        following, previous = (stage + 1) % self.shape.num_stages, (stage - 1) % self.shape.num_stages
        return {
            Kind.RECEIVE_ACTIVATION: (previous, stage, True),
            Kind.SEND_ACTIVATION: (stage, following, True),
            Kind.RECEIVE_GRADIENT: (following, stage, False),
            Kind.SEND_GRADIENT: (stage, previous, False),
        }[kind]

    def require_whole_step(self, *, trains: bool) -> None:
        """Nothing left out, nothing too much."""
        last = self.shape.num_stages * self.shape.num_chunks - 1
        micro_batches = range(self.shape.num_micro_batches)
        for kind, chunks in {
            Kind.FORWARD: range(last + 1),
            Kind.RECEIVE_ACTIVATION: range(1, last + 1),
            Kind.SEND_ACTIVATION: range(last),
            Kind.RECEIVE_GRADIENT: range(last),
            Kind.SEND_GRADIENT: range(1, last + 1),
        }.items():
            whole = {(micro_batch, chunk) for micro_batch in micro_batches for chunk in chunks}
            wrong = self.done[kind] ^ (whole if trains or kind in _FORWARDS_ONLY else set())
            _require(not wrong, f"{kind.value} left out or too much: (micro-batch, global chunk) {sorted(wrong)}")
        for chunk in range(last + 1):
            expected = list(micro_batches) if trains else []
            _require(self.added_up[chunk] == expected, f"global chunk {chunk} adds up {self.added_up[chunk]}")
        _require(self.done[Kind.INPUT_GRADIENT] == self.done[Kind.WEIGHT_GRADIENT], "an I without its W")


def _require_windows(actions: Sequence[Action], stage: int) -> None:
    """Every computation between its chunk's GATHER and RELEASE, if there are any."""
    if not any(action.kind in (Kind.GATHER, Kind.RELEASE) for action in actions):
        return
    gathered: set[int] = set()
    for position, action in enumerate(actions):
        here = f"stage {stage}, action {position}, {action}"
        if action.kind.is_computation or action.kind is Kind.RELEASE:
            _require(action.chunk in gathered, f"{here}: chunk {action.chunk} is not gathered")
        if action.kind is Kind.GATHER:
            _require(action.chunk not in gathered, f"{here}: chunk {action.chunk} is gathered already")
            gathered.add(action.chunk)
        if action.kind is Kind.RELEASE:
            gathered.discard(action.chunk)
    _require(not gathered, f"stage {stage} never releases {sorted(gathered)}")
