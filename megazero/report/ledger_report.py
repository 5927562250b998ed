"""Reports a ledger: a step's memory and traffic for the metrics file and TensorBoard, and a picture of it.

A *message* is one collective of one rank on one axis; its bytes are what this rank sends (`comm/metered.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

from megazero.comm.interface import Collective, FileTransfer, HostTransfer
from megazero.comm.metered import Meter
from megazero.memory.ledger_figures import CATEGORIES, StepMemory
from megazero.memory.ledger_interface import AnyLedger
from megazero.report.metrics import StepPicture
from megazero.report.pictures.ledger_picture import drawing, write_picture

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
_COUNTED = (*COLLECTIVES, *get_args(HostTransfer), *get_args(FileTransfer))

# The first step is not typical: it makes buffers, optimizer moments and the allocator's cache.
_FIRST_DRAWN = 2


class Traffic(NamedTuple):
    """The messages and bytes that one rank sent by one collective."""

    messages: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class StepLedger:
    """The ledger of one step of one rank.

    traffic: {axis: {collective: ...}}.  file_bytes: those of files of states.
    """

    memory: StepMemory
    traffic: Mapping[str, Mapping[str, Traffic]]
    file_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the record for the metrics file, without the timeline, which only the picture shows."""
        record: dict[str, Any] = {
            "peak_bytes": self.memory.peak_bytes,
            "at_peak": dict(self.memory.at_peak),
            "peaks": dict(self.memory.peaks),
            "traffic": {
                axis: {name: {"messages": sent.messages, "bytes": sent.nbytes} for name, sent in by_collective.items()}
                for axis, by_collective in self.traffic.items()
            },
        }
        elsewhere = dict(self.memory.elsewhere) | {"file": self.file_bytes}
        if any(elsewhere.values()):
            record["elsewhere"] = elsewhere
        gap = self.memory.allocator_gap
        return record if gap is None else record | {"allocator_gap": gap}


def traffic(meter: Meter) -> dict[str, dict[str, Traffic]]:
    """Return the traffic counted since the meter's last reset; a rank that is alone on an axis sends nothing."""
    table: dict[str, dict[str, Traffic]] = {}
    for axis in meter.bytes_by_axis():
        counts = {name: meter.count(axis, name) for name in _COUNTED}
        table[axis] = {name: Traffic(count.calls, count.nbytes) for name, count in counts.items() if count.nbytes}
    return {axis: by_collective for axis, by_collective in table.items() if by_collective}


class LedgerReport:
    """Reports of a rank's ledger: figures of every step, a picture of the second and of every `interval`-th.

    ledger: `NullLedger()` for a run without a ledger.  folder: the folder for pictures; None for no pictures.
    run: what the pictures' titles have of the run.  file_bytes: returns the bytes of the rank's files of states.
    Raises DataError when a picture can't be written.
    """

    def __init__(
        self,
        ledger: AnyLedger,
        meter: Meter,
        *,
        rank: int,
        folder: Path | None,
        interval: int,
        run: str = "",
        file_bytes: Callable[[], int] = int,
    ) -> None:
        self._ledger = ledger
        self._meter = meter
        self._rank = rank
        self._folder = folder
        self._interval = interval
        self._run = run
        self._file_bytes = file_bytes
        self._num_steps = 0
        self._picture: StepPicture | None = None

    def begin_step(self) -> None:
        """Exclude the time between steps from the ledger."""
        self._ledger.reset()

    def end_step(self, iteration: int) -> dict[str, Any]:
        """Return this rank's figures of the step that ends, as `StepLedger.to_json`; empty without a ledger."""
        memory = self._ledger.take()
        if memory is None:
            return {}
        self._num_steps += 1
        step = StepLedger(memory, traffic(self._meter), self._file_bytes())
        record = step.to_json()
        if self._folder is not None and (self._num_steps == _FIRST_DRAWN or iteration % self._interval == 0):
            path = self._folder / f"ledger_rank{self._rank:04d}.html"
            title = f"Rank {self._rank}, iteration {iteration}" + (self._run and f": {self._run}")
            write_picture(path, memory, record["traffic"], title=title)
            self._picture = StepPicture("ledger", iteration, drawing(memory)) if self._rank == 0 else None
        return record

    def take_picture(self) -> StepPicture | None:
        """Return the picture that rank 0 has drawn since the last call; None without one."""
        picture, self._picture = self._picture, None
        return picture


def ledger_scalars(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return TensorBoard's scalars, from every rank's `end_step`; none without a ledger.

    Memory is that of the rank with the highest peak, at its peak, so that categories add up; what is elsewhere, and
    traffic, are the most that any rank has and sent.
    """
    records = [record for record in ranks if record]
    if not records:
        return {}
    fullest = max(records, key=lambda record: int(record["peak_bytes"]))
    scalars: dict[str, float] = {f"memory/{name}": fullest["at_peak"][name] for name in CATEGORIES}
    scalars["memory/peak"] = fullest["peak_bytes"]
    for record in records:
        for kind, nbytes in record.get("elsewhere", {}).items():
            scalars[f"memory/{kind}"] = max(scalars.get(f"memory/{kind}", 0), nbytes)
        for axis, by_collective in record["traffic"].items():
            for collective, sent in by_collective.items():
                for unit, amount in sent.items():
                    tag = f"traffic/{axis}/{collective}-{unit}"
                    scalars[tag] = max(scalars.get(tag, 0), amount)
    return scalars
