"""The timeline of a step, from a job's trace and a machine: what every pipeline stage does, with its seconds.  Pure.

A stage without a trace of its own does what the middle one does, in the order of its own schedule: the middle stage's
events are cut where a pipeline action begins, and the pieces are put into the other order.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from megazero.comm.mesh import ACTIVATIONS, GRADIENTS
from megazero.planner.costs import collective_seconds, copy_seconds, file_seconds, group_of, kernel_seconds
from megazero.planner.hardware import Hardware
from megazero.planner.timeline import (
    BETWEEN_STAGES,
    DeviceWork,
    Enter,
    HostWork,
    Send,
    StageTime,
    Step,
    Wait,
    merged,
    simulate,
)
from megazero.planner.trace import (
    Begin,
    Compute,
    Copy,
    Event,
    FileAccess,
    JobTrace,
    Message,
    Operation,
    Part,
    Phase,
    RankTrace,
    TraceWait,
)

# An action is a kind's letter, micro-batch and chunk, as `Begin` has them; an order has a stage's computations.
_Action = tuple[str, int, int]
Order = Callable[[int], Sequence[_Action]]
_Item = tuple[int, Event | DeviceWork | Enter]  # an event with its number, or a step of any stage
_FOR_OTHER_STAGES = (BETWEEN_STAGES, "ends", "world")  # kinds of messages that one stage comes to before another
_AFTER_ACTIONS: tuple[Phase, ...] = ("reduce", "update")
_ACROSS_NODES = "across nodes"  # the channel of all messages of a rank over its link to other nodes


@dataclass(frozen=True)
class StepTime:
    """The predicted times of one step.

    seconds: of the step.  stages: those of every pipeline stage.
    """

    seconds: float
    stages: tuple[StageTime, ...]

    @property
    def longest(self) -> StageTime:
        """The stage with the most work, by which the others wait."""
        return max(self.stages, key=lambda stage: stage.busy_seconds)

    def shares(self) -> dict[str, float]:
        """Return the shares of the step that work and waits of the longest stage take, the largest first."""
        longest = self.longest
        found = {**longest.busy}
        for kind, seconds in longest.waits.items():
            found[f"wait: {kind}"] = seconds
        left = self.seconds - sum(found.values())
        found["idle at the end"] = max(left, 0.0)
        shares = {kind: seconds / self.seconds for kind, seconds in found.items() if seconds > 0}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def parts(self) -> dict[str, float]:
        """Return the seconds of parts of the step, the longest of all stages, without waits for other stages.

        "forward" and "backward" (with recomputation) of all micro-batches, "reduce" what is left to reduce, "update".
        """
        names = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
        found: dict[str, float] = {}
        for stage in self.stages:
            own: dict[str, float] = {}
            for entered, seconds in stage.parts.items():
                name = names.get(entered[:1], entered)
                own[name] = own.get(name, 0.0) + seconds
            found |= {name: max(seconds, found.get(name, 0.0)) for name, seconds in own.items() if name}
        return found

    @property
    def idle_share(self) -> float:
        """The share of all stages' time in which they wait for other stages, 0 to 1."""
        waits = sum(stage.waits[BETWEEN_STAGES] + self.seconds - stage.end for stage in self.stages)
        return waits / self.seconds / len(self.stages) if self.seconds else 0.0

    @property
    def binding(self) -> str:
        """The part that takes the largest share."""
        return next(iter(self.shares()), "nothing")


class _Costs:
    """The seconds of events on one machine, each operation's and each message's computed once.

    fuses: the blocks are compiled.
    """

    def __init__(self, hardware: Hardware, *, fuses: bool) -> None:
        self._hardware = hardware
        self._fuses = fuses and hardware.fused < 1
        self._kernels: dict[tuple[int, bool, bool], tuple[float, float]] = {}
        self._retained: list[Operation] = []  # so that no other operation gets the number of one that is gone
        self._messages: dict[tuple[str, int, tuple[int, ...]], float] = {}

    def kernel(self, event: Compute) -> tuple[float, float]:
        """Return the seconds of a kernel, and those of the host that issues it."""
        is_fused = (
            self._fuses and not event.operation.flops and event.where.phase in ("forward", "backward", "recompute")
        )
        on_host = event.home != "device"
        key = id(event.operation), is_fused, on_host
        if key not in self._kernels:
            self._retained.append(event.operation)
            hardware = self._hardware if not on_host else _host_of(self._hardware)
            seconds = kernel_seconds(hardware, event.operation, is_fused=is_fused)
            issue = self._hardware.host_seconds * (self._hardware.fused if is_fused else 1.0)
            self._kernels[key] = seconds, issue
        return self._kernels[key]

    def message(self, event: Message, trace: RankTrace) -> float:
        nodes = trace.channels[event.channel].nodes
        if event.peer is not None and event.collective in ("send", "receive"):
            ranks = trace.channels[event.channel].ranks
            place = dict(zip(ranks, nodes, strict=True))
            nodes = (place[trace.rank], place[event.peer])
        key = event.collective, event.payload_bytes, nodes
        if key not in self._messages:
            group = group_of(nodes)
            self._messages[key] = collective_seconds(self._hardware, event.collective, event.payload_bytes, group)
        return self._messages[key]

    def copy(self, event: Copy | FileAccess) -> float:
        return (copy_seconds if isinstance(event, Copy) else file_seconds)(self._hardware, event.nbytes)


def _host_of(hardware: Hardware) -> Hardware:
    """Return the machine whose kernels run at the rate of one device's share of the host's memory."""
    rate = hardware.kernel_rate("host")
    kernels = {kind: rate for kind in hardware.kernels if kind != "attention"}
    return replace(hardware, kernels=kernels, operators={}, kernel_seconds=hardware.host_seconds)


def step_time(
    job: JobTrace,
    hardware: Hardware,
    order: Order,
    *,
    fuses: bool = False,
    part: Part = "steady step",
    draws: bool = False,
) -> StepTime:
    """Return the predicted times of a step of a job.

    order: returns the actions of a stage, for those without a trace of their own.  fuses: blocks are compiled.
    """
    speed = 1.0
    found: tuple[StageTime, ...] = ()
    # Where processes share cores, one that waits for another stage leaves its own to it: the speed that fits the share
    # that works.  The ranks of a stage wait for a message all at once, while it takes up the cores.
    for _ in range(1 if hardware.speed(1) == 1.0 else 4):
        costs = _Costs(hardware.at_speed(speed), fuses=fuses)
        steps = _steps_of(job, costs, hardware, order, part)
        found = simulate(steps, asynchronous=hardware.is_asynchronous, overlap_cost=hardware.overlap_cost, draws=draws)
        end = max(stage.end for stage in found)
        idle = sum(end - stage.end + sum(stage.waits.get(kind, 0.0) for kind in _FOR_OTHER_STAGES) for stage in found)
        working = 1.0 - idle / end / len(found) if end else 1.0
        speed = hardware.speed(max(round(working * hardware.devices_per_node), 1))
    return StepTime(max(stage.end for stage in found), found)


def _steps_of(job: JobTrace, costs: _Costs, hardware: Hardware, order: Order, part: Part) -> Iterator[Iterator[Step]]:
    """Yield the steps of every stage; those without a trace of their own take the middle one's in their own order."""
    items = {trace.rank: _items(trace.parts[part], costs) for trace in job.ranks}
    pieces = {rank: _Pieces.of(own) for rank, own in items.items()}
    for stage in range(job.stages):
        trace = job.of_stage(stage)
        is_own = trace.coordinates["pp"] == stage
        own = items[trace.rank] if is_own else pieces[trace.rank].in_order(order(stage))
        yield _Maker(job, trace, stage, costs, hardware).steps(own)


def _items(events: Sequence[Event], costs: _Costs) -> list[_Item]:
    """Return the events with their numbers, kernels that follow one another as one piece of work, phases entered."""
    found: list[_Item] = []
    kernels: list[tuple[float, float, bool]] = []
    phase: Phase = ""

    def end_kernels() -> None:
        if kernels:
            found.append((-1, merged(kernels)))
            kernels.clear()

    for number, event in enumerate(events):
        at = _phase_of(event)
        if at != phase and at in _AFTER_ACTIONS:
            end_kernels()
            found.append((-1, Enter(at)))
        phase = at or phase
        if isinstance(event, Compute) and event.home == "device":
            kernels.append((*costs.kernel(event), event.operation.flops > 0))
        else:
            end_kernels()
            found.append((number, event))
    end_kernels()
    return found


def _phase_of(event: Event) -> Phase:
    return "" if isinstance(event, TraceWait | Begin) else event.where.phase


class _Piece(NamedTuple):
    """The events of one action: the receive of its input and the wait for it, if it has one, and all else."""

    receive: list[_Item]
    wait: list[_Item]
    rest: list[_Item]


class _Pieces(NamedTuple):
    """The events of a stage before its first action, in each action, and behind the last one."""

    before: list[_Item]
    actions: dict[_Action, _Piece]
    behind: list[_Item]

    @staticmethod
    def of(items: Sequence[_Item]) -> "_Pieces":
        """Cut a stage's items where its actions begin."""
        first = next((place for place, (_, item) in enumerate(items) if isinstance(item, Begin)), len(items))
        end = next((place for place in range(first, len(items)) if isinstance(items[place][1], Enter)), len(items))
        by_number = dict(items)
        receives = {number for number, item in items if isinstance(item, Message) and item.collective == "receive"}
        before: list[_Item] = []
        actions: dict[_Action, _Piece] = {}
        waiting: list[_Item] = []
        rest = before
        for number, item in items[:end]:
            if isinstance(item, Begin):
                posted = [(wait.number, by_number[wait.number]) for _, wait in waiting if isinstance(wait, TraceWait)]
                rest = [(number, item)]
                actions[item.kind, item.micro_batch, item.chunk] = _Piece(posted, waiting, rest)
                waiting = []
            elif isinstance(item, TraceWait) and item.number in receives:
                waiting.append((number, item))
            elif number not in receives:
                rest.append((number, item))
        return _Pieces(before, actions, list(items[end:]))

    def in_order(self, order: Sequence[_Action]) -> Iterator[_Item]:
        """Yield the items with the actions in another order.

        As in `pipeline.passes.with_exchanges`, a receive is posted one computation ahead, and waited for by its own.
        """
        left = dict(self.actions)
        pieces = [left.pop(action) for action in order if action in left]
        pieces += left.values()
        yield from self.before
        yield from pieces[0].receive if pieces else ()
        for piece, following in zip_longest(pieces, pieces[1:]):
            yield from following.receive if following else ()
            yield from piece.wait
            yield from piece.rest
        yield from self.behind


class _Maker:
    """Makes the steps of one stage from its items."""

    def __init__(self, job: JobTrace, trace: RankTrace, stage: int, costs: _Costs, hardware: Hardware) -> None:
        self._job = job
        self._trace = trace
        self._stage = stage
        self._costs = costs
        self._hardware = hardware
        self._counts: dict[Hashable, int] = {}
        self._awaited: set[int] = set()
        self._sent: list[int] = []

    def steps(self, items: Iterable[_Item]) -> Iterator[Step]:
        for number, item in items:
            yield item if isinstance(item, DeviceWork | Enter) else self._other(number, item)
        yield from (Wait(number) for number in self._sent if number not in self._awaited)

    def _other(self, number: int, event: Event) -> Step:
        if isinstance(event, Compute) and event.home == "host":
            return HostWork(sum(self._costs.kernel(event)), "update on the host")
        if isinstance(event, TraceWait):
            self._awaited.add(event.number)
            return Wait(event.number, event.waiter == "host")
        if isinstance(event, Begin):
            return Enter(f"{event.kind}{event.micro_batch if event.micro_batch >= 0 else ''}")
        self._sent.append(number)
        if isinstance(event, Compute):
            seconds = sum(self._costs.kernel(event))
            return Send(number, "late update", seconds, "late update on the host", needs_device=False)
        if isinstance(event, Message):
            return self._message(number, event)
        kind = "host link" if isinstance(event, Copy) else "files"
        return Send(number, f"{kind} {event.way}", self._costs.copy(event), kind, self._hardware.host_seconds)

    def _message(self, number: int, event: Message) -> Send:
        channel = self._trace.channels[event.channel]
        seconds = self._costs.message(event, self._trace)
        crosses = " across nodes" if len(set(channel.nodes)) > 1 else ""
        kind = f"{channel.axis}{crosses}"
        host = self._hardware.link_wait_seconds
        if event.collective in ("send", "receive"):
            ranks = channel.ranks
            away = ranks.index(event.peer) - ranks.index(self._trace.rank) if event.peer is not None else 0
            other = (self._stage + away) % self._job.stages
            pair = (self._stage, other) if event.collective == "send" else (other, self._stage)
            # Links have channels in turn, so that the middle stage's may have another name than another stage's.
            carried = GRADIENTS if event.channel.startswith(GRADIENTS) else ACTIVATIONS
            key = self._numbered(("pair", carried, pair), event.collective)
            is_receive = event.collective == "receive"  # posted ahead: it needs nothing of this device
            lane = f"{carried} {pair}"
            return Send(number, lane, seconds, BETWEEN_STAGES, host, key, 2, needs_device=not is_receive)
        ends = self._stages_of(event.channel)
        if len(ends) == 1:
            # Gathers and reductions have channels of their own, and one link between nodes to share.
            return Send(number, _ACROSS_NODES if crosses else event.channel, seconds, kind, host)
        key = self._numbered(("all", event.channel, ends), "")
        return Send(number, event.channel, seconds, kind, host, key, len(ends))

    def _numbered(self, key: Hashable, way: str) -> Hashable:
        """Return the key of the next message of this name."""
        count = self._counts.get((key, way), 0)
        self._counts[key, way] = count + 1
        return key, count

    def _stages_of(self, name: str) -> tuple[int, ...]:
        """Return the pipeline stages whose ranks are in a communicator."""
        axis, stages = self._trace.channels[name].axis, self._job.stages
        if stages == 1 or self._trace.channels[name].size == 1:
            return (self._stage,)
        if axis == "ends":
            return (0, stages - 1)
        return tuple(range(stages)) if axis in ("world", "pp", "control") else (self._stage,)
