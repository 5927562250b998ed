"""The part of one process in a comparison: timed turns of steps, and the bytes that the system held and sent.

A system sleeps between its turns.  A step is timed from a barrier of its processes until its loss has been read, and,
on a GPU, all its kernels have ended; a turn is timed from its first barrier to its last, so that work which a step
leaves for the time after its loss is included.
"""

import gc
import os
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from jobs import Place
from systems import PACKAGES, Work, make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.comm.messages import ExchangePart, MessageExchange
from megazero.comm.shared_memory import SharedMessages


class Turn(NamedTuple):
    """The loss and the seconds of each step of a turn on this process.  whole: the seconds of the whole turn."""

    losses: list[float]
    seconds: list[float]
    whole: float


class Held(NamedTuple):
    """The bytes that a system held and sent on one process.

    peak: the most resident memory beyond that of imports, or of tensors on a GPU, before `states` and `sent` were
    counted.  states: those of model states.  sent: those sent in a step, by `messages` collectives.
    """

    peak: int
    states: int
    sent: int
    messages: int


class Contestant:
    """A system on this process, and the number of steps that it has taken."""

    def __init__(self, place: Place, name: str, work: Work) -> None:
        self._place, self._work = place, work
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what packages print is no part of the page
        warnings.simplefilter("ignore", FutureWarning)
        if name in PACKAGES:
            import_module(PACKAGES[name])
        gc.collect()
        self._imported = resident_bytes()
        self._system = make(name, place, work)
        self._steps = 0
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
            torch.cuda.reset_peak_memory_stats(place.device)  # since making a model may take more than training

    def described(self) -> tuple[dict[str, Any], str]:
        """Return the system's settings and version."""
        return dict(self._system.settings), self._system.version

    def turn(self, steps: int) -> Turn:
        """Take and time so many more steps."""
        batches = [self._batch() for _ in range(steps)]
        losses, seconds = [], []
        self._meet()
        began = time.perf_counter()
        for batch in batches:
            self._meet()
            start = time.perf_counter()
            losses.append(self._system.step(batch))
            self._wait()
            seconds.append(time.perf_counter() - start)
        self._meet()
        return Turn(losses, seconds, time.perf_counter() - began)

    def held(self) -> Held:
        """Take one more step after the last turn, and return the bytes that the system holds and sends."""
        cuda = self._place.device.type == "cuda"
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = torch.cuda.max_memory_allocated(self._place.device) if cuda else most - self._imported
        batch, traffic = self._batch(), Traffic(self._place.launch.world_size)
        self._meet()
        self._system.states.begin()
        with traffic:
            self._system.step(batch)
            self._wait()
        states = self._system.states.end()
        return Held(peak, states, traffic.sent, traffic.messages)

    def _batch(self) -> Any:
        batch = self._work.batch(self._steps, self._place)
        self._steps += 1
        return batch

    def _meet(self) -> None:
        """Wait for this process's kernels, and for the other processes of the system."""
        self._wait()
        if dist.is_initialized():
            dist.barrier()
            self._wait()

    def _wait(self) -> None:
        if self._place.device.type == "cuda":
            torch.cuda.synchronize(self._place.device)


class Traffic(TorchDispatchMode):
    """A dispatch mode that counts the bytes that this process sends, by the same formula for all systems.

    With n processes and a whole tensor of N bytes, a collective counts as N (n - 1) / n, an all-reduce as twice that,
    and a message to one other process as N, also one of megazero's through shared memory.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self.sent = self.messages = 0

    def __enter__(self) -> Self:
        exchange = SharedMessages.exchange

        def counted(
            messages: SharedMessages, parts: Sequence[ExchangePart], label: int | None = None
        ) -> MessageExchange:
            begun = exchange(messages, parts, label)
            for part in parts if begun.nbytes else ():  # otherwise gloo's messages are counted
                self.messages += len(part.sent)
                self.sent += sum(map(_nbytes, part.sent))
            return begun

        self._counts_shared = patch.object(SharedMessages, "exchange", counted)
        self._counts_shared.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._counts_shared.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.__name__.split(".")[0].replace("_", ""), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name.startswith(("barrier", "waittensor", "recv", "monitoredbarrier")):
            return
        self.messages += 1
        # Inputs or outputs are counted, whichever are larger: a gather's outputs, a scatter's inputs.
        nbytes = max((sum(map(_nbytes, _tensors(value))) for value in args), default=0)
        if name == "send":
            self.sent += nbytes
        else:
            self.sent += (2 if name.startswith("allreduce") else 1) * nbytes * (self._ranks - 1) // self._ranks


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def resident_bytes() -> int:
    """Return the bytes of this process's memory that are resident now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
