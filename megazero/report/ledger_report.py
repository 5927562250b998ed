"""From a ledger to figures: a step's memory and traffic for the metrics file and TensorBoard, and a picture of it.

A *message* is one collective of one rank on one axis; its bytes are what this rank sends (`comm/metered.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

from megazero.comm.interface import Collective
from megazero.comm.metered import Meter
from megazero.memory.ledger_figures import CATEGORIES, StepMemory
from megazero.memory.ledger_interface import AnyLedger
from megazero.report.ledger_picture import write_picture

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

# The first step makes what later ones find: buffers, moments in use, the allocator's cache.
_FIRST_DRAWN = 2


class Traffic(NamedTuple):
    """What one rank sent by one collective."""

    messages: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class StepLedger:
    """One step of one rank.  traffic: {axis: {collective: ...}}."""

    memory: StepMemory
    traffic: Mapping[str, Mapping[str, Traffic]]

    def to_json(self) -> dict[str, Any]:
        """For the metrics file; without the timeline, which is the picture's."""
        record: dict[str, Any] = {
            "peak_bytes": self.memory.peak_bytes,
            "at_peak": dict(self.memory.at_peak),
            "peaks": dict(self.memory.peaks),
            "traffic": {
                axis: {name: {"messages": sent.messages, "bytes": sent.nbytes} for name, sent in by_collective.items()}
                for axis, by_collective in self.traffic.items()
            },
        }
        gap = self.memory.allocator_gap
        return record if gap is None else record | {"allocator_gap": gap}


def traffic(meter: Meter) -> dict[str, dict[str, Traffic]]:
    """What the meter has counted since its last reset; a rank that is alone on an axis sends nothing."""
    table: dict[str, dict[str, Traffic]] = {}
    for axis in meter.bytes_by_axis():
        counts = {name: meter.count(axis, name) for name in COLLECTIVES}
        table[axis] = {name: Traffic(count.calls, count.nbytes) for name, count in counts.items() if count.nbytes}
    return {axis: by_collective for axis, by_collective in table.items() if by_collective}


class LedgerReport:
    """Closes a rank's ledger at every step's end; draws the second step, and every `interval`-th into the same file.

    ledger: `NullLedger()` for a run that keeps none.  folder: where pictures go; None for none.
    Raises DataError when a picture can't be written.
    """

    def __init__(self, ledger: AnyLedger, meter: Meter, *, rank: int, folder: Path | None, interval: int) -> None:
        self._ledger = ledger
        self._meter = meter
        self._rank = rank
        self._folder = folder
        self._interval = interval
        self._num_steps = 0

    def begin_step(self) -> None:
        """Leave out what happened between the steps."""
        self._ledger.reset()

    def end_step(self, iteration: int) -> dict[str, Any]:
        """This rank's figures of the step that ends, as `StepLedger.to_json`; empty where no ledger is kept."""
        memory = self._ledger.take()
        if memory is None:
            return {}
        self._num_steps += 1
        step = StepLedger(memory, traffic(self._meter))
        record = step.to_json()
        if self._folder is not None and (self._num_steps == _FIRST_DRAWN or iteration % self._interval == 0):
            path = self._folder / f"ledger_rank{self._rank:04d}.html"
            write_picture(path, memory, record["traffic"], title=f"Rank {self._rank}, iteration {iteration}")
        return record


def ledger_scalars(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """TensorBoard's scalars, from every rank's `end_step`; none where no ledger is kept.

    Memory is that of the rank with the highest peak, at its peak, so that categories add up; traffic is the most that
    any rank sent.
    """
    kept = [record for record in ranks if record]
    if not kept:
        return {}
    fullest = max(kept, key=lambda record: int(record["peak_bytes"]))
    scalars: dict[str, float] = {f"memory/{name}": fullest["at_peak"][name] for name in CATEGORIES}
    scalars["memory/peak"] = fullest["peak_bytes"]
    for record in kept:
        for axis, by_collective in record["traffic"].items():
            for collective, sent in by_collective.items():
                for unit, amount in sent.items():
                    tag = f"traffic/{axis}/{collective}-{unit}"
                    scalars[tag] = max(scalars.get(tag, 0), amount)
    return scalars
