"""Simulates the ranks of a job that differ: who computes, sends and waits when.  Pure.

Every pipeline stage stands for all ranks with its coordinate, which do the same at the same time.  A stage has a
*host*, which issues kernels and messages, a *device*, which runs kernels in order, and *channels*, each of which
carries its messages in order, beside the device.  On a CPU host and device are one.

A stage is a list of *steps*; three of them, of two micro-batches' backward and a bucket sent beside the second:

    device   |---B0---|-------B1-------|    |--update--|
    dp                |---bucket---|---bucket---|
                      Send             Send    Wait

A message between stages, or a collective of several stages, begins when all its ends have come to it.  A stage that
waits for one that is not there yet is left until it is; that all stages do so for ever is refused.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

BETWEEN_STAGES = "pipeline"  # the kind of messages between pipeline stages


class DeviceWork(NamedTuple):
    """Kernels that follow one another without a message between them.

    seconds: of the device.  host: the seconds in which the host issues them.  behind: the time from the issue of the
    first until the last has run, on an idle device.  products: those of the device's seconds that products take.
    """

    seconds: float
    host: float = 0.0
    behind: float = 0.0
    products: float = 0.0


class HostWork(NamedTuple):
    """Work of the host itself, for which the device does not wait; `kind`: what it counts as."""

    seconds: float
    kind: str


class Send(NamedTuple):
    """The start of a message, a collective, or a copy.

    number: its own in the stage.  channel: what carries it, in order.  kind: what waiting for it counts as.
    ends: the number of stages that it needs.  key: what these call it; None where no other stage takes part.
    host: the seconds of the host that starts it.  needs_device: it carries what the device has computed before.
    """

    number: int
    channel: str
    seconds: float
    kind: str
    host: float = 0.0
    key: Hashable = None
    ends: int = 1
    needs_device: bool = True


class Wait(NamedTuple):
    """The place where message `number` is needed, by the device or by the host."""

    number: int
    by_host: bool = False


class Enter(NamedTuple):
    """The start of an action of a schedule, or of a phase, by its name."""

    name: str


Step = DeviceWork | HostWork | Send | Wait | Enter


class LaneSpan(NamedTuple):
    """The work of a stage's device, or of a channel, from `start` to `end`; lane: "device" or the channel."""

    lane: str
    name: str
    start: float
    end: float


@dataclass
class StageTime:
    """The times of a stage in a step, in seconds.

    end: when it has finished.  busy: the device's, by kind of work: "products", "memory" for other kernels.  waits:
    those in which the device waits, by kind of message; "host" where it waits for the next kernel to be issued.
    sent: of messages, by kind, hidden or not.  parts: of the device's clock, by what has been entered, without waits
    for other stages.
    """

    end: float = 0.0
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[LaneSpan] = field(default_factory=list)

    @property
    def busy_seconds(self) -> float:
        return sum(self.busy.values())


class Deadlock(ValueError):
    """Raised where stages wait for one another for ever."""


class _Message:
    """A message in flight: its ends, the time when each of them is ready, and what is before it in their channels."""

    __slots__ = ("_after", "_ready", "end", "ends", "seconds", "start")

    def __init__(self, ends: int) -> None:
        self.ends = ends
        self.seconds = 0.0
        self.start = self.end = -1.0
        self._ready: list[float] = []
        self._after: list[_Message] = []

    def join(self, ready: float, seconds: float, before: "_Message | None") -> None:
        self._ready.append(ready)
        self.seconds = max(self.seconds, seconds)
        if before is not None and before is not self:
            self._after.append(before)

    @property
    def is_known(self) -> bool:
        """True if its end is known: all its ends have come, and what is before it in their channels has an end."""
        if self.end >= 0:
            return True
        if len(self._ready) < self.ends:
            return False
        chain = [self]
        while chain:  # a long channel is walked without recursion
            message = chain[-1]
            unknown = [other for other in message._after if other.end < 0]
            if any(len(other._ready) < other.ends for other in unknown):
                return False
            if unknown:
                chain += unknown
                continue
            message.start = max([*message._ready, *(other.end for other in message._after)])
            message.end = message.start + message.seconds
            message._after = []
            chain.pop()
        return True


class _Stage:
    """The state of a stage while it is simulated."""

    def __init__(self, steps: Iterable[Step], *, asynchronous: bool, overlap_cost: float, draws: bool) -> None:
        self._steps = iter(steps)
        self._step = next(self._steps, None)
        self.position = 0
        self.host = self.device = 0.0
        self.times = StageTime()
        self._messages: dict[int, tuple[_Message, str]] = {}
        self._last: dict[str, _Message] = {}
        self._asynchronous = asynchronous
        self._overlap_cost = overlap_cost
        self._spans = self.times.spans if draws else None
        self._action, self._entered = "", 0.0
        self._held_by = "host"  # what the device waits for where the host is late

    @property
    def is_done(self) -> bool:
        return self._step is None

    def run(self, shared: dict[Hashable, _Message]) -> bool:
        """Take steps until the end, or a wait for what is not known yet; return True if any was taken."""
        before = self.position
        while self._step is not None and self._take(self._step, shared):
            self.position += 1
            self._step = next(self._steps, None)
        if self.is_done:
            self._enter("")
            self.times.end = self.device
        return self.position > before

    def _take(self, step: Step, shared: dict[Hashable, _Message]) -> bool:
        if isinstance(step, DeviceWork):
            self._work(step)
        elif isinstance(step, Send):
            self._send(step, shared)
        elif isinstance(step, Wait):
            return self._wait(step)
        elif isinstance(step, Enter):
            self._enter(step.name)
        else:
            self.host += step.seconds
            self.times.busy[step.kind] += step.seconds
            if not self._asynchronous:
                self.device = self.host
        return True

    def _enter(self, name: str) -> None:
        self.times.parts[self._action] += self.device - self._entered
        self._action, self._entered = name, self.device

    def _work(self, work: DeviceWork) -> None:
        start = self.device
        if self._asynchronous:
            end = max(start + work.seconds, self.host + work.behind)
            self.host += work.host
        else:
            end = self.host = start + work.seconds + work.host
        self.times.busy["products"] += work.products
        self.times.busy["memory"] += work.seconds - work.products
        self.times.waits[self._held_by] += end - start - work.seconds
        self._held_by = "host"
        self._draw("device", self._action, start, end)
        self.device = end

    def _send(self, send: Send, shared: dict[Hashable, _Message]) -> None:
        self.host += send.host
        if not self._asynchronous:
            self.device = self.host
            self.times.waits["host"] += send.host
        ready = max(self.host, self.device) if send.needs_device else self.host
        message = _Message(send.ends)
        if send.key is not None:
            message = shared.setdefault(send.key, message)
        message.join(ready, send.seconds, self._last.get(send.channel))
        self._last[send.channel] = message
        self._messages[send.number] = message, send.kind
        self.times.sent[send.kind] += send.seconds

    def _wait(self, wait: Wait) -> bool:
        if wait.number not in self._messages:  # a copy of another stage waits earlier than it has begun
            return True
        message, kind = self._messages[wait.number]
        if not message.is_known:
            return False
        del self._messages[wait.number]
        if wait.by_host and self._asynchronous:
            if message.end > self.host:
                self.host, self._held_by = message.end, kind
            return True
        start = self.device
        self.device = max(start + self._delay_beside(message, start), message.end)
        self.times.waits[kind] += self.device - start
        if kind == BETWEEN_STAGES:
            self._entered += self.device - start
        if not self._asynchronous:
            self.host = self.device
        self._draw(kind, self._action, message.start, message.end)
        return True

    def _delay_beside(self, message: _Message, until: float) -> float:
        """Return by how much a message delays what the device has computed beside it, without it `until` then.

        While the message lasts the device computes a share of its work, 1 - `overlap_cost`; the rest is done behind.
        """
        beside, whole = min(until, message.end) - message.start, message.end - message.start
        share = 1.0 - self._overlap_cost
        if beside <= 0:
            return 0.0
        return self._overlap_cost * (whole if beside >= share * whole else beside / share)

    def _draw(self, lane: str, name: str, start: float, end: float) -> None:
        if self._spans is None or end <= start:
            return
        last = self._spans[-1] if self._spans else None
        if last is not None and (last.lane, last.name, last.end) == (lane, name, start):
            self._spans[-1] = last._replace(end=end)
        else:
            self._spans.append(LaneSpan(lane, name, start, end))


def simulate(
    stages: Iterable[Iterable[Step]],
    *,
    asynchronous: bool = True,
    overlap_cost: float = 0.0,
    draws: bool = False,
) -> tuple[StageTime, ...]:
    """Return the times of every stage; raise Deadlock if they wait for one another for ever.

    stages: the steps of each, which are taken one by one.
    asynchronous: the host issues ahead of the device.  overlap_cost: as in `Hardware`.  draws: record spans too.
    """
    running = [_Stage(steps, asynchronous=asynchronous, overlap_cost=overlap_cost, draws=draws) for steps in stages]
    shared: dict[Hashable, _Message] = {}
    while not all(stage.is_done for stage in running):
        if not sum(stage.run(shared) for stage in running if not stage.is_done):
            places = ", ".join(f"stage {n} at step {s.position}" for n, s in enumerate(running) if not s.is_done)
            raise Deadlock(f"these wait for ever: {places}")
    return tuple(stage.times for stage in running)


def merged(kernels: Iterable[tuple[float, float, bool]]) -> DeviceWork:
    """Return kernels (seconds on the device, seconds to issue, whether they are products) as one piece of work."""
    seconds = host = behind = products = 0.0
    for on_device, to_issue, is_product in kernels:
        host += to_issue
        seconds += on_device
        products += on_device * is_product
        # The last has run when the device has run it behind the others, or when it was issued to an idle device.
        behind = max(behind + on_device, host + on_device)
    return DeviceWork(seconds, host, behind, products)
