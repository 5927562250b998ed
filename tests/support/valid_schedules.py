"""Validates the actions of a step of several pipeline stages by a simulation that checks every action.

It is independent of how the actions were made, and uses nothing of a schedule but its `Shape`.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

from megazero.pipeline.schedule import Action, Kind, Shape

_ADDS_GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
_RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)
# The kind of computation of the same chunk that must be done before.
_NEEDS = {
    Kind.BACKWARD: Kind.FORWARD,
    Kind.INPUT_GRADIENT: Kind.FORWARD,
    Kind.WEIGHT_GRADIENT: Kind.INPUT_GRADIENT,
}
# For each send, the kinds of computation that give its message; one of them must be done before.
_SOURCES = {Kind.SEND_ACTIVATION: (Kind.FORWARD,), Kind.SEND_GRADIENT: _BACKWARDS}


def validate(all_stages: Sequence[Sequence[Action]], shape: Shape, *, trains: bool = True) -> None:
    """Raise ValueError unless the stages' actions, exchanges among them, do a whole step together.

    In the simulation every micro-batch must go forward (and, if `trains`, backward) through every chunk exactly once,
    after its inputs are there; gradients must be added up in the order of the micro-batches; every receive must get the
    message it is meant for; no stage may wait for ever.  With GATHERs, computations must lie inside windows.
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
    """A simulation of stages that take their actions in order; only a computation waits, for its input."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.done: defaultdict[Kind, set[_Message]] = defaultdict(set)  # micro-batch and global chunk
        self.added_up: defaultdict[int, list[int]] = defaultdict(list)  # by global chunk, the micro-batches in order
        self.sent: defaultdict[_Channel, list[_Message]] = defaultdict(list)
        self.posted: defaultdict[_Channel, list[_Message]] = defaultdict(list)
        self.tickets: dict[tuple[Kind, _Message], tuple[_Channel, int]] = {}  # a posted receive's place in its channel

    def run(self, all_stages: Sequence[Sequence[Action]]) -> None:
        """Let every stage go as far as it can until all are through; raise an error if none can move before."""
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
        """Do one action and return True, or return False while the input of a computation is not there."""
        message = (action.micro_batch, self.shape.global_chunk(stage, action.chunk))
        if message in self.done[action.kind]:
            raise ValueError(f"stage {stage} at {action}: a second time")
        if action.kind.is_computation:
            if not self.has_input(action, stage, message):
                return False
            if action.kind in _ADDS_GRADIENTS:
                self.added_up[message[1]].append(action.micro_batch)
        elif action.kind in _RECEIVES:
            channel = self.channel(action.kind, stage)
            self.tickets[action.kind, message] = (channel, len(self.posted[channel]))
            self.posted[channel].append(message)
        else:
            self.send(action, stage, message)
        self.done[action.kind].add(message)
        return True

    def has_input(self, action: Action, stage: int, message: _Message) -> bool:
        """Return True if a computation can start; raise ValueError if it never could."""
        needed = _NEEDS.get(action.kind)
        if needed is not None and message not in self.done[needed]:
            raise ValueError(f"stage {stage} at {action}: {needed.value} is not done")
        last = self.shape.num_stages * self.shape.num_chunks - 1
        if action.kind is Kind.FORWARD and message[1] > 0:
            receive = action._replace(kind=Kind.RECEIVE_ACTIVATION)
        elif action.kind in _BACKWARDS and message[1] < last:
            receive = action._replace(kind=Kind.RECEIVE_GRADIENT)
        else:
            return True
        ticket = self.tickets.get((receive.kind, message))
        if ticket is None:
            raise ValueError(f"stage {stage} at {action}: {receive} is not posted")
        channel, number = ticket
        if number >= len(self.sent[channel]):
            return False
        got = self.sent[channel][number]
        if got != message:
            told = f"gets what was sent for micro-batch {got[0]}, global chunk {got[1]}"
            raise ValueError(f"stage {stage} at {action}: {told}")
        return True

    def send(self, action: Action, stage: int, message: _Message) -> None:
        """Put a computation's output into the channel, under the name of the chunk that receives it."""
        if not any(message in self.done[kind] for kind in _SOURCES[action.kind]):
            raise ValueError(f"stage {stage} at {action}: sends what is not computed")
        step = 1 if action.kind is Kind.SEND_ACTIVATION else -1
        self.sent[self.channel(action.kind, stage)].append((message[0], message[1] + step))

    def channel(self, kind: Kind, stage: int) -> _Channel:
        """Return the channel of a stage's receives or sends of one kind."""
        following, previous = (stage + 1) % self.shape.num_stages, (stage - 1) % self.shape.num_stages
        if kind is Kind.RECEIVE_ACTIVATION:
            return previous, stage, True
        if kind is Kind.SEND_ACTIVATION:
            return stage, following, True
        return (following, stage, False) if kind is Kind.RECEIVE_GRADIENT else (stage, previous, False)

    def require_whole_step(self, *, trains: bool) -> None:
        """Raise ValueError if an action of a whole step is left out, or there is one too many."""
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
    """Raise ValueError unless all computations lie between their chunk's GATHER and RELEASE, if there are any."""
    if not any(action.kind in (Kind.GATHER, Kind.RELEASE) for action in actions):
        return
    gathered: set[int] = set()
    for position, action in enumerate(actions):
        is_in = action.chunk in gathered
        if (not is_in and (action.kind.is_computation or action.kind is Kind.RELEASE)) or (
            is_in and action.kind is Kind.GATHER
        ):
            told = f"chunk {action.chunk} is {'gathered already' if is_in else 'not gathered'}"
            raise ValueError(f"stage {stage}, action {position}, {action}: {told}")
        if action.kind is Kind.GATHER:
            gathered.add(action.chunk)
        if action.kind is Kind.RELEASE:
            gathered.discard(action.chunk)
    _require(not gathered, f"stage {stage} never releases {sorted(gathered)}")
