"""An emulated link between the device and host memory: copies of a stated bandwidth, and a log of who waits for them.

A `SlowStream` stands in for a stream of copies on a GPU (`megazero/memory/copies.py`).  A thread of its own makes its
copies one after the other; each begins when it has been queued and the one before has ended, and takes bytes /
bandwidth seconds.  The two directions have a stream each.

On a CPU, device and host are one thread, so an arrival's `wait` blocks it as `finish` does, with two exceptions in
which a GPU would not keep the host: a device's wait that is queued while the host updates counts when the update ends,
since the device's next work comes then; and a gather that is queued `ahead`, among one rank, is made by another thread.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from megazero.comm.interface import CompletedWork, Work
from megazero.comm.local import LocalCommunicator
from megazero.memory.lease import Scratch
from megazero.optim.grouping import Grouping
from megazero.optim.inner import AdamWSettings, ElementRun, FusedAdamW, StepInputs
from megazero.timers import Timers

Way = Literal["to the host", "to the device"]
# {part of a step that the engine's timers name: the phase of the trace}.
PHASES: Mapping[str, str] = MappingProxyType(
    {
        "forward-compute": "forward",
        "backward-compute": "backward",
        "all-grads-sync": "last gradients",
        "grad-norm": "norm",
        "optimizer": "update",
    }
)
# {the engine's function that waits: what it waits for}.
REASONS: Mapping[str, str] = MappingProxyType(
    {
        "shards.keep_gradient": "a gradient's departure",
        "unreduced.send": "sums that come back to be added to",
        "unreduced.wait_until_stored": "the last gradients, before the norm",
        "homes.load": "memory of narrowed weights",
        "update.finish_copies": "master weights, before they change",
        "publish.publish": "updated partitions",
        "publish.ensure": "updated weights, before their use",
        "unit_memory.wait": "the gather of a partition",
    }
)


@dataclass
class Copy:
    """A copy of the log, in seconds on the host's clock; ended is the moment at which it may be waited for no more."""

    way: Way
    nbytes: int
    phase: str
    queued: float
    begun: float = 0.0
    ended: float = 0.0
    made: threading.Event = field(default_factory=threading.Event, repr=False)


class Wait(NamedTuple):
    """A wait of the computation for a copy; phase: that of the step in which it waited."""

    copy: Copy
    reason: str
    phase: str
    begun: float
    ended: float


class Phase(NamedTuple):
    """A phase of a step."""

    name: str
    begun: float
    ended: float


class Log:
    """What has happened on a link since the last `take`."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.waits: list[Wait] = []
        self.phases: list[Phase] = []

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase, without its waits and without the copies that the host made itself."""
        spans = sum(one.ended - one.begun for one in self.phases if one.name == phase)
        return spans - sum(wait.ended - wait.begun for wait in self.waits if wait.phase == phase)

    def nbytes(self, way: Way, *phases: str) -> int:
        """Return the bytes that went one way, queued in these phases; without any, in all."""
        return sum(copy.nbytes for copy in self.copies if copy.way == way and (not phases or copy.phase in phases))


class SlowLink:
    """A link with two streams, of `bandwidth` bytes a second each way; None: the caller makes a copy at once."""

    def __init__(self) -> None:
        self.bandwidth: float | None = None
        self.streams: tuple[SlowStream, SlowStream] = (
            SlowStream(self, "to the host"),
            SlowStream(self, "to the device"),
        )
        self.phase = "outside"
        self.gathers_after: Copy | None = None
        """The copy that gathers must follow, inside `ahead`."""
        self._log = Log()
        self._of_device: list[tuple[Copy, str]] = []  # waits of the device that were queued while the host updates

    def take(self) -> Log:
        """Return the log since the last call; copies that are still running end later."""
        taken, self._log = self._log, Log()
        return taken

    def queue(self, copy: Copy) -> None:
        self._log.copies.append(copy)

    def wait(self, copy: Copy, *, on_device: bool) -> None:
        """Wait for the end of a copy; on_device: the device's later work waits for it, and not the host."""
        reason = _waiting_function(sys._getframe(2))
        if on_device and self.phase == "update":
            self._of_device.append((copy, reason))
        else:
            self._block(copy, reason)

    def _block(self, copy: Copy, reason: str) -> None:
        if not copy.made.is_set():
            begun = time.perf_counter()
            copy.made.wait()
            self._log.waits.append(Wait(copy, reason, self.phase, begun, time.perf_counter()))

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Log what happens inside as a phase of the step."""
        before, self.phase, begun = self.phase, name, time.perf_counter()
        yield
        for copy, reason in self._of_device:
            self._block(copy, reason)
        self._of_device.clear()
        self._log.phases.append(Phase(name, begun, time.perf_counter()))
        self.phase = before


class _Gather:
    """A gather that is made by a thread of its own, after a copy."""

    def __init__(self, link: SlowLink, after: Copy, target: Tensor, source: Tensor) -> None:
        self._link, self._after = link, after
        self._values = target.detach(), source.detach()
        self._thread = threading.Thread(target=self._make, daemon=True)
        self._thread.start()

    def _make(self) -> None:
        self._after.made.wait()
        self._values[0].copy_(self._values[1])

    def wait(self) -> None:
        self._link.wait(self._after, on_device=True)
        self._thread.join()


class SlowLinkCommunicator(LocalCommunicator):
    """The communicator of one rank, whose gathers run after what they must follow."""

    def __init__(self, link: SlowLink) -> None:
        self._link = link

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        after = self._link.gathers_after
        if after is None or after.made.is_set():
            return super().all_gather_into(output, input, label)
        return CompletedWork() if output.data_ptr() == input.data_ptr() else _Gather(self._link, after, output, input)


class SlowStream:
    """One direction of a link."""

    def __init__(self, link: SlowLink, way: Way) -> None:
        self._link, self._way = link, way
        self._queue: queue.SimpleQueue[tuple[Copy, Callable[[], object], float]] = queue.SimpleQueue()
        self._free = 0.0  # when the last copy ends
        threading.Thread(target=self._serve, name=way, daemon=True).start()

    def copy(self, target: Tensor, source: Tensor) -> "SlowArrival":
        copy = Copy(self._way, target.nbytes, self._link.phase, time.perf_counter())
        self._link.queue(copy)
        bandwidth = self._link.bandwidth
        if bandwidth is None:
            target.copy_(source)
            copy.begun, copy.ended = copy.queued, time.perf_counter()
            copy.made.set()
        else:
            copy.begun = max(copy.queued, self._free)
            self._free = copy.ended = copy.begun + copy.nbytes / bandwidth
            values = target.detach(), source.detach()
            self._queue.put((copy, lambda: values[0].copy_(values[1]), copy.ended))
        return SlowArrival(self._link, copy)

    def _serve(self) -> None:
        while True:
            copy, make, end = self._queue.get()
            make()
            time.sleep(max(end - time.perf_counter(), 0.0))
            copy.made.set()


class SlowArrival:
    """The end of an emulated copy."""

    def __init__(self, link: SlowLink, copy: Copy) -> None:
        self._link, self._copy = link, copy

    def wait(self) -> None:
        self._link.wait(self._copy, on_device=True)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        self._link.gathers_after = self._copy
        yield
        self._link.gathers_after = None

    def finish(self) -> None:
        self._link.wait(self._copy, on_device=False)


class PacedAdamW(FusedAdamW):
    """AdamW whose update of an element takes so many more seconds."""

    def __init__(self, settings: AdamWSettings, grouping: Grouping, *, seconds: float, **options: Any) -> None:
        super().__init__(settings, grouping, **options)
        self._seconds = seconds

    def update(self, index: int, run: ElementRun, step: Tensor, inputs: StepInputs, *, buffers: Scratch) -> None:
        super().update(index, run, step, inputs, buffers=buffers)
        time.sleep(run.master.numel() * self._seconds)


def pace_blocks(blocks: Iterable[nn.Module], seconds: float) -> None:
    """Let a block's forward take so many more seconds, and its backward twice as many, its layers by their weights."""
    for block in blocks:
        whole = sum(parameter.numel() for parameter in block.parameters())
        for layer in block.modules():
            share = seconds * sum(parameter.numel() for parameter in layer.parameters(recurse=False)) / whole
            if share:
                layer.register_forward_pre_hook(partial(_sleep, share))
                layer.register_full_backward_pre_hook(partial(_sleep, 2 * share))


def _sleep(seconds: float, *_: object) -> None:
    time.sleep(seconds)


class PhaseTimers(Timers):
    """Timers whose parts are the phases of a link's log."""

    def __init__(self, link: SlowLink, device: torch.device, *, level: int = 0) -> None:
        super().__init__(device, level=level)
        self._link = link

    def measure(self, name: str) -> AbstractContextManager[None]:
        return self._link.in_phase(PHASES[name]) if name in PHASES else super().measure(name)


def _waiting_function(frame: FrameType | None) -> str:
    """Return what the engine's innermost function on the stack waits for."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(("megazero.zero.", "megazero.memory.homes")):
            function = f"{module.rpartition('.')[2]}.{frame.f_code.co_name}"
            return REASONS.get(function, function)
        frame = frame.f_back
    return "outside the engine"
