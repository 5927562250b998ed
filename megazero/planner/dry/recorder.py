"""Records what a dry rank does: kernels, messages, copies and waits, in order, with their places in model and step.

The recorder is shown every operation (`hollow.py`), and shows it to the ledger (`memory/ledger.py`).
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from megazero.comm.interface import FILE, Collective, Communicator, FileTransfer, HostTransfer, ReduceKind, Work
from megazero.comm.links import Links
from megazero.comm.mesh import CONTROL
from megazero.comm.metered import Meter, sent_bytes
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_figures import Phase as LedgerPhase
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology
from megazero.pipeline.schedule import Action, Kind
from megazero.pipeline.timeline import Span
from megazero.planner.dry.hollow import Operators
from megazero.planner.dry.operations import Operations
from megazero.planner.trace import (
    Begin,
    Channel,
    Compute,
    Copy,
    Event,
    FileAccess,
    Home,
    Message,
    Part,
    Phase,
    TraceWait,
    Waiter,
    Where,
)

_TORCH = torch.__file__.removesuffix("__init__.py")
_BACKWARD = (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
_OWN = (str(Path(__file__).parents[1]), sys.modules[Ledger.__module__].__file__ or "")


class SourceLine(NamedTuple):
    """A line of source code."""

    file: str
    line: int
    function: str


class Recorder:
    """The events of one rank, part by part, of the operations that it is shown.  operators: those found so far."""

    def __init__(
        self,
        ledger: Ledger,
        topology: Topology,
        rank: int,
        nodes: Nodes,
        *,
        is_gpu: bool,
        operators: Operators | None = None,
    ) -> None:
        self.parts: dict[Part, tuple[Event, ...]] = {}
        self.channels: dict[str, Channel] = {}
        self.meter = RecordingMeter(self)
        self._ledger = ledger
        self._topology, self._rank, self._nodes = topology, rank, nodes
        self._waits_on: Waiter = "device" if is_gpu else "host"
        self._operations = Operations(operators)
        self._places: dict[tuple[Phase, str], Where] = {}
        self._names: Mapping[nn.Module, str] = {}
        self._modules: list[str] = []
        self._events: list[Event] = []
        self._lines: list[tuple[CodeType, int] | None] = []  # codes, and places in them
        self._watching: dict[str, bool] = {}  # files, and whether they are torch's or of what watches
        self._action: Kind | None = None
        # By key, storages that a copy is on its way to, and the copy's number; another storage may get the key.
        self._arriving: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._last_kernel = -1  # the number of the part's last kernel
        self.is_beside = False
        """True while what is recorded runs on a thread beside the step."""

    def operation_done(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count what an operation has made, and record it."""
        self._ledger.operation_done(result)
        self._lines.append(self._line())
        call = self._operations.of_call(func, args, kwargs, result)
        if call is not None:
            self._compute(*call)

    def join(self, first: int, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Have one kernel that reads and writes these tensors once stand for the kernels from event `first` on."""
        del self._events[first:]
        self._compute(self._operations.of_kernel(name, read, written), [*read])

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Record what happens inside as a part of the trace; the ledger's figures begin anew with it."""
        self._ledger.reset()
        self._events, self._lines, self._arriving, self._action = [], [], {}, None
        self._last_kernel = -1
        self.meter.reset()
        yield
        self.parts[name] = tuple(self._events)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Record what happens inside as that of a thread beside the step, whose own waits are left out."""
        self.is_beside = True
        yield
        self.is_beside = False

    @contextmanager
    def modules_of(self, model: nn.Module) -> Iterator[None]:
        """Name events by the modules of `model` inside."""
        self._names = {module: name for name, module in model.named_modules()}
        before = register_module_forward_pre_hook(lambda module, _: self._modules.append(self._names.get(module, "")))
        after = register_module_forward_hook(lambda *_: self._modules.__delitem__(-1), always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def unit(self) -> str:
        """Return the name of the module or parameter that the rank has come to, for the ledger."""
        for name in reversed(self._modules):
            if name:
                return name
        return self.meter.flight.unit

    def line_of(self, operation: int) -> SourceLine | None:
        """Return the line that ran this operation of the part, the innermost outside of torch; None if none did."""
        found = self._lines[operation - 1] if 0 < operation <= len(self._lines) else None
        return found and SourceLine(found[0].co_filename, _line_at(*found), found[0].co_qualname)

    def begin(self, action: Action) -> None:
        """Record the start of a pipeline action."""
        self._action = action.kind
        self._events.append(Begin(action.kind.value, action.micro_batch, action.chunk))

    def message(
        self, channel: str, collective: Collective | str, peer: int | None, payload: int, sent: tuple[int, int]
    ) -> Callable[[], None]:
        """Record a message that begins, and return the function to call where it is waited for."""
        wait = self.awaiting_next("host" if channel == CONTROL else self._waits_on)
        self._events.append(Message(channel, collective, peer, payload, *sent, self._where()))
        return wait

    @property
    def num_events(self) -> int:
        """The events of the part so far."""
        return len(self._events)

    def wait(self, number: int, waiter: Waiter) -> None:
        """Record that the event of this number of the part is needed."""
        self._events.append(TraceWait(number, waiter))

    def awaiting_next(self, waiter: Waiter) -> Callable[[], None]:
        """Return the function to call where the event that is recorded next is waited for."""
        events, number = self._events, len(self._events)

        def wait() -> None:
            if events is self._events and not self.is_beside:
                events.append(TraceWait(number, waiter))

        return wait

    def computing_after_next(self) -> Callable[[], bool]:
        """Return a function that is True once a kernel, or another part, follows the event that is recorded next."""
        events, number = self._events, len(self._events)
        return lambda: events is not self._events or self._last_kernel > number

    def file_access(self, way: FileTransfer, nbytes: int) -> None:
        """Record bytes that a file is given or asked for."""
        self._events.append(FileAccess(way, nbytes, self._where()))

    def stored(self, nbytes: int) -> None:
        """Record a copy from the device to the host that no operation makes in a dry run."""
        self._events.append(Copy("store", nbytes, self._where()))

    def channel(self, key: str, axis: str) -> Channel:
        """Return the description of this rank's communicator, which the trace has from now on."""
        if key not in self.channels:
            ranks = tuple(self._topology.group_of(self._rank, axis))
            self.channels[key] = Channel(axis, ranks, tuple(self._nodes.of_all(ranks)))
        return self.channels[key]

    def _compute(self, operation: Any, inputs: Sequence[Tensor]) -> None:
        if self.is_beside:
            self._add_kernel(operation, "beside")
            return
        on_host = [self._ledger.is_elsewhere(tensor) for tensor in inputs]
        if operation.name == "copy_" and len(on_host) == 2 and on_host[0] != on_host[1]:
            target, source = inputs
            if target.dtype != source.dtype:  # the host converts first, and what travels is in the target's format
                self._add_kernel(operation, "host")
            storage = target.untyped_storage()
            self._arriving[storage._cdata] = weakref.ref(storage), len(self._events)
            self._events.append(Copy("store" if on_host[0] else "load", target.nbytes, self._where()))
            return
        home: Home = "host" if any(on_host) else "device"
        if self._arriving:
            for tensor in inputs:
                found = self._arriving.pop(tensor.untyped_storage()._cdata, None)
                if found is not None and found[0]() is not None:
                    self._events.append(TraceWait(found[1], "host" if home == "host" else self._waits_on))
        self._add_kernel(operation, home)

    def _add_kernel(self, operation: Any, home: Home) -> None:
        self._last_kernel = len(self._events)
        self._events.append(Compute(operation, self._where(), home))

    def _line(self) -> tuple[CodeType, int] | None:
        """Return the code of the innermost frame outside of torch and of what watches, and the place that it is at."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            watches = self._watching.get(code.co_filename)
            if watches is None:
                watches = self._watching[code.co_filename] = code.co_filename.startswith((_TORCH, *_OWN))
            if not watches:
                return code, frame.f_lasti
            frame = frame.f_back
        return None

    def _where(self) -> Where:
        place = self._phase(), self.unit()
        return self._places.get(place) or self._places.setdefault(place, Where(*place))

    def _phase(self) -> Phase:
        phase: LedgerPhase | None = self._ledger.current_phase
        if phase is None:
            return ""
        in_backward = phase == "backward" or self._action in _BACKWARD
        return "recompute" if in_backward and phase in ("forward", "backward") and self._modules else phase


class RecordingMeter(Meter):
    """A meter whose communicators are recorded as well, and accesses to files."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def record(
        self, axis: str, collective: Collective | HostTransfer | FileTransfer, nbytes: int, across: int = 0
    ) -> None:
        super().record(axis, collective, nbytes, across)
        if axis == FILE and (collective == "write" or collective == "read"):
            self._recorder.file_access(collective, nbytes)

    def communicator(self, inner: Communicator, axis: str, key: str = "", links: Links | None = None) -> Communicator:
        metered = super().communicator(inner, axis, key, links)
        return metered if inner.size == 1 else _Recorded(metered, self._recorder, axis, key or axis, links)


class _Recorded:
    """A communicator whose messages are recorded."""

    def __init__(self, inner: Communicator, recorder: Recorder, axis: str, key: str, links: Links | None) -> None:
        self._inner, self._recorder, self._key, self._links = inner, recorder, key, links
        self._ranks = recorder.channel(key, axis).ranks
        self.size, self.rank = inner.size, inner.rank

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        wait = self._begun("all_gather", output)
        return _RecordedWork(self._inner.all_gather_into(output, input, label), wait)

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        wait = self._begun("all_gather", *outputs)
        return _RecordedWork(self._inner.all_gather_coalesced(outputs, inputs, label), wait)

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        wait = self._begun("reduce_scatter", input)
        return _RecordedWork(self._inner.reduce_scatter_into(output, input, key), wait)

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        wait = self._begun("reduce_scatter", *inputs)
        return _RecordedWork(self._inner.reduce_scatter_coalesced(outputs, inputs, keys), wait)

    def all_to_all_into(self, output: Tensor, input: Tensor) -> Work:
        wait = self._begun("all_to_all", input)
        return _RecordedWork(self._inner.all_to_all_into(output, input), wait)

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        wait = self._begun("all_reduce", tensor)
        return _RecordedWork(self._inner.all_reduce(tensor, kind), wait)

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        wait = self._begun("scalars", tensor)
        return _RecordedWork(self._inner.all_reduce_scalars(tensor, kind), wait)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        wait = self._begun("broadcast", tensor, peer=source)
        return _RecordedWork(self._inner.broadcast(tensor, source), wait)

    def send(self, tensor: Tensor, to: int) -> Work:
        wait = self._begun("send", tensor, peer=to)
        return _RecordedWork(self._inner.send(tensor, to), wait)

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        wait = self._recorder.message(self._key, "receive", self._ranks[source], tensor.nbytes, (0, 0))
        return _RecordedWork(self._inner.receive_into(tensor, source), wait)

    def barrier(self) -> None:
        wait = self._recorder.message(self._key, "barrier", None, 0, (0, 0))
        self._inner.barrier()
        wait()

    def _begun(self, collective: Collective, *wholes: Tensor, peer: int | None = None) -> Callable[[], None]:
        nbytes = sum(whole.nbytes for whole in wholes)
        sent = sent_bytes(collective, nbytes, self.size)
        to = peer if collective == "send" else None
        across = 0 if self._links is None else self._links.across(collective, sent, to)
        other = None if peer is None else self._ranks[peer]
        return self._recorder.message(self._key, collective, other, nbytes, (sent, across))


class _RecordedWork(NamedTuple):
    """A work whose wait is recorded behind what the work itself does then."""

    inner: Work
    waited: Callable[[], None]

    def wait(self) -> None:
        self.waited()
        self.inner.wait()


class RecordingTrace:
    """A pipeline trace that records the starts of actions."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def computing(self, action: Action) -> AbstractContextManager[None]:
        self._recorder.begin(action)
        return nullcontext()

    def begin(self) -> None:
        return None

    def end(self) -> list[Span]:
        return []


def _line_at(code: CodeType, place: int) -> int:
    """Return the line of a place in a code's instructions."""
    return next((line for start, stop, line in code.co_lines() if start <= place < stop and line is not None), 0)
