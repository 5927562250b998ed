"""Section 6.3: a training that memory in pieces ends, and that defragmentation (MD) lets go on.

The training is a small one and runs as it is.  It has two batches in flight: the forward of one runs before the
backward of the one before.  Batches differ in length, so that the activation checkpoints of a batch that has been
through backward leave holes between those of the other, too small for those of a longer one.  Its device is a model of
PyTorch's caching allocator with a limit (`planner/dry/allocator.py`), whose segments short-lived activations share with
checkpoints.

With MD checkpoints lie in an arena with room for two batches of middle length, where a longer one fits once the other
has moved, and gradients in another.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.activations.context import recompute
from megazero.comm.metered import Meter
from megazero.comm.startup import dry_mesh
from megazero.errors import MemoryLimitError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.initialize import initialize
from megazero.memory.address_book import AddressBook
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.parallel.topology import Topology
from megazero.planner.dry.allocator import ROUNDING, CachingAllocator
from megazero.planner.dry.rank import CPU
from megazero.planner.paper.rows import PaperFigure, Table

MIB = 1 << 20
_LAYERS, _WIDTH, _INNER, _TOKENS = 4, 256, 1024, 256
_LENGTHS = (4, 2, 6, 2, 5, 3)  # of the batches of a step, in units of _TOKENS
# The memory of the device on which the training runs with MD alone.
DEVICE_MIB = 95


class Trained(NamedTuple):
    """The memory that a training took: the most bytes in segments that were in use at once, and at once alive.

    compactions: of arenas; outside: the tensors that found no room in theirs.
    """

    needed: int
    alive: int
    compactions: int
    outside: int
    losses: tuple[float, ...]


class Tower(nn.Module):
    """Blocks of two layers whose activations are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(_WIDTH, _INNER) for _ in range(_LAYERS))
        self.down = nn.ModuleList(nn.Linear(_INNER, _WIDTH) for _ in range(_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = recompute(_block, up, down, x)
        return x.square().mean()


def _block(up: nn.Module, down: nn.Module, x: Tensor) -> Tensor:
    mixed: Tensor = x + down(F.gelu(up(x)))
    return mixed


def train(*, defragments: bool, compacts: bool = True, limit: int | None = None) -> Trained:
    """Take a step on a device of `limit` bytes; raise MemoryLimitError if they do not fit.

    defragments: MD, with arenas whose blocks move if it `compacts`.
    """
    kept = {"contiguous_checkpointing": True, "number_checkpoints": 2 * _LAYERS} if defragments else {}
    config = {
        "gradient_accumulation_steps": len(_LENGTHS),
        "optimizer": {"lr": 1e-3},
        "zero": {"zero_stage": 2, "contiguous_gradients": defragments},
        "activations": kept,
    }
    device = CachingAllocator(limit)
    ledger = _PiecesLedger(device, compacts=compacts)
    torch.manual_seed(1)
    with ledger:
        engine = initialize(Tower(), config, _mesh(), ledger=ledger)
        losses = tuple(_step(engine))
        alive = ledger.take().peak_bytes
        engine.close()
    arenas = [book.statistics for book in ledger.books]
    compactions = sum(each.num_compactions for each in arenas)
    return Trained(device.needed_peak, alive, compactions, sum(each.failed_requests for each in arenas), losses)


def _step(engine: DataParallelEngine) -> list[float]:
    """Take a step in which a batch's backward follows the forward of the next batch; return the batches' losses."""
    losses: list[float] = []
    waiting: list[Tensor] = []
    for length in _LENGTHS:
        waiting.append(engine(torch.randn(length * _TOKENS, _WIDTH)))
        if len(waiting) == 2:
            losses.append(_backward(engine, waiting.pop(0)))
    losses.append(_backward(engine, waiting.pop()))
    engine.step()
    return losses


def _backward(engine: DataParallelEngine, loss: Tensor) -> float:
    engine.backward(loss)
    return float(loss.item())


def _mesh() -> Any:
    return dry_mesh(Topology(), 0, CPU, FusedBuffers(0, CPU), is_gpu=False, meter=Meter())


class _PiecesLedger(Ledger):
    """A ledger that keeps the address books of all arenas; their blocks move if it `compacts`."""

    def __init__(self, device: CachingAllocator, *, compacts: bool) -> None:
        super().__init__(CPU, rounds_to=ROUNDING, watch=device.changed)
        self._compacts = compacts
        self.books: list[AddressBook] = []

    def address_book(self, capacity: int, *, alignment: int) -> AddressBook:
        self.books.append(AddressBook(capacity, alignment=alignment, compacts=self._compacts))
        return self.books[-1]


def section_6_3() -> Table:
    """Return the memory that the training needs in three ways, and whether it runs on a device of DEVICE_MIB."""
    ways: dict[str, dict[str, bool]] = {
        "MD": {"defragments": True},
        "MD, but nothing moves": {"defragments": True, "compacts": False},
        "without MD": {"defragments": False},
    }
    rows = []
    for name, settings in ways.items():
        found = train(**settings)
        try:
            train(**settings, limit=DEVICE_MIB * MIB)
            end = f"runs in {DEVICE_MIB} MiB"
        except MemoryLimitError:
            end = f"ends in {DEVICE_MIB} MiB"
        note = f"{found.alive / MIB:.1f} MiB alive, {found.compactions} compactions; {end}"
        rows.append(PaperFigure(name, found.needed / MIB, None, "MiB", note=note))
    return Table("Section 6.3: memory of a training with two batches in flight", tuple(rows))
