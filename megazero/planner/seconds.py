"""From a job's trace and a machine to the timeline of a step: what every pipeline stage does, with its seconds.  Pure.

A stage without a trace of its own does what the middle one does, in the order of its own schedule: the middle stage's
events are cut where a pipeline action begins, and the pieces are put into the other order.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from megazero.comm.mesh import ACTIVATIONS, GRADIENTS
from megazero.planner.costs import collective_seconds, copy_seconds, file_seconds, group_of, kernel_seconds
from megazero.planner.hardware import Hardware
from megazero.planner.timeline import BETWEEN_STAGES, Enter, HostWork, Send, StageTime, Step, Wait, merged, simulate
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
)
from megazero.planner.trace import Wait as TraceWait

# The order of a stage's computations: (kind's letter, micro-batch, chunk), as `Begin` has them.
Order = Callable[[int], Sequence[tuple[str, int, int]]]
_Numbered = tuple[int, Event]
_AFTER_ACTIONS: tuple[Phase, ...] = ("reduce", "update")
_COMPILED: tuple[Phase, ...] = ("forward", "recompute", "backward")


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
        """What takes the largest share."""
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
        on_host = event.home == "host"
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
    return replace(hardware, kernels=kernels, kernel_seconds=hardware.host_seconds)


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
    # Where processes share cores, one that waits leaves them to the others: the speed that fits the share that works.
    for _ in range(1 if hardware.speed(1) == 1.0 else 4):
        costs = _Costs(_at_speed(hardware, speed), fuses=fuses)
        steps = [_steps_of(job, stage, costs, hardware, order, part) for stage in range(job.stages)]
        found = simulate(steps, asynchronous=hardware.is_asynchronous, overlap_cost=hardware.overlap_cost, draws=draws)
        end = max(stage.end for stage in found)
        working = sum(stage.busy_seconds + stage.waits["host"] for stage in found) / end / len(found) if end else 1.0
        speed = hardware.speed(max(round(working * hardware.devices_per_node), 1))
    return StepTime(max(stage.end for stage in found), found)


def _at_speed(hardware: Hardware, speed: float) -> Hardware:
    """Return the machine whose devices compute so many times as fast."""
    if speed == 1.0:
        return hardware
    return replace(
        hardware,
        matrix={name: replace(one, rates=one.rates.times(speed)) for name, one in hardware.matrix.items()},
        kernels={kind: curve.times(speed) for kind, curve in hardware.kernels.items()},
        host_seconds=hardware.host_seconds / speed,
    )


def _steps_of(job: JobTrace, stage: int, costs: _Costs, hardware: Hardware, order: Order, part: Part) -> list[Step]:
    """Return the steps of one stage."""
    trace = job.of_stage(stage)
    events: Sequence[_Numbered] = list(enumerate(trace.parts[part]))
    if trace.coordinates["pp"] != stage:
        events = _reordered(events, order(stage))
    maker = _Maker(job, trace, stage, costs, hardware)
    return list(maker.steps(events))


class _Piece(NamedTuple):
    """The events of one action: the receive of its input and the wait for it, if it has one, and all others."""

    receive: list[_Numbered]
    wait: list[_Numbered]
    rest: list[_Numbered]


def _reordered(events: Sequence[_Numbered], order: Sequence[tuple[str, int, int]]) -> list[_Numbered]:
    """Return the events with the actions in another order; what is before the first and behind the last stays there.

    As in `pipeline.passes.with_exchanges`, a receive is posted one computation ahead, and waited for by its own.
    """
    starts = [place for place, (_, event) in enumerate(events) if isinstance(event, Begin)]
    if not starts:
        return list(events)
    end = next((place for place in range(starts[0], len(events)) if _ends_actions(events[place][1])), len(events))
    receives = {number for number, event in events if isinstance(event, Message) and event.collective == "receive"}
    by_number = dict(events)
    before: list[_Numbered] = []
    pieces: dict[tuple[str, int, int], _Piece] = {}
    waiting: list[_Numbered] = []
    opened: tuple[str, int, int] | None = None
    for number, event in events[:end]:
        if isinstance(event, Begin):
            opened = event.kind, event.micro_batch, event.chunk
            posted = [(wait.number, by_number[wait.number]) for _, wait in waiting if isinstance(wait, TraceWait)]
            pieces[opened] = _Piece(posted, waiting, [(number, event)])
            waiting = []
        elif number in receives:
            continue
        elif isinstance(event, TraceWait) and event.number in receives:
            waiting.append((number, event))
        elif opened is None:
            before.append((number, event))
        else:
            pieces[opened].rest.append((number, event))
    known = [pieces.pop(action) for action in order if action in pieces]
    known += pieces.values()
    found = [*before, *known[0].receive]
    for piece, following in zip_longest(known, known[1:]):
        found += [*(following.receive if following else []), *piece.wait, *piece.rest]
    return [*found, *events[end:]]


def _ends_actions(event: Event) -> bool:
    return _phase_of(event) in _AFTER_ACTIONS


def _phase_of(event: Event) -> Phase:
    return "" if isinstance(event, TraceWait | Begin) else event.where.phase


class _Maker:
    """Makes the steps of one stage from its events."""

    def __init__(self, job: JobTrace, trace: RankTrace, stage: int, costs: _Costs, hardware: Hardware) -> None:
        self._job = job
        self._trace = trace
        self._stage = stage
        self._costs = costs
        self._hardware = hardware
        self._counts: dict[Hashable, int] = {}
        self._awaited: set[int] = set()
        self._sent: list[int] = []

    def steps(self, events: Sequence[_Numbered]) -> Iterator[Step]:
        kernels: list[tuple[float, float, bool]] = []
        phase: Phase = ""
        for number, event in events:
            at = _phase_of(event)
            if at != phase and at in _AFTER_ACTIONS:
                if kernels:
                    yield merged(kernels)
                    kernels = []
                yield Enter(at)
            phase = at or phase
            if isinstance(event, Compute) and event.home == "device":
                kernels.append((*self._costs.kernel(event), event.operation.flops > 0))
                continue
            if kernels:
                yield merged(kernels)
                kernels = []
            yield self._other(number, event)
        if kernels:
            yield merged(kernels)
        yield from (Wait(number) for number in self._sent if number not in self._awaited)

    def _other(self, number: int, event: Event) -> Step:
        if isinstance(event, Compute):
            return HostWork(sum(self._costs.kernel(event)), "update on the host")
        if isinstance(event, TraceWait):
            self._awaited.add(event.number)
            return Wait(event.number, event.waiter == "host")
        if isinstance(event, Begin):
            return Enter(f"{event.kind}{event.micro_batch if event.micro_batch >= 0 else ''}")
        self._sent.append(number)
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
            return Send(number, event.channel, seconds, kind, host)
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
