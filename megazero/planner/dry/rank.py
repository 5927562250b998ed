"""Runs one rank of a job dry: the real code of a run on tensors without values, over groups that send nothing.

`DryRank` is the same for both doors, `run_rank` runs the rank of a run; that of a user's own module is in `module.py`.

Hollow tensors have no memory (`hollow.py`), so a rank of any size runs on a small machine; what it would allocate,
compute, send and copy is recorded (`recorder.py`, `memory/ledger.py`).  The parts of a trace run one after the other:
start-up, two steps, an evaluation and a save, the last two where the run has them.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol
from unittest.mock import patch

import torch

from megazero.activations.recompute_plan import LOGITS_CHUNK_BYTES
from megazero.checkpoint.background import host_copies
from megazero.checkpoint.engine_state import saved_fragments
from megazero.comm.mesh import Mesh
from megazero.comm.metered import Count
from megazero.comm.startup import dry_mesh
from megazero.comm.wires.shard_group import Wires
from megazero.config import derived
from megazero.config.run import RunConfig
from megazero.data.loader import MicroBatch, StepBatch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_figures import HostMemoryKind, StepMemory
from megazero.model import initial_values
from megazero.model.compiled import is_compiled
from megazero.parallel.nodes import Nodes
from megazero.parallel.param_spec import StateFragment
from megazero.parallel.topology import Topology
from megazero.planner.dry.allocator import ROUNDING, AllocatorModel, CachingAllocator, ExactAllocator
from megazero.planner.dry.fused import FusedCode
from megazero.planner.dry.hollow import Hollow, Operators
from megazero.planner.dry.homes import DryHomes
from megazero.planner.dry.kernels import kernels
from megazero.planner.dry.recorder import Recorder, RecordingTrace, SourceLine
from megazero.planner.trace import Part, RankTrace
from megazero.train.build import build_components, step_context
from megazero.train.components import RunComponents
from megazero.train.context import StepContext
from megazero.train.evaluate import sums_of
from megazero.train.start.check import topology
from megazero.train.step import StepControls, training_step
from megazero.zero.engine import Engine
from megazero.zero.plan import Home, wires

CPU = torch.device("cpu")


class PlannedJob(Protocol):
    """A job of either door, as a dry rank and a plan depend on it.

    nodes: those of its ranks.  is_gpu: its devices are GPUs, else CPUs.  num_micro_batches: of one rank in one step.
    tokens: of a step, of all ranks; samples where the job has no tokens.  wires: how its data-parallel axis sends.
    attention_backend: the kernel of attention that it asks for.  compiles: parts of its model are compiled.
    """

    @property
    def nodes(self) -> Nodes: ...

    @property
    def is_gpu(self) -> bool: ...

    @property
    def world_size(self) -> int: ...

    @property
    def topology(self) -> Topology: ...

    @property
    def num_micro_batches(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def wires(self) -> Wires: ...

    @property
    def attention_backend(self) -> str: ...

    @property
    def compiles(self) -> bool: ...


@dataclass(frozen=True)
class DryJob:
    """A job that is run dry.

    config: its settings, none of them "auto"; vocab_size: before padding.  nodes: those of its ranks.
    is_gpu: its devices are GPUs, else CPUs.
    """

    config: RunConfig
    vocab_size: int
    nodes: Nodes
    is_gpu: bool

    @property
    def world_size(self) -> int:
        return self.nodes.world_size

    @property
    def topology(self) -> Topology:
        return topology(self.config, self.world_size, self.nodes)

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of one rank in one step."""
        return derived.num_micro_batches(self.config, self.world_size)

    @property
    def tokens(self) -> int:
        """The token positions of a step, of all ranks together."""
        samples = self.num_micro_batches * self.config.training.micro_batch_size * self.topology.dp
        return samples * self.config.model.seq_length

    @property
    def wires(self) -> Wires:
        return wires(self.config.zero)

    @property
    def attention_backend(self) -> str:
        return self.config.training.attention_backend

    @property
    def compiles(self) -> bool:
        """True if the run compiles on its devices, which are assumed to have what torch's compiler needs."""
        return self.is_gpu and is_compiled(
            self.config.training.compile,
            torch.device("cuda"),
            keeps_ledger=self.config.logging.ledger or self.config.logging.ledger_limit is not None,
            cuts_rows=self.config.curriculum.curriculum_learning,
            on_this_machine=False,
        )


@dataclass(frozen=True, eq=False)
class PartRecord:
    """The memory, traffic and kernels that one part of a dry rank has taken.

    memory: live bytes on the device through the part.  needed, reserved: the most bytes that the device's allocator
    needs, and takes where there is enough (`allocator.py`).  host: bytes in host memory at the part's end, by kind.
    unit, line: the module or parameter, and the line, that the rank had come to at the peak.
    traffic: {axis: {collective or copy: count}}.
    """

    memory: StepMemory
    needed: int
    reserved: int
    host: Mapping[HostMemoryKind, int]
    unit: str
    line: SourceLine | None
    traffic: Mapping[str, Mapping[str, Count]]


class RankRecord(NamedTuple):
    """A dry rank: its events, what its parts have taken, sizes of its model, and the bytes of its states in files."""

    trace: RankTrace
    parts: Mapping[Part, PartRecord]
    numel: int
    padded_numel: int
    file_bytes: int


@contextmanager
def dry_tensors(
    ledger: Ledger | None = None, operators: Operators | None = None, recorder: Recorder | None = None
) -> Iterator[Hollow]:
    """Make all tensors hollow inside, and draw no initial values, for which parameters have no memory.

    ledger: the one that counts them, which is called where a storage is resized.  operators: those found so far.
    recorder: one that records operations, and shows them to the ledger, which is not entered then.
    """
    done = None if recorder is None else recorder.operation_done
    hollow = Hollow(operators=operators) if ledger is None else Hollow(ledger.storage_resized, operators, done)
    with hollow, patch.object(initial_values, "_slices", lambda spec, seed, threads: ()):
        yield hollow


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the garbage collector off inside: it would go through all that is recorded again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DryRank:
    """One rank of a job, in the contexts that make it dry; close it with the stack.  operators: those found so far."""

    def __init__(self, job: PlannedJob, rank: int, stack: ExitStack, operators: Operators | None = None) -> None:
        self.job, self.rank = job, rank
        stack.enter_context(_without_collections())
        self.allocator: AllocatorModel = CachingAllocator() if job.is_gpu else ExactAllocator()
        self.ledger = Ledger(
            CPU,
            unit=lambda: self.recorder.unit(),
            rounds_to=ROUNDING if job.is_gpu else 1,
            watch=self.allocator.changed,
        )
        self.recorder = Recorder(self.ledger, job.topology, rank, job.nodes, is_gpu=job.is_gpu, operators=operators)
        self.homes = DryHomes(self.recorder)
        attention = kernels(is_gpu=job.is_gpu, attention=job.attention_backend)
        hollow = stack.enter_context(dry_tensors(self.ledger, operators, self.recorder))
        stack.enter_context(attention)
        stack.enter_context(self.homes.installed())
        if job.compiles:
            stack.enter_context(FusedCode(self.ledger, self.recorder, hollow))
        self.records: dict[Part, PartRecord] = {}

    def mesh(self, *, wires: Wires | None = None) -> tuple[Mesh, FusedBuffers]:
        """Make the mesh, and the buffers of its collectives; wires: by default the job's."""
        job = self.job
        buffers = FusedBuffers(0, CPU, ledger=self.ledger)
        mesh = dry_mesh(
            job.topology,
            self.rank,
            CPU,
            buffers,
            is_gpu=job.is_gpu,
            meter=self.recorder.meter,
            wires=job.wires if wires is None else wires,
            nodes=job.nodes,
        )
        return mesh, buffers

    def take(self, name: Part, run: Callable[[], object]) -> None:
        """Run a part of the trace and record what it takes."""
        if name == "steady step" and self.homes.has_late:  # the first step's late update is not that of a steady one
            self.homes.run_late()
            run()
        self.allocator.reset_peaks()
        with self.recorder.part(name):
            self.homes.run_late()
            run()
        memory = self.ledger.take()
        at = memory.peak_operation
        units = [mark.name for mark in memory.timeline.units if mark.operation < max(at, 1)]
        self.records[name] = PartRecord(
            memory=memory,
            needed=self.allocator.needed_peak,
            reserved=self.allocator.reserved_peak,
            host=memory.elsewhere,
            unit=units[-1] if units else "",
            line=self.recorder.line_of(at),
            traffic=self.recorder.meter.counts(),
        )

    def record(self, mesh: Mesh, engine: Engine) -> RankRecord:
        """Return what the parts so far have recorded."""
        layout = engine.layout
        coordinates = {axis: mesh.coordinate(axis) for axis in ("tp", "pp", "dp")}
        trace = RankTrace(self.rank, coordinates, self.recorder.channels, self.recorder.parts)
        padded = sum(section.numel for section in layout.sections)
        file_bytes = engine.model_state_bytes(Home.FILE).total
        return RankRecord(trace, self.records, layout.used_numel(trainable=True), padded, file_bytes)


def run_rank(job: DryJob, rank: int, parts: Sequence[Part], operators: Operators | None = None) -> RankRecord:
    """Run a rank through these parts, in this order, the first of which is the start-up; operators: those found."""
    with ExitStack() as stack:
        dry = DryRank(job, rank, stack, operators)
        made: list[RunComponents] = []
        dry.take("start-up", lambda: made.append(_build(dry, job)))
        core = made.pop()
        context = step_context(job.config, core)
        stack.enter_context(dry.recorder.modules_of(core.model))
        batch = made_up_batch(job)
        controls = StepControls(lr=job.config.optimizer.lr or 0.0, loss_scale=1.0)
        step = lambda: training_step(context, batch, controls)  # noqa: E731
        copies: list[StateFragment] = []  # of a save beside training, alive until the part's memory has been read
        runs: dict[Part, Callable[[], object]] = {
            "first step": step,
            "steady step": step,
            "evaluation": lambda: evaluate_once(context, batch),
            "save": lambda: _save(core, dry, copies if job.config.checkpoint.async_save else None),
        }
        for part in parts[1:]:
            dry.take(part, runs[part])
        record = dry.record(core.mesh, core.engine)
        core.engine.close()
    return record


def _build(dry: DryRank, job: DryJob) -> RunComponents:
    """Make the mesh and the components of a run; its device's defaults stand for settings that are left out."""
    activations = job.config.activations
    nbytes = activations.logits_chunk_bytes or LOGITS_CHUNK_BYTES["cuda" if job.is_gpu else "cpu"]
    training = replace(job.config.training, enable_cuda_graph=False)  # no device is there to record what it launches
    config = replace(job.config, training=training, activations=replace(activations, logits_chunk_bytes=nbytes))
    mesh, buffers = dry.mesh()
    size, ledger = job.vocab_size, dry.ledger
    core = build_components(config, mesh, buffers, vocab_size=size, ledger=ledger, compiles=job.compiles)
    return replace(core, trace=RecordingTrace(dry.recorder))


def made_up_batch(job: DryJob) -> StepBatch:
    """Return a rank's step of samples, as the loader makes them but for their values."""
    training, length = job.config.training, job.config.model.seq_length
    shape = (training.micro_batch_size, length)

    def tokens() -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    data = job.config.data

    def micro_batch(number: int) -> MicroBatch:
        mask = torch.zeros(shape) if data.eod_mask_loss else None
        positions = tokens() if data.reset_position_ids else None
        documents = torch.zeros(shape, dtype=torch.int32) if data.reset_attention_mask else None
        return MicroBatch(number, tokens(), tokens(), mask, positions, documents)

    return StepBatch(0, [micro_batch(number) for number in range(job.num_micro_batches)])


def differing_ranks(job: DryJob) -> Iterator[int]:
    """Yield the ranks of the first, a middle and the last pipeline stage, with tensor and data coordinate 0."""
    stages = job.topology.pp
    for stage in sorted({0, stages // 2, stages - 1}):
        yield job.topology.rank_of(pp=stage)


def evaluate_once(context: StepContext, batch: StepBatch) -> None:
    """Compute the loss on one global batch, as an evaluation does for each of its batches."""
    context.model.train(False)
    sums = sums_of(context, batch.micro_batches)
    context.model.train(True)
    context.mesh.world.all_reduce_scalars(sums).wait()


def _save(core: RunComponents, dry: DryRank, copies: list[StateFragment] | None) -> None:
    """Record what saving copies and writes: the state that the rank owns, in host memory box by box.

    copies: gets copies of all of it, which a save beside training makes; None for one that is waited for.
    """
    fragments = list(saved_fragments(core.engine))
    if copies is not None:
        copies.extend(host_copies(fragments, dry.ledger))
    for fragment in fragments:
        nbytes = (fragment.stop - fragment.start) * fragment.dtype.itemsize
        if dry.job.is_gpu:
            dry.recorder.stored(nbytes)
        dry.recorder.file_access("write", nbytes)
