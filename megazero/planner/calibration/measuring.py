"""Measures functions on all processes of a job at once, and counts the kernels that they run."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.comm.interface import Communicator
from megazero.parallel.nodes import Nodes
from megazero.planner.dry.operations import Operations
from megazero.planner.trace import Operation


class SmallModel(NamedTuple):
    """A model that is trained for a few steps: its sizes, the samples of a micro-batch, their tokens, its dropout."""

    hidden: int
    heads: int
    length: int
    micro_batch: int
    vocabulary: int
    layers: int = 2
    dropout: float = 0.0


@dataclass(frozen=True)
class Effort:
    """The repetitions and sizes of measurements.

    A repetition is longer than the turns that the system gives to processes which share a core.

    seconds: of one repetition at the least.  repetitions: of each measurement.
    sizes: cube roots of m n k of products.  lengths: tokens of a sequence of attention.  nbytes: of what other kernels
    move.  messages: bytes of messages; the last one is the size of copies and files too.
    models: those whose training steps are timed on a CPU, the smallest first.  held_out: those whose steps are compared
    with what the others' figures predict.
    error: of predictions from these figures, relative.
    """

    seconds: float = 0.05
    repetitions: int = 5
    sizes: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    lengths: tuple[int, ...] = (16, 64, 256, 1024)
    messages: tuple[int, ...] = tuple(1 << n for n in range(10, 27, 2))
    nbytes: tuple[int, ...] = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
    models: tuple[SmallModel, ...] = (
        SmallModel(64, 2, 32, 1, 512, layers=4),
        SmallModel(128, 4, 64, 1, 4096),
        SmallModel(128, 4, 256, 2, 16384),
        SmallModel(128, 2, 128, 1, 512, dropout=0.1),
        SmallModel(256, 8, 64, 1, 16384),
        SmallModel(256, 4, 128, 4, 4096),
        SmallModel(256, 8, 256, 2, 512, dropout=0.1),
        SmallModel(512, 8, 64, 1, 4096),
        SmallModel(512, 8, 64, 1, 16384, layers=1),
        SmallModel(512, 8, 256, 2, 512),
        SmallModel(768, 12, 128, 4, 4096, layers=1),
    )
    held_out: tuple[SmallModel, ...] = (
        SmallModel(128, 4, 128, 2, 4096, layers=4),
        SmallModel(256, 8, 128, 2, 16384, layers=4),
        SmallModel(512, 8, 128, 1, 512, layers=4),
    )
    error: float = 0.15

    def coarse(self) -> "Effort":
        """Return the same with every third size and short repetitions, whose figures are half as exact."""
        return replace(
            self,
            seconds=self.seconds / 25,
            repetitions=3,
            sizes=self.sizes[::3],
            lengths=self.lengths[::3],
            messages=self.messages[::3],
            nbytes=self.nbytes[::3],
            models=self.models[::6],
            held_out=self.held_out[:1],
            error=2 * self.error,
        )


ON_A_GPU = Effort(
    sizes=(128, 256, 512, 1024, 2048, 4096, 8192),
    lengths=(256, 1024, 4096),
    messages=tuple(1 << n for n in range(12, 31, 2)),
    nbytes=tuple(1 << n for n in range(14, 31, 2)),
)


class Place(NamedTuple):
    """This process: its rank among `size` that measure, its device, all of them as one communicator.

    ranks_per_node: as `Launch` has it.
    """

    rank: int
    size: int
    device: torch.device
    world: Communicator
    ranks_per_node: tuple[int, ...] = ()

    @property
    def nodes(self) -> Nodes:
        """The nodes of those that measure."""
        return Nodes(self.ranks_per_node or (self.size,))

    @property
    def per_node(self) -> int:
        """The processes of a node."""
        return self.nodes.ranks_per_node[0]


class _Counted(TorchDispatchMode):
    """A dispatch mode that notes the kernels of operator calls."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.found: list[Operation] = []
        self.operations = Operations()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        call = self.operations.of_call(func, args, kwargs or {}, result)
        if call is not None:
            self.found.append(call[0])
        return result


def kernels_of(run: Callable[[], object]) -> list[Operation]:
    """Return the kernels that a function runs."""
    counted = _Counted()
    with counted:
        run()
    return counted.found


class GroupStopwatch:
    """Measures functions on every process at once."""

    def __init__(self, place: Place, effort: Effort) -> None:
        self.place, self.effort = place, effort

    def seconds(self, run: Callable[[], object], *, alone: bool = False) -> float:
        """Return the seconds of one call, of the slowest process: the quarter of the repetitions that are faster.

        A median would count what other programs take meanwhile, the fastest what a run never has for long.
        alone: the other processes wait meanwhile, and the first one's figure counts.
        """
        is_on = self.place.rank == 0 or not alone
        for _ in range(2 * is_on):
            run()
        times = self._calls(run, is_on=is_on)
        found = [self._once(run, times, is_on=is_on) for _ in range(self.effort.repetitions)]
        return self.slowest(sorted(found)[len(found) // 4] if is_on else 0.0)

    def times(self, run: Callable[[], object]) -> list[float]:
        """Return the seconds of single calls on this process, each of which all processes begin together."""
        return [self._once(run, 1, is_on=True) for _ in range(self.effort.repetitions)]

    def average(self, figures: Sequence[float]) -> list[float]:
        """Return the processes' averages of figures."""
        values = torch.tensor(figures, dtype=torch.float64, device=self.place.device)
        self.place.world.all_reduce_scalars(values).wait()
        averages: list[float] = (values / self.place.size).tolist()
        return averages

    def _calls(self, run: Callable[[], object], *, is_on: bool) -> int:
        """Return the number of calls that take the least seconds of a repetition, the same on all processes."""
        times = 1
        while times < 1 << 16:
            seconds = self.slowest(self._time(run, times) if is_on else 0.0)
            if seconds >= self.effort.seconds:
                break
            times = max(2 * times, min(int(times * self.effort.seconds / max(seconds, 1e-7)), 16 * times))
        return times

    def _once(self, run: Callable[[], object], times: int, *, is_on: bool) -> float:
        self.place.world.barrier()
        return self._time(run, times) / times if is_on else 0.0

    def _time(self, run: Callable[[], object], times: int) -> float:
        self._finish()
        start = time.perf_counter()
        for _ in range(times):
            run()
        self._finish()
        return time.perf_counter() - start

    def _finish(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)

    def slowest(self, figure: float) -> float:
        """Return the largest of the processes' figures."""
        value = torch.tensor([figure], dtype=torch.float64, device=self.place.device)
        self.place.world.all_reduce_scalars(value, "max").wait()
        return value.item()
