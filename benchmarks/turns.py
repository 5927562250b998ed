"""One process's part in a comparison: turns of steps, timed, and what the system held and sent.

A system sleeps between its turns.  A step is timed from a barrier of its processes until its loss has been read, and,
on a GPU, all its kernels have ended; a turn from its first barrier to its last, so that work which a step leaves for
the time after its loss is seen as well.
"""

import gc
import os
import resource
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jobs import Place
from systems import PACKAGES, Work, make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Turn(NamedTuple):
    """By step: its loss and seconds on this process; and the seconds of all of the turn."""

    losses: list[float]
    seconds: list[float]
    whole: float


class Held(NamedTuple):
    """Of one process, in bytes.

    peak: resident memory over what imports took, or of tensors on a GPU, before `states` and `sent` were counted.
    states: of model states.  sent: in a step, in `messages` collectives.
    """

    peak: int
    states: int
    sent: int
    messages: int


class Contestant:
    """A system on this process, and how far it has come."""

    def __init__(self, place: Place, name: str, work: Work) -> None:
        self._place, self._work = place, work
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a package has to say is no part of the page
        warnings.simplefilter("ignore", FutureWarning)
        if name in PACKAGES:
            import_module(PACKAGES[name])
        gc.collect()
        self._imported = resident_bytes()
        self._system = make(name, place, work)
        self._steps = 0
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
            torch.cuda.reset_peak_memory_stats(place.device)  # of training; whole models are made on the way

    def described(self) -> tuple[dict[str, Any], str]:
        """Settings and version."""
        return dict(self._system.settings), self._system.version

    def turn(self, steps: int) -> Turn:
        """Some more steps."""
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
        """After the last turn: one more step is taken, and watched."""
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
        """Wait for this process's kernels, and for the others of the system."""
        self._wait()
        if dist.is_initialized():
            dist.barrier()
            self._wait()

    def _wait(self) -> None:
        if self._place.device.type == "cuda":
            torch.cuda.synchronize(self._place.device)


class Traffic(TorchDispatchMode):
    """Bytes that this process sends while it is on, by formula, alike for all systems.

    With n processes and a tensor of N bytes: N (n - 1) / n for whatever brings or takes a part of it or all, and twice
    that for an all-reduce; N for a message to one other.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self.sent = self.messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.__name__.split(".")[0].replace("_", ""), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name.startswith(("barrier", "waittensor", "recv", "monitoredbarrier")):
            return
        self.messages += 1
        # Inputs or outputs, whichever are more: a gather's outputs, a scatter's inputs.
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
    """Of this process's memory, what is resident now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
